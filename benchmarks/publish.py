"""Run benchmarks and write the tables that they print into docs, with command, commit and date.

    python -m benchmarks.publish              those whose table is stale
    python -m benchmarks.publish NAME ...     these
    python -m benchmarks.publish --check      run nothing; say which tables are stale

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.figure_stamps import (
    FIGURES,
    PAGES,
    ROOT,
    Block,
    Figures,
    blocks_of,
    find_all_faults,
    put,
    read_page,
)


def main() -> None:
    """Publish, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*(one.name for one in FIGURES), []])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        faults = find_all_faults()
        sys.exit("\n".join(faults) if faults else 0)
    for one in chosen(options.names):
        print(f"{one.command} ...", flush=True)
        text = f"{made_by(one)}\n\n{output_of(one)}\n"
        page = put(read_page(one.page), Block(one.name, one.digest(), text))
        (ROOT / one.page).write_text(page, encoding="utf-8")


def chosen(names: Sequence[str]) -> list[Figures]:
    """Return the tables named, or those that are stale."""
    digests = {b.name: b.digest for page in PAGES for b in blocks_of(read_page(page))}
    if names:
        return [one for one in FIGURES if one.name in names]
    return [one for one in FIGURES if digests.get(one.name) != one.digest()]


def made_by(one: Figures) -> str:
    """Say where a table comes from."""
    git = ["git", "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"`{one.command}` at commit {commit.strip()} on {today}:"


def output_of(one: Figures) -> str:
    """Run a benchmark; returns what it printed."""
    words = shlex.split(one.command)
    command = [sys.executable, *words[words.index("python") + 1 :]]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if one.one_thread else {})
    done = subprocess.run(
        command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    # Ray colours what it says itself, and its addresses are nobody's business.
    lines = [line for line in done.stdout.splitlines() if "\x1b[" not in line]
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
