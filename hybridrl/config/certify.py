"""The ``certify`` section: of ``mode=certify``."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.limits import Count, Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyConfig:
    """How the proof of resuming is made. Mirrors hydra_configs/certify/*.yaml key by key."""

    num_steps: Count
    """Steps k before the checkpoint: 2k are run without a break, and 2k with a kill after k."""

    timeout_s: Seconds
    """Seconds that each of the three processes may take."""
