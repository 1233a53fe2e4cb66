from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import psutil
import pytest

from benchmarks.child import Child
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.processes.guard import members_of
from tests.end_to_end.runs import prompts_in_order, samples_of
from tests.end_to_end.small import VARIED, read_metrics, small_config
from tests.waiting import wait_until

Kind = Literal["driver", "rank", "manager", "engine"]

CLASSES: dict[Kind, str] = {
    "rank": "ActorRolloutWorker",
    "manager": "RolloutManager",
    "engine": "RolloutProcess",
}
"""Names that Ray gives to the processes of its actors."""

_MOST_STEPS = 2


@dataclass
class KilledRun:
    """One run folder, and the process that works on it now."""

    config: ExperimentConfig
    folder: Path
    """Of the run."""
    random: Random
    """Draws the moments and, among equals, the process."""
    killed: Counter[Kind] = field(default_factory=Counter)
    num_starts: int = 0

    def __post_init__(self) -> None:
        self._child = self._start()

    def run(self, kinds: Sequence[Kind]) -> None:
        """Kill a process of each kind in turn, and wait for the end of the run."""
        for kind in kinds:
            self._wait_for_the_moment()
            process = self._await_process(kind)
            process.kill()
            self.killed[kind] += 1
            if kind == "driver":
                self._begin_again()
        while (status := self._child.poll()) is None:
            time.sleep(0.1)
        assert status == 0, self._child.tail(60)

    def end(self) -> None:
        self._child.kill()

    def _start(self) -> Child:
        self.num_starts += 1
        process = self.folder.with_suffix(".process")
        process.mkdir(exist_ok=True)
        return Child(self.config, folder=process)

    def _begin_again(self) -> None:
        """Wait until all processes of a dead driver have ended by themselves; start it again."""
        workers = [one for kind in CLASSES for one in self._of(kind)]
        wait_until(lambda: self._child.poll() is not None)
        wait_until(lambda: not any(is_alive(worker) for worker in workers))
        self._child.kill()  # of Ray's own two stay for a minute
        self._child = self._start()

    def _of(self, kind: Kind) -> list[psutil.Process]:
        if kind == "driver":
            return [psutil.Process(self._child.pid)]
        processes = []
        for pid in members_of(self._child.pid):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(f"ray::{CLASSES[kind]}" in word for word in process.cmdline()):
                    processes.append(process)
        return processes

    def _await_process(self, kind: Kind) -> psutil.Process:
        processes: list[psutil.Process] = []

        def find() -> bool:
            self._require_running()
            processes.extend(self._of(kind))
            return bool(processes)

        wait_until(find, deadline_s=180)
        return self.random.choice(processes)

    def _wait_for_the_moment(self) -> None:
        """By turns drawn: some steps and a second later, or some seconds after the last kill.

        The latter is often while workers start or stop, and never after more than two steps.
        """
        is_in_steps = self.random.random() < 0.5
        num_steps = self.random.randint(1, _MOST_STEPS) if is_in_steps else _MOST_STEPS
        delay_s = self.random.uniform(0.0, 1.0 if is_in_steps else 12.0)
        end_s = time.monotonic() + (0.0 if is_in_steps else delay_s)
        fewest = self._num_lines()

        def is_over() -> bool:
            nonlocal fewest
            self._require_running()
            now = self._num_lines()
            fewest = min(fewest, now)  # a run that resumes goes back to its checkpoint
            return now >= fewest + num_steps or (not is_in_steps and time.monotonic() >= end_s)

        wait_until(is_over, deadline_s=300)
        if is_in_steps:
            time.sleep(delay_s)

    def _require_running(self) -> None:
        status = self._child.poll()
        assert status is None, f"the run ended with {status}:\n{self._child.tail(80)}"

    def _num_lines(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


NUM_STEPS, NUM_PROMPTS, MAX_STALENESS = 150, 4, 2
KILLS: dict[Kind, int] = {"driver": 8, "rank": 7, "manager": 7, "engine": 8}


def config_of(folder: Path, rows: Path) -> ExperimentConfig:
    """A run of one epoch, whose rows end while it samples ahead: a text says which prompt it is."""
    numbers = range(100, 100 + NUM_STEPS * NUM_PROMPTS)
    lines = [json.dumps({"prompt": f"{number}+1=", "answer": "0"}) for number in numbers]
    rows.write_text("\n".join(lines))
    return small_config(
        folder,
        *("serving=own", f"trainer.max_staleness={MAX_STALENESS}", "rollout.num_slots=4"),
        *("algorithm.rollout_correction=importance", VARIED),
        *("data=files", f"data.train_files=[{rows}]", "data.use_chat_template=false"),
        *("data.max_prompt_tokens=8", "model.starter.num_warmup_steps=0"),
        *("trainer.num_epochs=1", "trainer.num_steps=1000", "eval.every_num_steps=0"),
        *(f"tracking.num_samples_per_step={NUM_PROMPTS}", "trainer.export_hf=false"),
        *("checkpoint.every_num_steps=1", "checkpoint.max_restarts=10"),
    )


def require_the_stream_once(learned: dict[int, list[str]], stream: list[str]) -> None:
    """No prompt is lost or doubled, and none is learned from before its turn to be drawn."""
    number_of = {prompt: number for number, prompt in enumerate(stream)}
    assert len(number_of) == len(stream)
    assert Counter(prompt for of_step in learned.values() for prompt in of_step) == Counter(stream)
    for step, prompts in learned.items():
        assert len(prompts) == NUM_PROMPTS, step
        assert max(number_of[prompt] for prompt in prompts) < (
            (step + MAX_STALENESS) * NUM_PROMPTS
        ), step


@pytest.fixture
def killed_run(tmp_path: Path) -> Iterator[KilledRun]:
    folder = tmp_path / "run"
    run = KilledRun(config_of(folder, tmp_path / "rows.jsonl"), folder, Random(16))
    yield run
    run.end()


@pytest.mark.shows("R6.3")
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thirty_random_kills_lose_and_double_no_prompt(killed_run: KilledRun) -> None:
    kinds = [kind for kind, number in KILLS.items() for _ in range(number)]
    killed_run.random.shuffle(kinds)
    killed_run.run(kinds)
    folder = killed_run.folder
    assert killed_run.killed == Counter(KILLS)
    assert killed_run.killed.total() == 30
    assert killed_run.num_starts == 1 + KILLS["driver"]
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line["rollout/staleness_steps/max"] for line in lines) == MAX_STALENESS
    learned: dict[int, list[str]] = {step: [] for step in range(1, NUM_STEPS + 1)}
    for sample in samples_of(folder):
        learned[sample["step"]].append(sample["prompt"])
    require_the_stream_once(learned, prompts_in_order(killed_run.config, NUM_STEPS * NUM_PROMPTS))
    restarts = (folder / "log.txt").read_text(encoding="utf-8").count("workers are started again")
    assert restarts <= killed_run.killed.total() - KILLS["driver"]
