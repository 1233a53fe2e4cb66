"""``mode=check`` of users' reward functions: it loads them as a run would."""

from __future__ import annotations

from hybridrl.config.reward import RewardConfig
from hybridrl.errors import ConfigError, RewardError, SandboxError
from hybridrl.rewards.runner import ChildRunner, check_sandbox, find_function


def find_reward_flaws(reward: RewardConfig) -> list[ConfigError]:
    """Load the functions in a process of its own, and end that; try the sandbox of code.

    Returns:
        An error for each that cannot be loaded, or not run in its sandbox.
    """
    flaws = []
    for name, part in reward.parts.items():
        path, colon, _ = part.function.rpartition(":")
        key = "reward.function" if reward.function else f"reward.functions.{name}.function"
        try:
            check_sandbox(part)
        except SandboxError as err:
            flaws.append(ConfigError(key, part.function, str(err), "choose another function"))
        if not colon:
            continue
        try:
            ChildRunner([find_function(part)], timeout_s=reward.timeout_s).close()
        except RewardError as err:
            reason = str(err).partition("cannot be loaded: ")[2] or str(err)
            rule = f"cannot be loaded: {reason.removesuffix('; correct the file')}"
            flaws.append(ConfigError(key, part.function, rule, f"correct {path}"))
    return flaws
