"""Runs of the default task whose lengths have a heavy tail: an engine of its own, and one rank."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.algorithms import train
from benchmarks.sides.simulated_training import HeavyTail
from hybridrl.data.tasks import Split, build_sort_digits_rows

NUM_PROMPTS, NUM_RESPONSES = 16, 8
_MIN_DIGITS, _MAX_DIGITS = 2, 100
_DIGITS = HeavyTail(median_tokens=8, sigma=0.9, max_tokens=_MAX_DIGITS, num_responses=1)
_MAX_TOKENS = _MAX_DIGITS + 1
_NUM_ROWS: Mapping[Split, int] = {"train": 4000, "eval": 256}

_OVERRIDES = (
    *("serving=own", "serving.num_devices_per_node=1", "cluster.num_threads_per_rank=1"),
    "serving.models.policy.groups.main.num_devices=1",
    "algorithm.rollout_correction=importance",
    *("data=files", "data.use_chat_template=false", f"data.max_prompt_tokens={_MAX_TOKENS}"),
    *(
        f"rollout.num_slots={NUM_PROMPTS * NUM_RESPONSES}",
        "model.starter.max_position_embeddings=256",
    ),
    *(f"trainer.num_prompts_per_step={NUM_PROMPTS}", f"rollout.max_response_tokens={_MAX_TOKENS}"),
    *(f"rollout.num_responses_per_prompt={NUM_RESPONSES}", "trainer.overwrite=true"),
    *("eval.every_num_steps=10", f"eval.num_prompts={_NUM_ROWS['eval']}"),
    *("checkpoint.every_num_steps=0", "trainer.export_hf=false", "tracking.live=off"),
    "tracking.trackers=[]",
)


def train_once(
    max_staleness: int, folder: Path, *, num_steps: int, overrides: Sequence[str]
) -> Path:
    """Train, and return the run folder; a run that is in the folder is not repeated.

    The run with ``max_staleness`` 0 writes its responses, too.
    """
    run_dir = folder / f"k{max_staleness}-{num_steps}" / "run"
    if (run_dir / "report.html").is_file():  # the end of a run writes it
        return run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    files = [f"data.{split}_files=[{write_rows(split, folder)}]" for split in _NUM_ROWS]
    mode = f"trainer.max_staleness={max_staleness}" if max_staleness else "rollout.dump=true"
    words = [*_OVERRIDES, *files, f"trainer.num_steps={num_steps}", mode, *overrides]
    return train(words, run_dir.parent)


def write_rows(split: Split, folder: Path) -> Path:
    """Write numbers to sort, a few of which are long."""
    source = random.Random(split)
    lines = []
    for index in range(_NUM_ROWS[split]):
        digits = max(_MIN_DIGITS, _DIGITS(source)[0])
        (row,) = build_sort_digits_rows(
            1, split=split, seed=index, min_digits=digits, max_digits=digits
        )
        lines.append(json.dumps({"prompt": row.prompt, "answer": row.answer}))
    path = folder / f"{split}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
