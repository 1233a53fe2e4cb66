"""``python -m hybridrl.report RUN_FOLDER``: makes report.html and prints where it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridrl.errors import RunFolderError
from hybridrl.report.page import NAME, write_report


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 no run folder or not writable."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.report",
        description="Makes one page of what a run did, also while it still runs.",
    )
    parser.add_argument("run_folder", type=Path, help="holds config.yaml and metrics.jsonl")
    parser.add_argument("--output", type=Path, help=f"file to write; default RUN_FOLDER/{NAME}")
    options = parser.parse_args()
    try:
        path = write_report(options.run_folder, output=options.output)
    except RunFolderError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
