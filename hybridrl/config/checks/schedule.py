"""The rule about learning rates: one that never rises to its peak trains at another rate."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError


def check_lr_warmup(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The warm-up of a learning rate ends before the run does."""
    optimizers = [("actor", config.actor.optimizer, config.num_policy_updates)]
    if config.has_critic and config.mode != "sft":
        optimizers.append(("critic", config.critic.optimizer, config.num_critic_updates))
    for section, optimizer, num_steps in optimizers:
        if 0 < num_steps <= optimizer.num_warmup_steps:
            key = f"{section}.optimizer.num_warmup_steps"
            yield ConfigError(
                key,
                optimizer.num_warmup_steps,
                f"the run takes {num_steps} optimizer steps: the rate would never rise to "
                f"{section}.optimizer.lr={optimizer.lr:g}",
                remedies=[(f"{key}={num_steps // 10}",), (f"{key}=0",)],
            )
