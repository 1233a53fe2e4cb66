"""Tables of the simulation: topologies of 8 and more devices beside each other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sides.simulated_engines import DecodeCost
from benchmarks.sides.simulated_training import (
    Costs,
    DrawLengths,
    HeavyTail,
    Summary,
    Topology,
    simulate,
    summarize,
)

_TENSOR_BYTES_PER_S, _FLOPS = 3.35e12, 989e12
_NUM_PARAMETERS, _CACHE_BYTES_PER_TOKEN = 8.2e9, 2 * 2 * 36 * 8 * 128
_DECODE_SHARE, _TRAIN_SHARE = 0.7, 0.4

DATA_SHEET_LENGTHS = HeavyTail(
    median_tokens=2000, sigma=1.0, max_tokens=32_000, num_responses=16, prompt_share=0.5
)
_MEAN_CONTEXT_TOKENS = 3000

DATA_SHEET = Costs(
    decode=DecodeCost(
        2 * _NUM_PARAMETERS / (_DECODE_SHARE * _TENSOR_BYTES_PER_S),
        _MEAN_CONTEXT_TOKENS * _CACHE_BYTES_PER_TOKEN / (_DECODE_SHARE * _TENSOR_BYTES_PER_S),
    ),
    num_slots=128,
    train_s_per_token=8 * _NUM_PARAMETERS / (_TRAIN_SHARE * _FLOPS),
    train_fixed_s=5.0,
    transfer_s=3.0,
    recompute_s_per_token=2 * _NUM_PARAMETERS / (_TRAIN_SHARE * _FLOPS),
)
"""An 8B model on H100s, computed: bytes over bandwidth, operations over peak, times a share. The
fixed seconds are assumed. No run has shown these numbers."""


@dataclass(frozen=True, slots=True)
class MeasuredLengths:
    """Draws among the groups of a run."""

    groups: Sequence[Sequence[int]]

    def __call__(self, source: random.Random) -> Sequence[int]:
        """Draw the responses to one prompt."""
        return source.choice(self.groups)


def topologies(num_devices: int, num_trainer_devices: int) -> Iterator[tuple[str, Topology]]:
    """Yield the rows of a table, by name."""
    yield (
        "both in turns",
        Topology(
            num_devices=num_devices,
            num_engines=num_devices,
            num_trainer_devices=num_devices,
        ),
    )
    for max_staleness in (0, 1, 4):
        for on_update in ("finish", "interrupt") if max_staleness else ("finish",):
            yield (
                f"own, K={max_staleness}" + (f", {on_update}" if max_staleness else ""),
                Topology(
                    num_devices=num_devices,
                    num_engines=num_devices - num_trainer_devices,
                    num_trainer_devices=num_trainer_devices,
                    max_staleness=max_staleness,
                    num_ahead=max_staleness,
                    on_update=on_update,
                ),
            )


def split(costs: Costs, lengths: DrawLengths, *, num_devices: int, num_prompts: int) -> int:
    """Return how many devices should train, so that both sides need as long for a step."""
    source = random.Random(0)
    groups = [lengths(source) for _ in range(256)]
    num_open = min(costs.num_slots, max(1, num_prompts * len(groups[0]) // num_devices))
    sample_s = costs.decode.step_s(num_open) / num_open
    share = costs.train_s_per_token / (costs.train_s_per_token + sample_s)
    return min(max(round(share * num_devices), 1), num_devices - 1)


def print_devices(
    costs: Costs, lengths: DrawLengths, *, sizes: Sequence[tuple[int, int]], num_steps: int
) -> None:
    """Print a table.

    Args:
        costs: of one engine on one device, and of one device that trains.
        lengths: of responses.
        sizes: devices, and prompts of a step.
        num_steps: of each simulated run; the first and the last ones are not counted.
    """
    print("| devices | that train | prompts | topology | steps/h | gain | trainer idle", end="")
    print(" | engines idle | staleness, mean | max |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for num_devices, num_prompts in sizes:
        trainers = split(costs, lengths, num_devices=num_devices, num_prompts=num_prompts)
        base: float | None = None
        for name, topology in topologies(num_devices, trainers):
            steps = simulate(topology, costs, lengths, num_prompts=num_prompts, num_steps=num_steps)
            summary = summarize(steps, topology, num_first=topology.num_ahead + 1)
            base = summary.steps_per_hour if base is None else base
            print(
                f"| {num_devices:,} | {topology.num_trainer_devices:,} | {num_prompts} | {name} | "
                f"{_row(summary, gain=summary.steps_per_hour / base)}",
                flush=True,
            )


def _row(summary: Summary, *, gain: float) -> str:
    return (
        f"{summary.steps_per_hour:,.1f} | {gain:.2f} | {summary.trainer_idle:.2f} | "
        f"{summary.engines_idle:.2f} | {summary.mean_staleness:.2f} | {summary.max_staleness} |"
    )
