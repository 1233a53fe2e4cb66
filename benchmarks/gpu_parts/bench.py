"""What a part is given: where to write, how large to be, and on what to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_parts.machine import Needs
from benchmarks.gpu_parts.result import Recorder
from benchmarks.gpu_parts.shapes import ensure_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One run of one part."""

    record: Recorder
    is_dry: bool

    engine: str
    """The rollout engine: ``sglang``, or ``hf`` where a dry run does without."""

    scratch: Path
    """Keeps made models between parts."""

    device: torch.device

    engine_args: tuple[str, ...] = ()
    """``key=value`` for ``rollout.engine_args``: what this machine's SGLang needs."""

    def model(self, shape: str) -> Path:
        """Return a folder of random weights of that shape; in a dry run of a tiny one."""
        return ensure_model("tiny" if self.is_dry else shape, self.scratch, device=self.device)

    def size(self, real: int, *, dry: int) -> int:
        """Return a count: the real one, or a small one in a dry run."""
        return dry if self.is_dry else real


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One entry of the registry."""

    name: str
    title: str
    """What it shows, for the table."""

    run: Callable[[Bench], None]
    needs: Needs = field(default_factory=Needs)

    about_s: int = 120
    """Expected seconds on a large GPU; a guess until it ran there."""
