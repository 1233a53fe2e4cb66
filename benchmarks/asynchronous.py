"""Training while engines sample: real runs with K = 0, 1 and 4, and a simulation of more devices.

The runs are the default task with numbers whose lengths have a heavy tail, one engine of its own
and one process that trains, on the two cores of this machine. Costs are fitted to the steps of the
run with K = 0. The simulation with these costs is held against the runs with K > 0, and then asked
about more devices. With ``--folder`` finished runs are kept, and read from there the next time.

    OMP_NUM_THREADS=1 python -m benchmarks.asynchronous [--picture docs/images/asynchronous.svg]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from benchmarks.sides.drawing import COLORS, Frame, picture, words
from benchmarks.sides.measure import print_head, print_row
from benchmarks.sides.measured_runs import (
    NUM_FIRST,
    NUM_PROMPTS,
    NUM_RESPONSES,
    MeasuredRun,
    fit_costs,
    read_lengths,
    read_run,
    train_once,
)
from benchmarks.sides.simulation import (
    Costs,
    DecodeCost,
    DrawLengths,
    HeavyTail,
    Topology,
    simulate,
    summarize,
)

_SIZES = ((8, 64), (64, 128), (1024, 512))
"""Devices, and prompts of a step."""

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

Lengths = Sequence[Sequence[Sequence[int]]]
"""Tokens of each response to each prompt of each step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each real run; 0: no real run")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 4], metavar="K")
    parser.add_argument("--simulated-steps", type=int, default=14)
    parser.add_argument("--devices", nargs="+", type=int, default=[one for one, _ in _SIZES])
    parser.add_argument("--folder", type=Path, help="of finished runs; a temporary one")
    parser.add_argument("--picture", type=Path, help="SVG of the learning curves to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    sizes = [(devices, prompts) for devices, prompts in _SIZES if devices in options.devices]
    if options.steps:
        with tempfile.TemporaryDirectory(prefix="asynchronous-") as scratch:
            folder = options.folder or Path(scratch)
            staleness = [0, *(one for one in options.staleness if one)]
            folders = {
                k: train_once(k, folder, num_steps=options.steps, overrides=options.overrides)
                for k in staleness
            }
            runs = {k: read_run(one) for k, one in folders.items()}
            lengths = read_lengths(folders[0], num_steps=options.steps)
        costs = fit_costs(runs[0], lengths, num_slots=NUM_PROMPTS * NUM_RESPONSES)
        print_costs(costs, lengths)
        print_runs(runs, costs, lengths)
        if options.picture is not None:
            options.picture.write_text(draw(runs), encoding="utf-8")
        print("\nThese costs and lengths, simulated with more devices:\n")
        measured = MeasuredLengths(list(chain.from_iterable(lengths)))
        print_devices(costs, measured, sizes=sizes, num_steps=options.simulated_steps)
    print(
        "\nCosts of an 8B model on H100s, computed from data sheets, and lognormal lengths (median "
        f"{DATA_SHEET_LENGTHS.median_tokens:,.0f} tokens, 99th of 100 ten times as long, at most "
        f"{DATA_SHEET_LENGTHS.max_tokens:,}), simulated; **unproved**:\n"
    )
    print_devices(DATA_SHEET, DATA_SHEET_LENGTHS, sizes=sizes, num_steps=options.simulated_steps)


def print_costs(costs: Costs, lengths: Lengths) -> None:
    tokens = sorted(chain.from_iterable(chain.from_iterable(lengths)))
    quantiles = {share: tokens[int(share * (len(tokens) - 1))] for share in (0.5, 0.9, 0.99, 1.0)}
    print(
        f"{NUM_PROMPTS} prompts x {NUM_RESPONSES} responses; tokens of a response: "
        + ", ".join(f"{name:.0%} <= {value}" for name, value in quantiles.items())
        + ".\n"
    )
    print_head("fitted to the run with K = 0", "ms")
    for name, seconds in (
        ("transfer of the weights, and calls", costs.transfer_s),
        ("decode step", costs.decode.fixed_s),
        ("decode step, each open response more", costs.decode.per_response_s),
        ("training and rewards, of a step", costs.train_fixed_s),
        ("training, of a token", costs.train_s_per_token),
    ):
        print_row(name, f"{1e3 * seconds:.3f}")


def print_runs(runs: Mapping[int, MeasuredRun], costs: Costs, lengths: Lengths) -> None:
    equal_s = min(run.accuracies[-1][0] for run in runs.values())
    print(f"\nReal runs of {len(lengths)} steps; accuracy after {equal_s:.0f} s of training:\n")
    print_head(
        *("K", "steps/h", "gain", "simulated", "real / simulated", "trainer waits, s a step"),
        *("engines idle, s a step", "update of engines, s", "staleness, mean", "accuracy"),
        num_texts=0,
    )
    names = ("time/wait_for_groups_s", "time/engines_idle_s", "time/update_engines_s")
    for max_staleness, run in runs.items():
        simulated = simulate_run(costs, lengths, max_staleness=max_staleness)
        means = [run.mean(name) for name in (*names, "rollout/staleness_steps/mean")]
        rate = run.steps_per_hour
        print_row(
            *(max_staleness, f"{rate:,.0f}", f"{rate / runs[0].steps_per_hour:.2f}"),
            *(f"{simulated:,.0f}", f"{rate / simulated:.2f}"),
            *("" if value is None else f"{value:.2f}" for value in means),
            f"{run.accuracy_at(equal_s):.3f}",
        )


def simulate_run(costs: Costs, lengths: Lengths, *, max_staleness: int) -> float:
    """Return the steps per hour of a run with the same prompts in the same order."""
    remaining = chain.from_iterable(lengths)
    topology = Topology(
        num_engines=1,
        num_trainer_devices=1,
        max_staleness=max_staleness,
        num_ahead=max_staleness,
        on_update="interrupt",
    )
    steps = simulate(
        topology,
        costs,
        lambda _: next(remaining),
        num_prompts=len(lengths[0]),
        num_steps=len(lengths),
    )
    all_steps = replace(topology, num_ahead=0)  # the real run's last steps count, too
    return summarize(steps, all_steps, num_first=NUM_FIRST).steps_per_hour


def draw(runs: Mapping[int, MeasuredRun]) -> str:
    """Return an SVG of held-out accuracy over seconds of training, a curve for each K."""
    frame = Frame(last_x=max(run.accuracies[-1][0] for run in runs.values()))
    marks = [frame.last_x * fifth / 5 for fifth in range(6)]
    parts = [*frame.axes([n / 10 for n in range(0, 11, 2)], [(x, f"{x:.0f} s") for x in marks])]
    for place, (max_staleness, run) in enumerate(runs.items()):
        color = COLORS[place % len(COLORS)]
        parts.append(frame.curve(run.accuracies, color))
        parts.append(words(58 + 80 * place, 20, f"K = {max_staleness}", color=color))
    return picture(frame.width, frame.height, parts)


@dataclass(frozen=True, slots=True)
class MeasuredLengths:
    """Draws among the groups of a run."""

    groups: Sequence[Sequence[int]]

    def __call__(self, source: random.Random) -> Sequence[int]:
        return source.choice(self.groups)


def topologies(num_devices: int, num_trainer_devices: int) -> Iterator[tuple[str, Topology]]:
    yield "both in turns", Topology(num_engines=num_devices, num_trainer_devices=num_devices)
    for max_staleness in (0, 1, 4):
        for on_update in ("finish", "interrupt") if max_staleness else ("finish",):
            yield (
                f"own, K={max_staleness}" + (f", {on_update}" if max_staleness else ""),
                Topology(
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
    print("| devices | that train | prompts | topology | steps/h | gain | trainer idle", end="")
    print(" | engines idle | staleness, mean | max |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for num_devices, num_prompts in sizes:
        trainers = split(costs, lengths, num_devices=num_devices, num_prompts=num_prompts)
        base = 0.0
        for name, topology in topologies(num_devices, trainers):
            steps = simulate(topology, costs, lengths, num_prompts=num_prompts, num_steps=num_steps)
            found = summarize(steps, topology, num_first=topology.num_ahead + 1)
            base = base or found.steps_per_hour
            print_row(
                *(f"{num_devices:,}", f"{topology.num_trainer_devices:,}", num_prompts, name),
                *(f"{found.steps_per_hour:,.1f}", f"{found.steps_per_hour / base:.2f}"),
                *(f"{found.trainer_idle:.2f}", f"{found.engines_idle:.2f}"),
                *(f"{found.mean_staleness:.2f}", found.max_staleness),
            )


if __name__ == "__main__":
    main()
