"""The ``critic`` section: the model that expects rewards. Only ``algorithm=ppo`` has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.actor import EngineConfig
from hybridrl.config.limits import Epochs, NotNegative, Ranks, Rows, Within


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig(EngineConfig):
    """How the critic is trained, and where it lives. Mirrors hydra_configs/critic/*.yaml.

    The critic starts as the policy's model, with a value head of zeros in place of its last layer.
    """

    num_warmup_steps: Annotated[int, Within(at_least=0, at_most=10**8, why="no run is so long")]
    """First steps of the run in which only the critic learns: the policy's weights do not move."""

    num_epochs: Epochs
    """Passes over each rollout batch."""

    num_minibatches: Rows
    """Optimizer steps per pass; divides the rows of a step."""

    value_clip: NotNegative
    """Reward units that a value may move from where the step found it before its loss is clipped
    (PPO2). 0 is off."""

    placement: Literal["fused", "own_pool"]
    """``fused`` shares processes and devices with the policy; ``own_pool`` has its own beside them,
    and computes while they do."""

    num_ranks_per_node: Ranks
    """With ``own_pool``: worker processes a machine, in addition to the cluster's."""

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_epochs * self.num_minibatches
