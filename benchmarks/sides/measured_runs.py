"""Real runs whose lengths have a heavy tail, and what their steps cost, for the simulation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.sides.measure import read_metrics, train
from benchmarks.sides.simulation import Costs, DecodeCost, HeavyTail
from hybridrl.batch import RolloutBatch
from hybridrl.data.tasks import Split, build_sort_digits_rows
from hybridrl.trainer.rollout_files import RolloutFiles, name_of

NUM_FIRST = 2
"""Steps at the begin of a run that are not measured: imports and allocations."""

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
    f"rollout.num_slots={NUM_PROMPTS * NUM_RESPONSES}",
    "model.starter.max_position_embeddings=256",
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


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Steps of a run folder, from step 1."""

    steps: Sequence[dict[str, float]]
    """Metrics of each step."""

    accuracies: Sequence[tuple[float, float]]
    """Seconds of training, and held-out accuracy then."""

    @property
    def steps_per_hour(self) -> float:
        """Of all steps but the first ones; evaluations do not count."""
        seconds = [one["time/step_s"] for one in self.steps[NUM_FIRST:]]
        return 3600 * len(seconds) / sum(seconds)

    def mean(self, metric: str) -> float | None:
        values = [one[metric] for one in self.steps[NUM_FIRST:] if metric in one]
        return sum(values) / len(values) if values else None

    def accuracy_at(self, seconds: float) -> float:
        """Interpolate the held-out accuracy after so many seconds of training."""
        before = [point for point in self.accuracies if point[0] <= seconds]
        after = [point for point in self.accuracies if point[0] > seconds]
        if not before or not after:
            return (before[-1] if before else after[0])[1]
        (left_s, left), (right_s, right) = before[-1], after[0]
        return left + (right - left) * (seconds - left_s) / (right_s - left_s)


def read_run(run_dir: Path) -> MeasuredRun:
    """Read ``metrics.jsonl``. Seconds of training are those of steps, without evaluations."""
    rows = read_metrics(run_dir)
    seconds, accuracies = 0.0, []
    for row in rows:
        seconds += row.get("time/step_s", 0.0)
        if "eval/reward/mean" in row:
            accuracies.append((seconds, row["eval/reward/mean"]))
    return MeasuredRun(steps=[row for row in rows if row["step"]], accuracies=accuracies)


def read_lengths(run_dir: Path, *, num_steps: int) -> list[list[list[int]]]:
    """Read the files of ``rollout.dump``: tokens of each response of each prompt of each step."""
    files = RolloutFiles(run_dir / "rollouts")
    steps = []
    for step in range(1, num_steps + 1):
        name = name_of(step, "train", 0)
        facts = files.facts(name)
        if facts is None:
            raise FileNotFoundError(f"{files.folder} has no responses of step {step}")
        steps.append(list(_groups_of(files.read(name, facts)[1], facts.num_prompts)))
    return steps


def _groups_of(rollouts: RolloutBatch, num_prompts: int) -> Iterator[list[int]]:
    tokens_B = torch.stack([row_L.sum() for row_L in rollouts.response_mask_BL.unbind()])
    yield from tokens_B.view(num_prompts, -1).tolist()


def fit_costs(
    run: MeasuredRun, lengths: Sequence[Sequence[Sequence[int]]], *, num_slots: int
) -> Costs:
    """Explain the seconds of a synchronous run with one engine that has a slot for each response.

    Sampling takes a fixed time, one for each decode step (the longest response), and one for each
    token; all else a fixed time, and one for each token. Least squares, none negative.
    """
    tokens_N = torch.tensor([float(sum(map(sum, groups))) for groups in lengths[NUM_FIRST:]])
    longest_N = torch.tensor([float(max(map(max, groups))) for groups in lengths[NUM_FIRST:]])
    ones_N = torch.ones_like(tokens_N)
    generate_N = torch.tensor([one["time/generate_s"] for one in run.steps[NUM_FIRST:]])
    step_N = torch.tensor([one["time/step_s"] for one in run.steps[NUM_FIRST:]])
    transfer_s, fixed_s, per_response_s = fit([ones_N, longest_N, tokens_N], generate_N)
    train_fixed_s, train_s_per_token = fit([ones_N, tokens_N], step_N - generate_N)
    return Costs(
        decode=DecodeCost(fixed_s, per_response_s),
        num_slots=num_slots,
        train_s_per_token=train_s_per_token,
        train_fixed_s=train_fixed_s,
        transfer_s=transfer_s,
        recompute_s_per_token=0.0,
    )


def fit(columns: Sequence[Tensor], target_N: Tensor) -> list[float]:
    """Return the factors, none negative, with which the columns come closest to the target."""
    best, best_error = [0.0] * len(columns), float(target_N.square().sum())
    indices = range(len(columns))
    for chosen in chain.from_iterable(combinations(indices, n) for n in range(1, len(columns) + 1)):
        matrix = torch.stack([columns[index] for index in chosen], dim=1).double()
        factors = torch.linalg.lstsq(matrix, target_N.double()).solution
        error = float((matrix @ factors - target_N).square().sum())
        if bool((factors >= 0).all()) and error < best_error:
            best, best_error = [0.0] * len(columns), error
            for index, factor in zip(chosen, factors.tolist(), strict=True):
                best[index] = factor
    return best
