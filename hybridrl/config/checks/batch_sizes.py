"""Prompts, responses, mini-batches and ranks must divide each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from hybridrl.config.checks.divisors import divisors_of, multiples_near
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_MOST = 2**20  # prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """All sizes in the division of one step's rows."""

    num_prompts: int
    num_responses: int
    num_minibatches: int
    num_ranks_per_node: int
    num_nodes: int
    tensor_parallel_size: int

    model_parallel_size: int = 1
    """Ranks that train on the same rows, because each holds a shard of the model."""

    world_multiple: int = 1
    """The number of ranks must be a multiple of this."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> Self:
        """Collect the sizes from their sections."""
        return cls(
            num_prompts=config.trainer.num_prompts_per_step,
            num_responses=config.rollout.num_responses_per_prompt,
            num_minibatches=config.algorithm.num_minibatches,
            num_ranks_per_node=config.cluster.num_ranks_per_node,
            num_nodes=config.cluster.num_nodes,
            # The embedded engine runs on one rank; another value is refused by its own rule.
            tensor_parallel_size=1
            if config.rollout.engine == "hf"
            else config.rollout.tensor_parallel_size,
            model_parallel_size=config.megatron.model_parallel_size
            if config.actor.engine == "megatron"
            else 1,
            world_multiple=config.megatron.world_multiple
            if "cluster.num_ranks_per_node" in config.megatron_worlds
            else 1,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that train."""
        return self.num_nodes * self.num_ranks_per_node

    @property
    def num_groups(self) -> int:
        """Data-parallel ranks: rows of a mini-batch are divided over them. At least 1."""
        return max(1, self.num_ranks // self.model_parallel_size)

    @property
    def num_engines(self) -> int:
        """Rollout engines: prompts are divided over them. At least 1, so that it can divide."""
        return max(1, self.num_ranks // self.tensor_parallel_size)

    @property
    def prompts_multiple(self) -> int:
        """Prompts divide over engines, and their rows over ranks, in multiples of this."""
        shares = self.num_groups * self.num_minibatches
        return math.lcm(self.num_engines, shares // math.gcd(shares, self.num_responses))

    def broken_rules(self) -> tuple[str, ...]:
        """Describe the sizes that do not divide; empty if all do."""
        num_rows = self.num_prompts * self.num_responses
        shares = self.num_groups * self.num_minibatches
        rules = []
        if self.num_ranks % self.world_multiple:
            rules.append(f"{self.num_ranks} ranks must be a multiple of {self.world_multiple}")
        if self.num_ranks_per_node % self.tensor_parallel_size:
            rules.append(
                f"{self.num_ranks_per_node} ranks per node must be a multiple of "
                f"rollout.tensor_parallel_size={self.tensor_parallel_size}"
            )
        if self.num_prompts % self.num_engines:
            rules.append(
                f"{self.num_prompts} prompts must be a multiple of {self.num_engines} "
                f"rollout engines ({self.num_ranks} ranks / tensor parallel "
                f"{self.tensor_parallel_size})"
            )
        if num_rows % shares:
            rules.append(
                f"{num_rows} rows ({self.num_prompts} prompts x {self.num_responses} responses) "
                f"must be a multiple of {shares} ({self._spell_groups()} x "
                f"{self.num_minibatches} mini-batches)"
            )
        return tuple(rules)

    def _spell_groups(self) -> str:
        if self.model_parallel_size == 1:
            return f"{self.num_ranks} ranks"
        return (
            f"{self.num_groups} data-parallel ranks, of {self.model_parallel_size} ranks each "
            "that hold one model together,"
        )


def check_batch_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step divide evenly over rollout engines, training ranks and mini-batches."""
    sizes = BatchSizes.of(config)
    rules = sizes.broken_rules()
    if not rules or sizes.num_ranks_per_node % sizes.tensor_parallel_size:
        return  # check_engines_lie_within_nodes reports the latter
    if sizes.num_ranks % sizes.world_multiple:
        return  # check_parallel_sizes reports this
    key = "trainer.num_prompts_per_step"
    near = multiples_near(sizes.num_prompts, sizes.prompts_multiple)
    remedies = [(f"{key}={number}",) for number in near if 0 < number <= _MOST]
    fix = "" if remedies else "use fewer ranks (cluster.num_nodes, cluster.num_ranks_per_node)"
    yield ConfigError(key, sizes.num_prompts, " and ".join(rules), fix, remedies=remedies)


def check_engines_lie_within_nodes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks that share a rollout engine lie on one node."""
    sizes = BatchSizes.of(config)
    ranks, size = sizes.num_ranks_per_node, sizes.tensor_parallel_size
    if ranks % size == 0:
        return
    largest = max(n for n in divisors_of(ranks) if n < size)
    yield ConfigError(
        "rollout.tensor_parallel_size",
        size,
        f"ranks that share an engine lie on one node, so it must divide "
        f"cluster.num_ranks_per_node={ranks}",
        fix=f"set rollout.tensor_parallel_size={largest}, or cluster.num_ranks_per_node={size} "
        f"where a node has {size} devices",
        remedies=[(f"rollout.tensor_parallel_size={largest}",)],
    )


def check_offline_batch(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step from a data set divide evenly over the data-parallel ranks."""
    if config.offline is None:
        return
    size, num_ranks = config.offline.batch_size, config.num_train_groups
    if size % num_ranks:
        key = f"{config.mode}.batch_size"
        legal = [n for n in (size // num_ranks * num_ranks, -(-size // num_ranks) * num_ranks) if n]
        yield ConfigError(
            key,
            size,
            f"must be a multiple of {num_ranks} data-parallel ranks",
            remedies=[(f"{key}={n}",) for n in legal],
        )


RULES = (check_batch_sizes, check_engines_lie_within_nodes)
