"""The ``reward`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Seconds

BUILT_IN_REWARDS = ("exact_match", "sorted_prefix", "math")

REWARD_COLUMNS = ("responses", "answers", "prompts", "sources")
"""Keywords of each call; a function accepts those that it does not need as ``**_``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are scored. Mirrors hydra_configs/reward/*.yaml key by key."""

    function: str
    """A built-in name (exact_match, sorted_prefix, math) or ``path/to/file.py:function``."""

    timeout_s: Seconds
    """Seconds that one call may take."""

    on_error: Literal["stop", "zero"]
    """``stop`` ends the run with the failing response; ``zero`` scores it 0 and counts it."""
