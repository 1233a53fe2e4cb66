"""A run that samples ahead, while its processes are killed at random: each prompt counts once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.rows import load_train_rows
from tests.end_to_end.killed_run import KilledRun, Kind
from tests.end_to_end.small import VARIED, read_metrics, small_config

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


def prompts_in_order(config: ExperimentConfig) -> list[str]:
    """The stream of prompts of this run; no two are equal."""
    rows = load_train_rows(config, build_starter_tokenizer())
    source = PromptSource(
        rows.rows, num_prompts=NUM_STEPS * NUM_PROMPTS, seed=config.seed, sampler=rows.sampler
    )
    return [row.prompt_text for row in source.next().rows]


def learned_in_each_step(folder: Path) -> dict[int, list[str]]:
    """The record of the run: prompts by step."""
    learned: dict[int, list[str]] = {step: [] for step in range(1, NUM_STEPS + 1)}
    for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        learned[sample["step"]].append(sample["prompt"])
    return learned


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


@pytest.mark.parametrize(
    ("step", "prompts"),
    [
        (5, ["16", "17", "18", "18"]),  # 19 is lost, and another is there twice
        (5, ["16", "17", "18"]),
        (5, ["16", "17", "18", "19", "20"]),
        (5, ["0", "17", "18", "19"]),  # learned from before
        (1, ["0", "1", "2", "12"]),  # nobody has drawn it yet
    ],
)
def test_the_record_shows_what_is_lost_doubled_or_early(step: int, prompts: list[str]) -> None:
    stream = [str(number) for number in range(NUM_STEPS * NUM_PROMPTS)]
    learned = {n + 1: stream[n * NUM_PROMPTS : (n + 1) * NUM_PROMPTS] for n in range(NUM_STEPS)}
    require_the_stream_once(learned, stream)
    swapped = dict(learned) | {step: prompts}
    if step == 1:  # nothing is lost: two prompts have changed their places
        swapped |= {4: ["3", "13", "14", "15"]}
    with pytest.raises(AssertionError):
        require_the_stream_once(swapped, stream)


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
    require_the_stream_once(learned_in_each_step(folder), prompts_in_order(killed_run.config))
    restarts = (folder / "log.txt").read_text(encoding="utf-8").count("workers are started again")
    assert restarts <= killed_run.killed.total() - KILLS["driver"]
