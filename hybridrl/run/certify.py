"""``mode=certify``: proves on this machine that this training resumes as if it had never stopped.

2k steps without a break; then 2k steps that are killed (SIGKILL to every process, as a loss of
power) at a random moment after the checkpoint of step k, and started again. All that both runs
left is compared bit by bit.
"""

from __future__ import annotations

import json
import logging
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
from hybridrl.run.record import RunFolder
from hybridrl.run.resume import checkpoint_store

log = logging.getLogger(__name__)

_NUM_RUNS = 3
_POLL_S = 0.05
_NUM_NAMED = 5


def certify(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Make the proof, print its certificate, and write it to ``certificate.md`` and ``.json``.

    Raises:
        CertificateError: a run failed, or the two did not end alike.
        DeadlineError: a run took longer than ``certify.timeout_s``.
    """
    uninterrupted = _rehearsal(config, record.folder / "uninterrupted")
    broken = _rehearsal(config, record.folder / "interrupted")
    _run(uninterrupted, record.live, "without a break")
    record.live.step(1, {})
    killed_at = _run_and_kill(broken, record.live, pace_s=_seconds_per_step(uninterrupted))
    record.live.step(2, {})
    _run(broken, record.live, "resumed")
    record.live.step(_NUM_RUNS, {})
    folders = [Path(run.trainer.run_dir) for run in (uninterrupted, broken)]
    findings = compare_runs(*folders)
    text = describe(config, findings, killed_at=killed_at, environment=environment_of(broken))
    atomic_write_text(record.folder / "certificate.md", text)
    report = {"killed_at": killed_at, "findings": [asdict(finding) for finding in findings]}
    atomic_write_text(record.folder / "certificate.json", to_json_text(report, indent=1))
    if any(finding.differences for finding in findings):
        raise CertificateError(f"resuming was not bit by bit:\n{text}")
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
    lines = [
        f"# {'Certificate: resumed bit by bit' if is_same else 'NOT bit by bit'}",
        "",
        f"{_describe(config)}. {2 * k} steps without a break, against {2 * k} steps {killed_at} "
        f"and resumed from step {k}.",
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


def _describe(config: ExperimentConfig) -> str:
    learnt = f"LoRA ({config.lora.sync})" if config.lora.enabled else "all weights"
    engines = f"{config.actor.engine} and {config.rollout.engine}"
    return f"{config.algorithm.name}, {learnt}, {engines}, seed {config.seed}"


def _rehearsal(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
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


def _run(config: ExperimentConfig, live: LiveView, label: str) -> None:
    child = _start(config)
    try:
        _watch(child, config, live, label=label, until=lambda: False)
        if child.poll() != 0:
            raise CertificateError(f"the run {label} failed; it said:\n{child.tail()}")
    finally:
        child.kill()


def _run_and_kill(config: ExperimentConfig, live: LiveView, *, pace_s: float) -> str:
    """Kill a run at a random moment after its checkpoint; says when that was."""
    k = config.certify.num_steps
    shelf = checkpoint_store(config)
    wait_s = random.Random(config.seed).uniform(0.0, pace_s * (k - 1))
    child = _start(config)
    try:
        _watch(child, config, live, label="to be killed", until=lambda: shelf.newest() is not None)
        time.sleep(wait_s)
    finally:
        child.kill()
    if shelf.newest() is None:
        raise CertificateError(f"the run made no checkpoint of step {k}; it said:\n{child.tail()}")
    return f"killed in step {_steps_done(config) + 1}, {wait_s:.2f} s after the checkpoint"


def _watch(
    child: Child,
    config: ExperimentConfig,
    live: LiveView,
    *,
    label: str,
    until: Callable[[], bool],
) -> None:
    """Show how far a run is until it has ended, or ``until`` says so."""
    deadline = time.monotonic() + config.certify.timeout_s
    shown = -1
    while child.poll() is None and not until():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the run {label} took longer than certify.timeout_s="
                f"{config.certify.timeout_s:g} s; it said:\n{child.tail()}"
            )
        if shown != (shown := _steps_done(config)):
            live.phase(f"{label}: step {shown} of {config.trainer.num_steps}")
        time.sleep(_POLL_S)


def _start(config: ExperimentConfig) -> Child:
    folder = Path(config.trainer.run_dir).with_suffix(".process")
    folder.mkdir(exist_ok=True)
    return Child(config, folder=folder)


def _steps_done(config: ExperimentConfig) -> int:
    """Return the number of the last step in ``metrics.jsonl``."""
    path = Path(config.trainer.run_dir) / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return max(0, len(lines) - bool(config.eval.every_num_steps))


def _seconds_per_step(config: ExperimentConfig) -> float:
    lines = (Path(config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line).get("time/step_s", 0.0)) for line in lines]
    return sum(seconds) / max(1, len(seconds))
