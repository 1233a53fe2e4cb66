"""Rules about the critic; silent for an algorithm without a critic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.config.checks.divisors import divisors_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError


def check_critic_warmup(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The warm-up of the critic ends before the run does, so the policy learns too."""
    num_warmup_steps, num_steps = config.critic.num_warmup_steps, config.trainer.num_steps
    if config.has_critic and num_warmup_steps >= num_steps:
        yield ConfigError(
            "critic.num_warmup_steps",
            num_warmup_steps,
            f"the policy would never learn, must be less than trainer.num_steps={num_steps}",
            remedies=[
                (f"critic.num_warmup_steps={num_steps // 10}",),
                (f"trainer.num_steps={10 * num_warmup_steps}",),
            ],
        )


def check_critic_kernel(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The varlen kernel needs bfloat16, for the critic too."""
    dtype = config.critic.compute_dtype
    is_other = dtype != config.actor.compute_dtype == "bfloat16"
    if config.has_critic and config.model.attention == "varlen" and is_other:
        yield ConfigError(
            "critic.compute_dtype",
            dtype,
            "model.attention=varlen computes in bfloat16",
            remedies=[("critic.compute_dtype=bfloat16",), ("model.attention=auto",)],
        )


def check_critic_batch_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step divide evenly over the critic's data-parallel ranks and mini-batches."""
    num_rows, num_ranks = config.num_rows_per_step, config.num_critic_groups
    num_minibatches = config.critic.num_minibatches
    shares = num_ranks * num_minibatches
    if not config.has_critic or num_rows % shares == 0:
        return
    remedies: list[tuple[str, ...]] = []
    fix = f"set it and critic.num_minibatches to numbers whose product divides {num_rows}"
    if num_rows % num_ranks == 0:
        key, value = "critic.num_minibatches", num_minibatches
        fewer = max(n for n in divisors_of(num_rows // num_ranks) if n < num_minibatches)
        fix, remedies = "", [(f"{key}={fewer}",)]
    elif config.has_critic_pool:
        key, value = "critic.num_ranks_per_node", config.critic.num_ranks_per_node
    elif num_ranks != config.num_train_groups:  # megatron-core splits one engine alone
        key, value = "trainer.num_prompts_per_step", config.trainer.num_prompts_per_step
        per_prompt = config.rollout.num_responses_per_prompt
        fix = f"set {key} to a multiple of {shares // math.gcd(shares, per_prompt)}"
    else:
        return  # check_batch_sizes reports that the policy's own rows do not divide
    yield ConfigError(
        key,
        value,
        f"{num_rows} rows a step must be a multiple of {shares} ({num_ranks} ranks of the critic x "
        f"{num_minibatches} mini-batches)",
        fix=fix,
        remedies=remedies,
    )


RULES = (check_critic_warmup, check_critic_kernel, check_critic_batch_sizes)
