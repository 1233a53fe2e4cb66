"""Kill a run at random moments, again and again; each time it must go on bit by bit.

``python -m benchmarks.kills --kills 50 --seed 0 [section.key=value ...]`` prints what was killed,
when, and how the run went on. Killed are, by turns drawn from the seed: every process at once (as a
loss of power), the driver alone, one rank alone. In the end the run is compared with one that
nobody disturbed. Exit status 1 if a bit differs, or a run ended with something else than its end or
a named error.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import Child
from hybridrl.checkpoint.compare import compare_runs
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.processes.guard import members_of

SMALL = (
    *("model.starter.hidden_size=32", "model.starter.num_layers=1"),
    *("model.starter.num_warmup_steps=4", "data.num_task_rows=64", "data.max_prompt_tokens=8"),
    *("rollout.max_response_tokens=6", "rollout.num_responses_per_prompt=4"),
    *("trainer.num_prompts_per_step=4", "trainer.num_steps=60", "eval.num_prompts=6"),
    *("cluster.num_threads_per_rank=1", "checkpoint.every_num_steps=3"),
    *("actor.optimizer.lr=1e-2", "tracking.live=lines", "tracking.trackers=[]"),
)
NAMED = re.compile(rb"^\w*(Error|Errors): ", re.MULTILINE)
TARGETS = ("everything", "driver", "rank")


@dataclass
class Killer:
    """One run after the other, killed until enough kills were made."""

    overrides: list[str]
    folder: Path
    random: random.Random
    num_kills: int
    num_done: int = 0
    num_named: int = 0

    def run_to_end(self, run_dir: Path) -> Path:
        """Start, or go on, and wait for the end."""
        child = self.start(run_dir)
        while child.poll() is None:
            time.sleep(0.1)
        child.kill()
        if child.poll() != 0:
            sys.exit(f"the run in {run_dir} failed:\n{child.tail(40)}")
        return run_dir

    def start(self, run_dir: Path) -> Child:
        overrides = [*SMALL, *self.overrides, f"trainer.run_dir={run_dir}"]
        process = run_dir.with_suffix(".process")
        process.mkdir(parents=True, exist_ok=True)
        return Child(load_config(compose(overrides)), folder=process)

    def disturb(self, run_dir: Path) -> None:
        """Kill a run, and start it again, until it ends or enough kills were made."""
        while self.num_done < self.num_kills:
            child = self.start(run_dir)
            try:
                if self.kill_once(child, run_dir):
                    return
            finally:
                self.note_end(child)
                child.kill()
        self.run_to_end(run_dir)

    def kill_once(self, child: Child, run_dir: Path) -> bool:
        """Return True if the run ended before anybody killed it."""
        # By turns at any moment from the start on, and between steps alone.
        waits_for_steps = self.random.random() < 0.6
        if waits_for_steps:
            _wait_for_a_line(child, run_dir)
        deadline = time.monotonic() + self.random.uniform(0.0, 2.5 if waits_for_steps else 9.0)
        while time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.005)
        if child.poll() is not None:
            return child.poll() == 0
        target = self.random.choice(TARGETS)
        hit = _kill(child, target)
        self.num_done += 1
        phase = "in the steps" if waits_for_steps else "anywhere"
        print(
            f"kill {self.num_done}/{self.num_kills}: {hit}, {phase}, after line "
            f"{_num_lines(run_dir)} of metrics.jsonl",
            flush=True,
        )
        if target == "rank":  # the driver starts the ranks again, or ends by itself
            _wait_for_a_line(child, run_dir)
            return child.poll() == 0
        return False

    def note_end(self, child: Child) -> None:
        """Hold a run that failed to a named error."""
        status = child.poll()
        if status is None or status <= 0:
            return
        said = child.tail(60)
        named = NAMED.search(said.encode())
        if named is None:
            sys.exit(f"a run ended with status {status} and no named error:\n{said}")
        self.num_named += 1
        print(f"  ended with: {named[0].decode()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(
            arguments.overrides, Path(folder), random.Random(arguments.seed), arguments.kills
        )
        reference = killer.run_to_end(Path(folder) / "undisturbed")
        num_runs = num_different = 0
        while killer.num_done < killer.num_kills:
            run_dir = Path(folder) / f"disturbed-{num_runs}"
            killer.disturb(run_dir)
            num_runs += 1
            findings = [f for f in compare_runs(reference, run_dir) if f.differences]
            num_different += bool(findings)
            for finding in findings:
                print(f"  DIFFERENT {finding.what}: {finding.differences[:3]}", flush=True)
        print(
            f"{killer.num_done} kills in {num_runs} runs: {num_runs - num_different} runs ended "
            f"bit by bit as the undisturbed one, {num_different} did not; {killer.num_named} times "
            "a run ended with a named error and was started again"
        )
    sys.exit(1 if num_different else 0)


def _kill(child: Child, target: str) -> str:
    if target == "rank":
        titles = {pid: _command(pid) for pid in members_of(child.pid)}
        ranks = [pid for pid, title in titles.items() if b"ray::" in title and b"Worker" in title]
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(ranks[-1], signal.SIGKILL)
            return "one rank"
    if target == "driver":
        os.kill(child.pid, signal.SIGKILL)
        while child.poll() is None:
            time.sleep(0.01)
        return "the driver"
    child.kill()
    return "everything"


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _wait_for_a_line(child: Child, run_dir: Path) -> None:
    """Wait until the run has done one more step, or has ended."""
    lines, deadline = _num_lines(run_dir), time.monotonic() + 60
    while child.poll() is None and _num_lines(run_dir) == lines and time.monotonic() < deadline:
        time.sleep(0.01)


def _num_lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


if __name__ == "__main__":
    main()
