"""Prompts, responses, mini-batches and ranks must divide each other: solved as one problem."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Self

from hybridrl.config.checks.divisors import divisors_near, divisors_of, multiples_near
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_KEYS = {
    "num_prompts": "trainer.num_prompts_per_step",
    "num_responses": "rollout.num_responses_per_prompt",
    "num_minibatches": "algorithm.num_minibatches",
    "num_ranks_per_node": "cluster.num_ranks_per_node",
}
_MOST = 2**20  # prompts, responses and mini-batches


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
    def are_legal(self) -> bool:
        """Whether everything divides."""
        return not self.broken_rules()

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
    fixed = {"num_minibatches"} if config.algorithm.old_logprobs == "current" else set()
    alternatives = nearest_legal(sizes, fixed=fixed)
    before = asdict(sizes)
    remedies = [
        tuple(f"{_KEYS[name]}={n}" for name, n in asdict(legal).items() if n != before[name])
        for legal in alternatives
    ]
    fix = "" if remedies else "use fewer ranks (cluster.num_nodes, cluster.num_ranks_per_node)"
    yield ConfigError(
        _KEYS["num_prompts"], sizes.num_prompts, " and ".join(rules), fix, remedies=remedies
    )


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


def nearest_legal(sizes: BatchSizes, *, fixed: Collection[str] = ()) -> list[BatchSizes]:
    """Return the nearest legal value of each size that alone makes all legal, the nearest first.

    Distance is ``|log(new / old)|``, so that 8 -> 16 is as far as 8 -> 4. The number of ranks is
    never raised: the user may have no more GPUs.
    """
    before = asdict(sizes)
    legal: list[tuple[float, BatchSizes]] = []
    for name, values in _candidates(sizes):
        changed = [
            (abs(math.log(value / before[name])), replace(sizes, **{name: value}))
            for value in values
            if 0 < value <= _MOST and name not in fixed
        ]
        nearest = sorted((c for c in changed if c[1].are_legal), key=itemgetter(0))
        legal.extend(nearest[:1])
    return [changed for _, changed in sorted(legal, key=itemgetter(0))]


def _candidates(sizes: BatchSizes) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield the values near the present ones that divide, by size."""
    num_prompts, num_responses = sizes.num_prompts, sizes.num_responses
    shares = sizes.num_groups * sizes.num_minibatches
    step = math.lcm(sizes.num_engines, shares // math.gcd(shares, num_responses))
    yield "num_prompts", multiples_near(num_prompts, step)
    below, above = multiples_near(num_responses, shares // math.gcd(shares, num_prompts))
    yield "num_responses", (n for n in (below, above) if n > 1)
    rows_per_rank = num_prompts * num_responses // sizes.num_groups
    if rows_per_rank:
        wanted = sizes.num_minibatches
        yield "num_minibatches", divisors_near(rows_per_rank, wanted, at_most=_MOST, count=2)
    engines_per_node = divisors_of(max(1, num_prompts // sizes.num_nodes))
    ranks = (sizes.tensor_parallel_size * number for number in engines_per_node)
    yield "num_ranks_per_node", (number for number in ranks if number < sizes.num_ranks_per_node)


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
