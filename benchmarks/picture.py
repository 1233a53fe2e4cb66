"""Draws the live table of a finished run, as the README shows it.

``python -m benchmarks.picture RUN_FOLDER docs/images/run.svg``
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

from rich.console import Console

from hybridrl.run.display import LiveTable


def main() -> None:
    """Replay ``metrics.jsonl`` into the table and save what a terminal would show at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    lines = (options.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    table = LiveTable(num_steps=steps[-1]["step"])
    for values in steps:
        step = values.pop("step")
        table.step(step, {name: value for name, value in values.items() if value is not None})
    table.phase("export")
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
    console.print(table)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(options.picture), title="python -m hybridrl.main")


if __name__ == "__main__":
    main()
