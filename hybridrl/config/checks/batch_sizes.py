"""Prompts, responses, mini-batches and ranks must divide each other: solved together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Self

from hybridrl.config.checks.divisors import divisors_of, multiples_near
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_KEYS = {
    "num_prompts": "trainer.num_prompts_per_step",
    "num_responses": "rollout.num_responses_per_prompt",
    "num_minibatches": "algorithm.num_minibatches",
    "num_ranks_per_node": "cluster.num_ranks_per_node",
}
_MAX_REMEDIES = 4
_REACH = 16  # neighbours tried on either side of a value, besides the multiples nearest to it
_MOST = 2**20  # of prompts, responses and mini-batches


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Everything that takes part in the division of one step's rows."""

    num_prompts: int
    num_responses: int
    num_minibatches: int
    num_ranks_per_node: int
    num_nodes: int
    tensor_parallel_size: int

    model_parallel_size: int = 1
    """Ranks that train on the same rows, because each has a part of the model."""

    world_multiple: int = 1
    """What the number of ranks must be a multiple of."""

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
        """Whether all divides; as many times as it is asked, ``broken_rules`` would be slow."""
        return not (
            self.num_ranks % self.world_multiple
            or self.num_ranks_per_node % self.tensor_parallel_size
            or self.num_prompts % self.num_engines
            or self.num_prompts * self.num_responses % (self.num_groups * self.num_minibatches)
        )

    def broken_rules(self) -> tuple[str, ...]:
        """Say in words what does not divide; nothing if all does."""
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
            f"{self.num_groups} data-parallel ranks, of {self.model_parallel_size} ranks with "
            "parts of one model each,"
        )


def check_batch_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a step divide evenly over rollout engines, training ranks and mini-batches."""
    sizes = BatchSizes.of(config)
    rules = sizes.broken_rules()
    if not rules or sizes.num_ranks_per_node % sizes.tensor_parallel_size:
        return  # of the latter check_engines_lie_within_nodes speaks
    if sizes.num_ranks % sizes.world_multiple:
        return  # of this check_parallel_sizes speaks
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
    """Return up to four legal combinations that change one or two sizes, the nearest first.

    Distance is the sum of ``|log(new / old)|``, so that 8 -> 16 is as far as 8 -> 4. Of each set
    of changed names only the nearest combination is kept; a pair must beat every single change.
    Ranks are never raised, because nobody can conjure GPUs.
    """
    names = [name for name in _KEYS if name not in fixed]
    best: dict[tuple[str, ...], tuple[float, BatchSizes]] = {}
    for num_changes in (1, 2):
        bound = min((distance for distance, _ in best.values()), default=math.inf)
        for changed in combinations(names, num_changes):
            legal_sizes = _nearest_of(sizes, changed)
            if legal_sizes is not None and (num_changes == 1 or legal_sizes[0] < bound):
                best[changed] = legal_sizes
    ranked = sorted(best.values(), key=lambda legal_sizes: legal_sizes[0])
    return [legal for _, legal in ranked[:_MAX_REMEDIES]]


def _nearest_of(sizes: BatchSizes, changed: tuple[str, ...]) -> tuple[float, BatchSizes] | None:
    before = asdict(sizes)
    best: tuple[float, BatchSizes] | None = None
    for values in product(*(_candidates(sizes, name) for name in changed)):
        distance = sum(
            abs(math.log(n / before[name])) for name, n in zip(changed, values, strict=True)
        )
        if best is not None and distance >= best[0]:
            continue
        legal = replace(sizes, **dict(zip(changed, values, strict=True)))
        if legal.are_legal:
            best = (distance, legal)
    return best


def _candidates(sizes: BatchSizes, name: str) -> list[int]:
    """Return the other values worth trying: neighbours, and the nearest multiples of a divisor."""
    value = asdict(sizes)[name]
    tried = set(range(value - _REACH, value + _REACH + 1))
    shares = sizes.num_groups * sizes.num_minibatches
    steps = (sizes.num_engines, sizes.num_groups, shares, math.lcm(shares, sizes.num_engines))
    for step in (*steps, sizes.tensor_parallel_size):
        tried |= {*multiples_near(value, step)}
    highest = _MOST
    if name == "num_ranks_per_node":
        tried |= {*divisors_of(value), *range(1, _REACH + 1)}
        highest = value - 1
    lowest = 2 if name == "num_responses" else 1
    return sorted(n for n in tried if lowest <= n <= highest and n != value)
