"""The engines of a run that replays rollouts: there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from hybridrl.batch import PromptBatch
from hybridrl.errors import PhaseError
from hybridrl.sampler import SamplingParams
from hybridrl.workers.sharding.served_engines import Servers
from hybridrl.workers.sharding.weight_files import WeightSource


class NoEngines(Servers):
    """Refuses all that needs an engine."""

    timeout_s = 1.0

    def need_weights(self, *, version: int) -> NoReturn:
        """Refuse: a run that replays opens no rollout phase."""
        raise PhaseError("a run with rollout.replay has no rollout engines, and nothing samples")

    def update(self, source: WeightSource, *, version: int) -> NoReturn:
        """Refuse likewise."""
        self.need_weights(version=version)

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        fused: Sequence[str] = (),
    ) -> NoReturn:
        """Refuse likewise."""
        self.need_weights(version=version)
