"""The ``certify`` section, for ``mode=certify``."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.limits import Count, Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyConfig:
    """How ``mode=certify`` tests a resume. Mirrors hydra_configs/certify/*.yaml key by key."""

    num_steps: Count
    """Steps k before the checkpoint. One run takes 2k steps; one is killed after k and resumed."""

    timeout_s: Seconds
    """Seconds that each of the three processes may take."""
