"""Prompts, responses, mini-batches and ranks must divide each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_MOST = 2**20  # prompts
_PROMPTS = "trainer.num_prompts_per_step"


def num_rollout_engines(config: ExperimentConfig) -> int:
    """Return how many engines the ranks have: prompts are divided over them. At least 1."""
    return max(1, config.cluster.num_ranks // _ranks_per_engine(config))


def _ranks_per_engine(config: ExperimentConfig) -> int:
    # The embedded engine runs on one rank; another value is refused by its own rule.
    return 1 if config.rollout.engine == "hf" else config.rollout.tensor_parallel_size


def prompts_multiple(config: ExperimentConfig) -> int:
    """Return the number that divides the prompts of legal steps, over engines and as rows."""
    shares = config.num_train_groups * config.algorithm.num_minibatches
    num_responses = config.rollout.num_responses_per_prompt
    return math.lcm(num_rollout_engines(config), shares // math.gcd(shares, num_responses))


def check_batch_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step divide evenly over rollout engines, training ranks and mini-batches."""
    cluster, size = config.cluster, _ranks_per_engine(config)
    num_ranks, num_prompts = cluster.num_ranks, config.trainer.num_prompts_per_step
    if cluster.num_ranks_per_node % size:
        key, legal = "rollout.tensor_parallel_size", math.gcd(cluster.num_ranks_per_node, size)
        rule = (
            "ranks that share an engine lie on one node, so it must divide "
            f"cluster.num_ranks_per_node={cluster.num_ranks_per_node}"
        )
        fix = (
            f"set {key}={legal}, or cluster.num_ranks_per_node={size} where a node has {size} "
            "devices"
        )
        yield error(config, key, rule, f"{key}={legal}", fix=fix)
        return
    is_split = "cluster.num_ranks_per_node" in config.megatron_worlds
    if is_split and num_ranks % config.megatron.world_multiple:
        return  # check_parallel_sizes reports it
    num_engines, num_minibatches = num_rollout_engines(config), config.algorithm.num_minibatches
    shares = config.num_train_groups * num_minibatches
    rules = []
    if num_prompts % num_engines:
        rules.append(
            f"{num_prompts} prompts must be a multiple of {num_engines} rollout engines "
            f"({num_ranks} ranks / tensor parallel {size})"
        )
    if config.num_rows_per_step % shares:
        rules.append(
            f"{config.num_rows_per_step} rows ({num_prompts} prompts x "
            f"{config.rollout.num_responses_per_prompt} responses) must be a multiple of {shares} "
            f"({_data_parallel_ranks(config)} x {num_minibatches} mini-batches)"
        )
    if rules:
        multiple = prompts_multiple(config)
        legal = -(-num_prompts // multiple) * multiple
        remedy = f"{_PROMPTS}={legal}" if legal <= _MOST else ""
        fix = "" if remedy else "use fewer ranks (cluster.num_nodes, cluster.num_ranks_per_node)"
        yield error(config, _PROMPTS, " and ".join(rules), remedy, fix=fix)


def _data_parallel_ranks(config: ExperimentConfig) -> str:
    num_groups, num_ranks = config.num_train_groups, config.cluster.num_ranks
    if config.actor.engine != "megatron" or config.megatron.model_parallel_size == 1:
        return f"{num_ranks} ranks"
    return (
        f"{num_groups} data-parallel ranks, of {config.megatron.model_parallel_size} ranks each "
        "that hold one model together,"
    )


def check_critic_batch(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step divide evenly over the critic's data-parallel ranks and mini-batches."""
    num_rows, num_ranks = config.num_rows_per_step, config.num_critic_groups
    num_minibatches = config.critic.num_minibatches
    shares = num_ranks * num_minibatches
    if not config.has_critic or num_rows % shares == 0:
        return
    rule = (
        f"{num_rows} rows a step must be a multiple of {shares} ({num_ranks} ranks of the critic x "
        f"{num_minibatches} mini-batches)"
    )
    if num_rows % num_ranks == 0:
        key = "critic.num_minibatches"
        fewer = math.gcd(num_rows // num_ranks, num_minibatches)
        yield error(config, key, rule, f"{key}={fewer}")
    elif config.has_critic_pool:
        fix = f"set it and critic.num_minibatches to numbers whose product divides {num_rows}"
        yield error(config, "critic.num_ranks_per_node", rule, fix=fix)
    elif num_ranks != config.num_train_groups:  # megatron-core splits one engine alone
        multiple = shares // math.gcd(shares, config.rollout.num_responses_per_prompt)
        yield error(config, _PROMPTS, rule, fix=f"set {_PROMPTS} to a multiple of {multiple}")
    # else check_batch_sizes reports that the policy's own rows do not divide


def check_open_prompts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each rollout engine has as many open prompts as the others, and more than it completes."""
    if not config.oversamples or config.has_servers:
        return
    key, num_engines = "rollout.oversample", num_rollout_engines(config)
    num_prompts, num_open = config.trainer.num_prompts_per_step, config.num_open_prompts
    if num_open % num_engines or num_open <= num_prompts:
        rule = (
            f"{num_open} open prompts (of {_PROMPTS}={num_prompts}) must be a multiple of "
            f"{num_engines} rollout engines, and more than a step has"
        )
        least = f"{key}={1 + num_engines / num_prompts}" if num_prompts % num_engines == 0 else ""
        yield error(config, key, rule, least, f"{key}=1")


RULES = (check_batch_sizes, check_critic_batch, check_open_prompts)
