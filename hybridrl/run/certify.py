"""``mode=certify``: verifies on this machine that a resumed training equals an unbroken one.

One run takes 2k steps without a break. A second takes 2k steps and is killed (SIGKILL to every
process, as a loss of power) at a random moment after the checkpoint of step k, then started again.
The files of both runs must be bitwise identical.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hybridrl.atomic_io import atomic_write_text
from hybridrl.checkpoint.compare import Difference, compare_runs
from hybridrl.checkpoint.fingerprint import environment_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import CertificateError, DeadlineError
from hybridrl.json_text import to_json_text
from hybridrl.run.child import Child
from hybridrl.run.display import LiveView
from hybridrl.run.line_files import last_step, read_metrics
from hybridrl.run.record import RunFolder
from hybridrl.run.resume import newest_step

_NUM_RUNS = 3
_POLL_S = 0.05
_NUM_NAMED = 5


def certify(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Run the comparison, print its certificate, and write it to ``certificate.md`` and ``.json``.

    Raises:
        CertificateError: a run failed, or the two did not end alike.
        DeadlineError: a run took longer than ``certify.timeout_s``.
    """
    uninterrupted = _short_run(config, record.folder / "uninterrupted")
    interrupted = _short_run(config, record.folder / "interrupted")
    _run(uninterrupted, record.live, "without a break")
    record.live.step(1, {})
    killed_at = _run_and_kill(interrupted, record.live, pace_s=_seconds_per_step(uninterrupted))
    record.live.step(2, {})
    _run(interrupted, record.live, "resumed")
    record.live.step(_NUM_RUNS, {})
    folders = [Path(run.trainer.run_dir) for run in (uninterrupted, interrupted)]
    findings = compare_runs(*folders)
    environment = environment_of(interrupted)
    text = describe(config, findings, killed_at=killed_at, environment=environment)
    atomic_write_text(record.folder / "certificate.md", text)
    report = {"killed_at": killed_at, "findings": [asdict(finding) for finding in findings]}
    atomic_write_text(record.folder / "certificate.json", to_json_text(report, indent=1))
    if any(finding.differences for finding in findings):
        raise CertificateError(f"the resumed run is not bitwise identical:\n{text}")
    sys.stdout.write(text)


def describe(
    config: ExperimentConfig,
    findings: Sequence[Difference],
    *,
    killed_at: str,
    environment: Mapping[str, str],
) -> str:
    """Write the certificate."""
    is_same = not any(finding.differences for finding in findings)
    k = config.certify.num_steps
    weights = f"LoRA ({config.lora.sync})" if config.lora.enabled else "all weights"
    engines = f"{config.actor.engine} and {config.rollout.engine}"
    algorithm = f"{config.algorithm.advantage} with {config.algorithm.policy_loss}"
    lines = [
        f"# {'Certificate: resumed, bitwise identical' if is_same else 'NOT bitwise identical'}",
        "",
        f"{algorithm}, {weights}, {engines}, seed {config.seed}. {2 * k} steps without "
        f"a break, against {2 * k} steps {killed_at} and resumed from step {k}.",
        "",
        *(
            f"- {'same' if not f.differences else 'DIFFERENT'}: {f.what}, {f.amount}"
            for f in findings
        ),
        *(f"  - {text}" for f in findings for text in f.differences[:_NUM_NAMED]),
        "",
        "Holds for: " + ", ".join(f"{key} {value}" for key, value in environment.items()),
        "",
    ]
    return "\n".join(lines)


def _short_run(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """Return the same training, short, with one checkpoint in the middle."""
    k = config.certify.num_steps
    return replace(
        config,
        mode="train",
        trainer=replace(config.trainer, num_steps=2 * k, run_dir=str(folder), overwrite=False),
        checkpoint=replace(
            config.checkpoint, every_num_steps=k, keep_last=2, resume="auto", max_restarts=0
        ),
        tracking=replace(config.tracking, live="lines", trackers=()),
    )


def _run(
    config: ExperimentConfig,
    live: LiveView,
    label: str,
    *,
    until: Callable[[], bool] = lambda: False,
    then_wait_s: float = 0.0,
) -> str:
    """Run to the end, or kill the run some seconds after ``until`` returns True.

    Returns:
        The end of its output.
    """
    run_folder = Path(config.trainer.run_dir)
    folder = run_folder.with_suffix(".process")
    folder.mkdir(exist_ok=True)
    deadline = time.monotonic() + config.certify.timeout_s
    shown = -1
    child = Child(config, folder=folder)
    try:
        while child.poll() is None and not until():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the run {label} took longer than certify.timeout_s="
                    f"{config.certify.timeout_s:g} s; its last output:\n{child.tail()}"
                )
            if shown != (shown := last_step(run_folder)):
                live.phase(f"{label}: step {shown} of {config.trainer.num_steps}")
            time.sleep(_POLL_S)
        if child.poll():
            raise CertificateError(f"the run {label} failed; its last output:\n{child.tail()}")
        time.sleep(then_wait_s)
    finally:
        child.kill()
    return child.tail()


def _run_and_kill(config: ExperimentConfig, live: LiveView, *, pace_s: float) -> str:
    """Kill a run at a random moment after its checkpoint; return that moment."""
    k = config.certify.num_steps
    wait_s = random.Random(config.seed).uniform(0.0, pace_s * (k - 1))
    output = _run(
        config,
        live,
        "to be killed",
        until=lambda: newest_step(config) > 0,
        then_wait_s=wait_s,
    )
    if not newest_step(config):
        raise CertificateError(
            f"the run made no checkpoint of step {k}; its last output:\n{output}"
        )
    num_done = last_step(Path(config.trainer.run_dir))
    return f"killed in step {num_done + 1}, {wait_s:.2f} s after the checkpoint"


def _seconds_per_step(config: ExperimentConfig) -> float:
    rows = read_metrics(Path(config.trainer.run_dir))
    return sum(row.get("time/step_s", 0.0) for row in rows) / max(1, len(rows))
