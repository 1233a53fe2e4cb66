"""``python -m hybridrl.report RUN_FOLDER ...``: makes a page and prints its path."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from hybridrl.errors import RunFolderError
from hybridrl.metrics import format_value
from hybridrl.report.charts import COLORS, base_layout, trace
from hybridrl.report.findings import diagnose
from hybridrl.report.markup import Html, card, figure_html, page, section, table, tag
from hybridrl.report.page import NAME, write_page, write_report
from hybridrl.report.run import EVALUATIONS, Run, read_run

_METRICS = (
    *("reward/mean", "eval/reward/mean", "loss/supervised_nats", "eval/loss_nats"),
    *("loss/preference", "preference/accuracy", "eval/accuracy"),
    *("policy/entropy_nats/mean", "policy/kl_to_reference_nats/mean", "policy/grad_norm"),
    *("length/response_tokens/mean", "time/step_s"),
)
_OF_THE_FOLDER = ("trainer.run_dir", "trainer.overwrite")
COMPARISON = "comparison.html"


def build_comparison(runs: Sequence[Run]) -> str:
    """Return a page with a table of the runs, the keys in which they differ, and charts."""
    title = f"{len(runs)} runs compared"
    headers = ("run", "steps", "first eval", "best eval", "last eval", "s/step", "stands out")
    names = dict.fromkeys(
        key for run in runs for key in run.settings.flat if key not in _OF_THE_FOLDER
    )
    values = ([key, *(run.settings.text(key) for run in runs)] for key in names)
    differing = [row for row in values if len(set(row[1:])) > 1]
    keys = table(["key", *(run.folder.name for run in runs)], differing)
    about = "Lines are running means over 4 % of the run; held-out values are as measured."
    charts = tag("div", *(_chart(name, runs) for name in _METRICS), cls="grid")
    return page(
        title,
        tag("h1", title),
        section("Results", card(table(headers, map(_result, runs)))),
        section("Keys that differ", card(keys if differing else "None.")),
        section("Curves", tag("p", about, cls="soft"), charts),
    )


def _result(run: Run) -> list[str]:
    measured = (run.history.get(name).finite for name, _ in EVALUATIONS)
    held_out = next(filter(None, measured), ())
    best = run.best_evaluation
    return [
        run.folder.name,
        f"{run.num_done} of {run.num_steps}",
        format_value(held_out[0] if held_out else None),
        f"{format_value(best[0])} at step {best[1]}" if best else "",
        format_value(held_out[-1] if held_out else None),
        format_value(run.history.get("time/step_s").mean_of_last(1)),
        "; ".join(finding.title for finding in diagnose(run)),
    ]


def _chart(name: str, runs: Sequence[Run]) -> Html | str:
    lines = []
    for run, color in zip(runs, cycle(COLORS), strict=False):
        series = run.history.get(name)
        if series.finite:
            drawn = series if name.startswith("eval/") else series.running_mean()
            lines.append(trace(run.folder.name, drawn, line={"color": color}))
    figure = {"data": lines, "layout": base_layout() | {"showlegend": True}}
    return card(tag("h3", name), figure_html(figure)) if lines else ""


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 not a run folder or not writable."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.report",
        description="Makes one page about a run, also while it trains; of several, a comparison.",
    )
    parser.add_argument("run_folder", type=Path, nargs="+", help="has config.yaml, metrics.jsonl")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write; default RUN_FOLDER/{NAME}, or {COMPARISON} where you are",
    )
    options = parser.parse_args()
    folders: list[Path] = options.run_folder
    try:
        if len(folders) == 1:
            path = write_report(folders[0], output=options.output)
        else:
            page = build_comparison([read_run(folder) for folder in folders])
            path = write_page(options.output or Path(COMPARISON), page)
    except RunFolderError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
