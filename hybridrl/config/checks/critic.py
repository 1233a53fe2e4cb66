"""Rules about the critic; silent for an algorithm without a critic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.config.checks.batch_sizes import BatchSizes
from hybridrl.config.checks.divisors import divisors_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_MOST_ROWS = 2**20  # prompts of a step, and mini-batches


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
    wanted = config.critic.num_minibatches
    if not config.has_critic or num_rows % (num_ranks * wanted) == 0:
        return
    if num_rows % num_ranks == 0:
        key, value = "critic.num_minibatches", wanted
        fewer = max(n for n in divisors_of(num_rows // num_ranks) if n < wanted)
        remedies: list[tuple[str, ...]] = [(f"critic.num_minibatches={fewer}",)]
    elif config.has_critic_pool:
        key, value = "critic.num_ranks_per_node", config.critic.num_ranks_per_node
        fewest = _fewest_critic_ranks(config)
        remedies = [(f"critic.num_ranks_per_node={fewest}", "critic.num_minibatches=1")]
    elif num_ranks != config.num_train_groups:  # megatron-core splits one engine alone
        key, value = "trainer.num_prompts_per_step", config.trainer.num_prompts_per_step
        multiple = _common_multiple(config)
        enough = -(-value // multiple) * multiple
        remedies = [(f"{key}={enough}",)] if enough <= _MOST_ROWS else []
    else:
        return  # check_batch_sizes reports that the policy's own rows do not divide
    yield ConfigError(
        key,
        value,
        f"{num_rows} rows a step must be a multiple of {num_ranks * wanted} ({num_ranks} ranks of "
        f"the critic x {wanted} mini-batches)",
        fix="" if remedies else "use fewer ranks or mini-batches",
        remedies=remedies,
    )


def _fewest_critic_ranks(config: ExperimentConfig) -> int:
    """Return the fewest ranks per node that megatron-core can divide, if it trains the critic."""
    if config.critic.engine != "megatron":
        return 1
    multiple = config.megatron.world_multiple
    return multiple // math.gcd(multiple, config.cluster.num_nodes)


def _common_multiple(config: ExperimentConfig) -> int:
    """Return a number of prompts whose multiples all divide for both models and engines."""
    policy = config.num_train_groups * config.algorithm.num_minibatches
    critic = config.num_critic_groups * config.critic.num_minibatches
    return math.lcm(policy, critic, BatchSizes.of(config).num_engines)


RULES = (check_critic_warmup, check_critic_kernel, check_critic_batch_sizes)
