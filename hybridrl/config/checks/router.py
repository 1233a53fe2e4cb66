"""Rules about sglang-router in front of the policy's servers."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import HALVES
from hybridrl.errors import ConfigError


def check_router(config: ExperimentConfig) -> Iterator[ConfigError]:
    """It stands before whole servers of SGLang that the run starts on devices of their own."""
    if config.serving.router == "none":
        return
    groups = config.serving.placed_groups
    has_halves = any(group.config.worker_type in HALVES for group in groups)
    obstacles = {
        "would be ignored: the ranks have the rollout engines": not config.has_servers,
        "it passes requests to SGLang alone": config.rollout.engine != "sglang",
        "it drops the experts of tokens (rollout.routed_experts)": config.rollout.routed_experts,
        "engines of ranks are asked through their ranks": config.serving.colocated,
        "it stands before whole servers, and these are halves": has_halves,
        "others run the policy's servers": config.serving.has_external_policy,
    }
    for rule, is_true in obstacles.items():
        if is_true:
            remedies = [("serving.router=none",)]
            yield ConfigError("serving.router", config.serving.router, rule, remedies=remedies)


RULES = (check_router,)
