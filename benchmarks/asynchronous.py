"""Training while engines sample: real runs with K = 0, 1 and 4, and a simulation of more devices.

The runs are the default task with numbers whose lengths have a heavy tail, one engine of its own
and one process that trains, on the two cores of this machine. Costs are fitted to the steps of the
run with K = 0. The simulation with these costs is held against the runs with K > 0, and then asked
about more devices. With ``--folder`` finished runs are kept, and read from there the next time.

    OMP_NUM_THREADS=1 python -m benchmarks.asynchronous [--picture docs/images/asynchronous.svg]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from benchmarks.sides.asynchronous_runs import NUM_PROMPTS, NUM_RESPONSES, train_once
from benchmarks.sides.measured_costs import (
    NUM_FIRST,
    MeasuredRun,
    fit_costs,
    read_lengths,
    read_run,
)
from benchmarks.sides.simulated_tables import (
    DATA_SHEET,
    DATA_SHEET_LENGTHS,
    MeasuredLengths,
    print_devices,
)
from benchmarks.sides.simulated_training import (
    Costs,
    Topology,
    simulate,
    summarize,
)

_SIZES = ((8, 64), (64, 128), (1024, 512))
"""Devices, and prompts of a step."""

_COLORS = ("#8c959f", "#4051b5", "#d9480f", "#2b8a3e")
_WIDTH, _HEIGHT, _MARGIN = 760, 300, 46

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
    """Print what was fitted, and how long responses are."""
    tokens = sorted(chain.from_iterable(chain.from_iterable(lengths)))
    quantiles = {share: tokens[int(share * (len(tokens) - 1))] for share in (0.5, 0.9, 0.99, 1.0)}
    print(
        f"{NUM_PROMPTS} prompts x {NUM_RESPONSES} responses; tokens of a response: "
        + ", ".join(f"{name:.0%} <= {value}" for name, value in quantiles.items())
        + ".\n"
    )
    print("| fitted to the run with K = 0 | ms |\n|---|---:|")
    for name, seconds in (
        ("transfer of the weights, and calls", costs.transfer_s),
        ("decode step", costs.decode.fixed_s),
        ("decode step, each open response more", costs.decode.per_response_s),
        ("training and rewards, of a step", costs.train_fixed_s),
        ("training, of a token", costs.train_s_per_token),
    ):
        print(f"| {name} | {1e3 * seconds:.3f} |")


def print_runs(
    runs: Mapping[int, MeasuredRun],
    costs: Costs,
    lengths: Lengths,
) -> None:
    """Print the real runs beside the simulation of the same steps."""
    equal_s = min(run.accuracies[-1][0] for run in runs.values())
    print(f"\nReal runs of {len(lengths)} steps; accuracy after {equal_s:.0f} s of training:\n")
    print(
        "| K | steps/h | gain | simulated | real / simulated | trainer waits, s a step | ", end=""
    )
    print("engines idle, s a step | update of engines, s | staleness, mean | accuracy |")
    print("|---:" * 10 + "|")
    for max_staleness, run in runs.items():
        simulated = simulate_run(costs, lengths, max_staleness=max_staleness)
        said = [
            "" if (value := run.mean(name)) is None else f"{value:.2f}"
            for name in (
                "time/wait_for_groups_s",
                "time/engines_idle_s",
                "time/update_engines_s",
                "rollout/staleness_steps/mean",
            )
        ]
        print(
            f"| {max_staleness} | {run.steps_per_hour:,.0f} "
            f"| {run.steps_per_hour / runs[0].steps_per_hour:.2f} | {simulated:,.0f} "
            f"| {run.steps_per_hour / simulated:.2f} | {' | '.join(said)} "
            f"| {run.accuracy_at(equal_s):.3f} |"
        )


def simulate_run(costs: Costs, lengths: Lengths, *, max_staleness: int) -> float:
    """Return the steps per hour of a run with the same prompts in the same order."""
    remaining = chain.from_iterable(lengths)
    topology = Topology(
        num_devices=2,
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
    last_s = max(run.accuracies[-1][0] for run in runs.values())
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#57606a"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        _, y = _pixel(0, tenth / 10, last_s)
        parts.append(f'<path stroke="#d0d7de" d="M{_MARGIN} {y:.1f}H{_WIDTH - _MARGIN}"/>')
        parts.append(
            f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10}</text>'
        )
    for fifth in range(6):
        x, y = _pixel(last_s * fifth / 5, 0, last_s)
        seconds = f"{last_s * fifth / 5:.0f} s"
        parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{seconds}</text>')
    for place, (max_staleness, run) in enumerate(runs.items()):
        color = _COLORS[place % len(_COLORS)]
        points = " ".join("{:.1f},{:.1f}".format(*_pixel(*one, last_s)) for one in run.accuracies)
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="2.5" points="{points}"/>'
        )
        at = _MARGIN + 12 + 80 * place
        parts.append(f'<text x="{at}" y="20" fill="{color}">K = {max_staleness}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _pixel(seconds: float, accuracy: float, last_s: float) -> tuple[float, float]:
    x = _MARGIN + seconds / last_s * (_WIDTH - 2 * _MARGIN)
    return x, _HEIGHT - _MARGIN - accuracy * (_HEIGHT - 2 * _MARGIN)


if __name__ == "__main__":
    main()
