"""``python -m hybridrl.report RUN_FOLDER ...``: makes a page and prints its path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridrl.errors import RunFolderError
from hybridrl.report.compare import build_comparison
from hybridrl.report.page import NAME, write_page, write_report
from hybridrl.report.run import read_run

COMPARISON = "comparison.html"


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
