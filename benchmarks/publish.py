"""Run benchmarks and write the tables that they print into docs, with command, commit and date.

    python -m benchmarks.publish              say how old each table is
    python -m benchmarks.publish NAME ...     measure these

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS: Mapping[str, str] = {
    "against_trl": "python -m benchmarks.against_trl",
    "startup": "python -m benchmarks.startup",
    "dispatch": "python -m benchmarks.dispatch",
    "rollout": "OMP_NUM_THREADS=1 python -m benchmarks.rollout",
    "agents": "OMP_NUM_THREADS=1 python -m benchmarks.agents",
    "algorithms": "python -m benchmarks.algorithms",
    "checkpoint": "python -m benchmarks.checkpoint",
    "lora": "OMP_NUM_THREADS=1 python -m benchmarks.lora --rank 8",
    "weight_sync": "OMP_NUM_THREADS=1 python -m benchmarks.weight_sync",
    "weight_deltas": "OMP_NUM_THREADS=1 python -m benchmarks.weight_deltas",
    "megatron": "python -m benchmarks.megatron --rounds 7",
    "serving": "OMP_NUM_THREADS=1 python -m benchmarks.serving "
    "--picture docs/images/killed_engine.svg",
    "router": "OMP_NUM_THREADS=1 python -m benchmarks.router",
    "asynchronous": "OMP_NUM_THREADS=1 python -m benchmarks.asynchronous "
    "--picture docs/images/asynchronous.svg",
    "memory_plan": "python -m benchmarks.memory_plan",
    "families": "OMP_NUM_THREADS=1 python -m benchmarks.families",
}
"""How each published table is made."""

PAGES = {
    "algorithms": "docs/algorithms.md",
    "families": "docs/how-to/model.md",
    "memory_plan": "docs/memory.md",
    "router": "docs/serving.md",
    "weight_deltas": "docs/serving.md",
}
"""Where it stands, if not in docs/performance.md."""

MADE_BY = re.compile(
    r"^`(?P<command>[^`]+)` at commit (?P<commit>\w{7,}) on (?P<date>\d{4}-\d\d-\d\d)", re.MULTILINE
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []])
    names = parser.parse_args().names
    for name in COMMANDS if not names else ():
        made = MADE_BY.search(table_of(name))
        print(f"{name}: {made['date']} at {made['commit']}" if made else f"{name}: never")
    for name in names:
        print(f"{COMMANDS[name]} ...", flush=True)
        put(name, f"{made_by(name)}\n\n{output_of(name)}\n")


def page_of(name: str) -> Path:
    return ROOT / PAGES.get(name, "docs/performance.md")


def block_of(name: str) -> re.Pattern[str]:
    begin, end = f"<!-- figures {name} -->\n", "<!-- end of figures -->\n"
    return re.compile(f"(?<={re.escape(begin)})(?P<text>.*?)(?={re.escape(end)})", re.DOTALL)


def table_of(name: str) -> str:
    """Return a table as it is published.

    Raises:
        ValueError: its page has no place for it.
    """
    block = block_of(name).search(page_of(name).read_text(encoding="utf-8"))
    if block is None:
        raise ValueError(f"{page_of(name)} has no '<!-- figures {name} -->'; put one there")
    return block["text"]


def put(name: str, text: str) -> None:
    page = page_of(name).read_text(encoding="utf-8")
    page_of(name).write_text(block_of(name).sub(lambda _: text, page, count=1), encoding="utf-8")


def made_by(name: str) -> str:
    git = ["git", "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"`{COMMANDS[name]}` at commit {commit.strip()} on {today}:"


def output_of(name: str) -> str:
    words = shlex.split(COMMANDS[name])
    begin = words.index("python")
    command = [sys.executable, *words[begin + 1 :]]
    environment = os.environ | dict(word.split("=", 1) for word in words[:begin])
    done = subprocess.run(
        command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    # Ray colours what it says itself, and its addresses are nobody's business.
    lines = [line for line in done.stdout.splitlines() if "\x1b[" not in line]
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
