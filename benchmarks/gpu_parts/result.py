"""What a part found, written down as it is found: a part that dies leaves what it had."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.atomic_io import atomic_write_text

PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"


class Skip(Exception):
    """This machine, or this run, cannot show what the part is about; the text says why."""


@dataclass(slots=True)
class Result:
    """One part's JSON file."""

    part: str
    is_dry: bool
    status: str = RUNNING
    error: str = ""
    """Why it failed or was skipped."""

    figures: dict[str, list[Any]] = field(default_factory=dict)
    """Value and unit by name. Unit ``1`` counts, ``yes`` says whether (1 or 0)."""

    notes: list[str] = field(default_factory=list)
    not_exercised: list[str] = field(default_factory=list)
    """What a dry run could not reach."""

    machine: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    seconds: float = 0.0


class Recorder:
    """Keeps one ``Result`` on the disk up to date."""

    def __init__(self, result: Result, folder: Path) -> None:
        self.result = result
        self.path = folder / f"{result.part}.json"
        folder.mkdir(parents=True, exist_ok=True)

    def figure(self, name: str, value: float, unit: str) -> None:
        """Keep one number; what is not finite is kept as text, JSON has no such number."""
        kept = value if math.isfinite(value) else str(value)
        self.result.figures[name] = [kept, unit]
        self.write()

    def figures(self, values: Mapping[str, float], unit: str) -> None:
        """Keep several of one unit."""
        for name, value in values.items():
            self.figure(name, value, unit)

    def note(self, text: str) -> None:
        """Keep what a number does not say."""
        self.result.notes.append(text)
        self.write()

    def not_exercised(self, text: str) -> None:
        """Say what a dry run left out."""
        self.result.not_exercised.append(text)
        self.write()

    def write(self) -> None:
        """Write the file anew, whole."""
        atomic_write_text(self.path, json.dumps(asdict(self.result), indent=1) + "\n")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a part: its end, a skip or an error becomes the result, and nothing is raised."""
        begin = time.monotonic()
        self.write()
        try:
            yield
            self.result.status = PASSED
        except Skip as err:
            self.result.status, self.result.error = SKIPPED, str(err)
        except BaseException as err:
            self.result.status = FAILED
            lines = traceback.format_exception(err)
            self.result.error = f"{type(err).__name__}: {err}\n" + "".join(lines)[-6000:]
            if not isinstance(err, Exception):
                raise
        finally:
            self.result.seconds = round(time.monotonic() - begin, 1)
            self.write()


def read_result(path: Path) -> Result:
    """Read what a ``Recorder`` wrote."""
    return Result(**json.loads(path.read_text(encoding="utf-8")))


def read_results(folder: Path) -> dict[str, Result]:
    """Read every part's file of a folder, by part."""
    results = [read_result(path) for path in sorted(folder.glob("*.json"))]
    return {result.part: result for result in results}
