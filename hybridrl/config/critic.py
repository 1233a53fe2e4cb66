"""The ``critic`` section: the model that predicts rewards. Only ``algorithm=ppo`` has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.actor import EngineConfig
from hybridrl.config.limits import Epochs, NotNegative, Ranks, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig(EngineConfig):
    """How the critic is trained, and on which processes. Mirrors hydra_configs/critic/*.yaml.

    The critic starts as the policy's model; a value head of zeros replaces the output embedding.
    """

    num_warmup_steps: Annotated[int, Field(ge=0, le=10**8, description="no run is so long")]
    """First steps of the run, in which only the critic learns and the policy does not change."""

    num_epochs: Epochs
    """Passes over each rollout batch."""

    num_minibatches: Rows
    """Optimizer steps per pass; divides the rows of a step."""

    value_clip: NotNegative
    """A value may move this far, in reward units, from its value before the step; beyond, its loss
    is clipped (PPO2). 0 is off."""

    placement: Literal["fused", "own_pool"]
    """``fused`` shares processes and devices with the policy; ``own_pool`` has its own beside them,
    and computes at the same time."""

    num_ranks_per_node: Ranks
    """With ``own_pool``: worker processes per machine, in addition to the cluster's."""

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_epochs * self.num_minibatches
