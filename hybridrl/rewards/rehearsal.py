"""``mode=check`` of a user's reward function: it loads it as a run would."""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.reward import RewardConfig
from hybridrl.errors import ConfigError, RewardError
from hybridrl.rewards.runner import ChildRunner


def check_reward_loads(reward: RewardConfig) -> None:
    """Load the function in a process of its own, and end that. A built-in one needs no look.

    Raises:
        ConfigError: it cannot be loaded.
    """
    path, colon, name = reward.function.rpartition(":")
    if not colon:
        return
    try:
        ChildRunner(Path(path), name, timeout_s=reward.timeout_s).close()
    except RewardError as err:
        reason = str(err).partition("cannot be loaded: ")[2] or str(err)
        rule = f"cannot be loaded: {reason.removesuffix('; correct the file')}"
        raise ConfigError("reward.function", reward.function, rule, f"correct {path}") from err
