"""Ranks, heads, layers and experts must divide each other: checked and solved together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Any, Self

from hybridrl.config.checks.divisors import divisors_near
from hybridrl.config.checks.lora import model_values
from hybridrl.config.experiment import ExperimentConfig

Size = int | bool | None

Sizes = Mapping[str, Size]
"""Values by key."""

Broken = tuple[str, str]
"""The key that is named, and the rule that it breaks."""

_FIRST = "megatron.num_layers_in_first_stage"
_LAST = "megatron.num_layers_in_last_stage"
_RANKS = "cluster.num_ranks_per_node"
_CRITIC_RANKS = "critic.num_ranks_per_node"
_MOST_CHANGES = 3
_NEAREST = 5  # legal values of each size that are tried
_MOST_CPU_RANKS = 8
_ONES: Sizes = {
    "megatron.tensor_parallel_size": 1,
    "megatron.sequence_parallel": False,
    "megatron.pipeline_parallel_size": 1,
    "megatron.num_virtual_stages": 1,
    "megatron.context_parallel_size": 1,
    "megatron.expert_parallel_size": 1,
    "megatron.expert_tensor_parallel_size": 1,
}
"""The shape that divides everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFacts:
    """What shapes are held against. A size that config.json does not say is 0: all divide it."""

    num_heads: int
    num_key_value_heads: int
    head_size: int
    num_layers: int

    intermediate_size: int
    """Of dense layers; 0 if every layer has experts."""

    num_experts: int
    """Of a mixture-of-experts layer; 0 if there is none."""

    expert_intermediate_size: int

    is_known: bool
    """The model's sizes could be read."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> Self:
        """Read config.json, and look around."""
        values = model_values(config)

        def size(name: str) -> int:
            value = values.get(name)
            return value if isinstance(value, int) else 0

        num_experts = size("num_experts")
        is_sparse = num_experts and size("decoder_sparse_step") <= 1
        has_dense = not is_sparse or bool(values.get("mlp_only_layers"))
        return cls(
            num_heads=size("num_attention_heads"),
            num_key_value_heads=size("num_key_value_heads") or size("num_attention_heads"),
            head_size=size("head_dim")
            or size("hidden_size") // max(1, size("num_attention_heads")),
            num_layers=size("num_hidden_layers"),
            intermediate_size=size("intermediate_size") if has_dense else 0,
            num_experts=num_experts,
            expert_intermediate_size=size("moe_intermediate_size"),
            is_known=bool(values),
        )


def broken_sizes(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    """Yield every rule that the parallel sizes of ``config`` break; none without megatron."""
    if config.megatron_worlds:
        for rule in (_worlds, _tensor, _sequence, _pipeline, _experts, _whole_experts):
            yield from rule(config, facts)


def _worlds(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    sizes = config.megatron
    for key, num_ranks in config.megatron_worlds.items():
        ranks = f"ranks over all nodes, {num_ranks}, must be a multiple of"
        if num_ranks % sizes.model_parallel_size:
            yield (
                key,
                f"{ranks} {sizes.model_parallel_size}: tensor {sizes.tensor_parallel_size} x "
                f"pipeline {sizes.pipeline_parallel_size} x context {sizes.context_parallel_size}",
            )
        if facts.num_experts and num_ranks % sizes.expert_parallel_ranks:
            yield (
                key,
                f"{ranks} {sizes.expert_parallel_ranks}, for experts: expert "
                f"{sizes.expert_parallel_size} x expert tensor "
                f"{sizes.expert_tensor_parallel_size} x pipeline {sizes.pipeline_parallel_size}",
            )


def _tensor(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    key, size = "megatron.tensor_parallel_size", config.megatron.tensor_parallel_size
    for number, what in (
        (facts.num_heads, "query heads"),
        (facts.intermediate_size, "columns inside the MLP (intermediate_size)"),
    ):
        if number % size:
            yield key, f"must divide the model's {number} {what}"
    num_kv_heads = facts.num_key_value_heads
    projection = (facts.num_heads + 2 * num_kv_heads) * facts.head_size
    if num_kv_heads % size and size % num_kv_heads:
        yield key, f"must divide the model's {num_kv_heads} key-value heads, or be a multiple"
    elif projection % size:
        yield key, f"must divide the {projection} rows of queries, keys and values together"


def _sequence(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    key, sizes = "megatron.sequence_parallel", config.megatron
    if sizes.sequence_parallel and sizes.tensor_parallel_size == 1:
        yield key, "tokens are shared by tensor-parallel ranks, and tensor_parallel_size=1"
    if facts.num_experts and sizes.tensor_parallel_size > 1 and not sizes.sequence_parallel:
        yield (
            key,
            "megatron-core trains experts beside tensor_parallel_size="
            f"{sizes.tensor_parallel_size} only where each of those ranks has tokens of its own",
        )


def _pipeline(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    sizes = config.megatron
    num_stages, num_virtual = sizes.pipeline_parallel_size, sizes.num_virtual_stages
    if num_virtual > 1 and num_stages == 1:
        yield "megatron.num_virtual_stages", "needs pipeline_parallel_size of at least 2"
    if not facts.num_layers or sizes.layers_of_stages(facts.num_layers) is not None:
        return
    for key, end in ((_FIRST, sizes.num_layers_in_first_stage), (_LAST, None)):
        end = sizes.num_layers_in_last_stage if key == _LAST else end
        if end is not None:
            yield key, _uneven(num_stages, num_virtual, facts.num_layers)
            return
    if facts.num_layers % num_stages:
        yield (
            "megatron.pipeline_parallel_size",
            f"must divide the model's {facts.num_layers} layers, unless the first or the last "
            "stage has another number",
        )
    else:
        yield (
            "megatron.num_virtual_stages",
            f"must divide the {facts.num_layers // num_stages} layers of a pipeline rank",
        )


def _uneven(num_stages: int, num_virtual: int, num_layers: int) -> str:
    if num_stages == 1:
        return "there is one stage, which has all layers"
    virtual = f", and each number by {num_virtual} virtual stages" if num_virtual > 1 else ""
    return (
        f"what is left of the model's {num_layers} layers must divide by the stages in between"
        f"{virtual}"
    )


def _experts(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    sizes = config.megatron
    for name, size, number, what in (
        ("expert_parallel_size", sizes.expert_parallel_size, facts.num_experts, "experts"),
        (
            "expert_tensor_parallel_size",
            sizes.expert_tensor_parallel_size,
            facts.expert_intermediate_size,
            "columns inside an expert (moe_intermediate_size)",
        ),
    ):
        if size > 1 and facts.is_known and not facts.num_experts:
            yield f"megatron.{name}", "the model has no experts to share"
        elif number % size:
            yield f"megatron.{name}", f"must divide the model's {number} {what}"
    if sizes.expert_tensor_parallel_size > 1 and config.cluster.device == "cpu":
        yield (
            "megatron.expert_tensor_parallel_size",
            "ranks that share an expert gather unequal numbers of tokens, which gloo, the "
            "collectives of cluster.device=cpu, cannot",
        )


def _whole_experts(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Broken]:
    """Nobody adds up what grouped experts learn that each tensor-parallel rank has whole.

    For layers of megatron-core's own ``layers.mark_shards`` has it done. On CUDA ``auto`` counts as
    TransformerEngine wherever this is asked: the ranks may have it where this machine has not.
    """
    sizes = config.megatron
    may_be_grouped = config.cluster.device == "cuda" and sizes.layers != "local"
    is_whole = sizes.expert_parallel_size == sizes.expert_tensor_parallel_size == 1
    if facts.num_experts and may_be_grouped and is_whole and sizes.tensor_parallel_size > 1:
        yield (
            "megatron.expert_parallel_size",
            "TransformerEngine's experts would be whole on each of "
            f"{sizes.tensor_parallel_size} tensor-parallel ranks, and learn apart; with "
            "megatron.layers=local they do not",
        )


def value_of(config: ExperimentConfig, key: str) -> Size:
    """Return the value of one of the keys that ``broken_sizes`` names."""
    if key in (_RANKS, _CRITIC_RANKS):
        return _ranks_per_node(config, key)
    return _sizes(config)[key]


def _ranks_per_node(config: ExperimentConfig, key: str) -> int:
    section = config.critic if key == _CRITIC_RANKS else config.cluster
    return section.num_ranks_per_node


def _sizes(config: ExperimentConfig) -> dict[str, Size]:
    sizes = config.megatron
    return {
        "megatron.tensor_parallel_size": sizes.tensor_parallel_size,
        "megatron.sequence_parallel": sizes.sequence_parallel,
        "megatron.pipeline_parallel_size": sizes.pipeline_parallel_size,
        "megatron.num_virtual_stages": sizes.num_virtual_stages,
        _FIRST: sizes.num_layers_in_first_stage,
        _LAST: sizes.num_layers_in_last_stage,
        "megatron.context_parallel_size": sizes.context_parallel_size,
        "megatron.expert_parallel_size": sizes.expert_parallel_size,
        "megatron.expert_tensor_parallel_size": sizes.expert_tensor_parallel_size,
    }


def with_sizes(config: ExperimentConfig, changes: Sizes) -> ExperimentConfig:
    """Return ``config`` with other sizes, by key."""
    names: dict[str, Any] = {
        key.partition(".")[2]: value for key, value in changes.items() if key.startswith("megatron")
    }
    config = replace(config, megatron=replace(config.megatron, **names))
    ranks, critic_ranks = changes.get(_RANKS), changes.get(_CRITIC_RANKS)
    if ranks is not None:
        config = replace(config, cluster=replace(config.cluster, num_ranks_per_node=ranks))
    if critic_ranks is not None:
        config = replace(config, critic=replace(config.critic, num_ranks_per_node=critic_ranks))
    return config


def legal_shapes(
    config: ExperimentConfig, *, is_fit: Callable[[ExperimentConfig], bool]
) -> list[Sizes]:
    """Return changes of sizes that make all of them legal, by key: uneven stages, then even ones.

    Args:
        config: whose sizes break a rule.
        is_fit: what else a shape must pass; where none does, it is not asked.
    """
    facts = ShapeFacts.of(config)
    reset: Sizes = {key: None for key in (_FIRST, _LAST) if value_of(config, key) is not None}
    even = with_sizes(config, reset)

    def is_legal(changes: Sizes) -> bool:
        changed = with_sizes(config, changes)
        return next(broken_sizes(changed, facts), None) is None and is_fit(changed)

    shapes = [split for split in _uneven_splits(config, facts) if is_legal(split)]
    if reset and is_legal(reset):
        return [*shapes, reset]
    return [*shapes, *({**reset, **shape} for shape in nearest_shapes(even, is_fit=is_fit))]


def _uneven_splits(config: ExperimentConfig, facts: ShapeFacts) -> Iterator[Sizes]:
    """Yield the split that leaves the ends least: they have the embeddings."""
    size, num_virtual = config.megatron.pipeline_parallel_size, config.megatron.num_virtual_stages
    if size < 3 or not facts.num_layers:
        return
    each = -(-facts.num_layers // (size * num_virtual)) * num_virtual
    ends = facts.num_layers - each * (size - 2)
    first = ends // 2 // num_virtual * num_virtual
    if first > 0:
        yield {_FIRST: first, _LAST: ends - first}


def nearest_shapes(
    config: ExperimentConfig, *, is_fit: Callable[[ExperimentConfig], bool], at_most: int = 3
) -> list[Sizes]:
    """Return changes of sizes that make all of them legal, by key: the fewest, the nearest first.

    Distance is the sum of ``|log(new / old)|``. GPUs are never added; ranks on CPUs are.

    Args:
        config: whose sizes break a rule.
        is_fit: what else a shape must pass; where none does, it is not asked.
        at_most: how many to return.
    """
    facts = ShapeFacts.of(config)
    candidates = _candidates(config, facts)
    legal: list[Sizes] = []
    for num_changes in range(1, _MOST_CHANGES + 1):
        for keys in combinations(candidates, num_changes):
            for values in product(*(candidates[key] for key in keys)):
                changes = dict(zip(keys, values, strict=True))
                if next(broken_sizes(with_sizes(config, changes), facts), None) is None:
                    legal.append(changes)
        legal.sort(key=lambda changes: _distance(config, changes))
        fit = islice((c for c in legal if is_fit(with_sizes(config, c))), at_most)
        if fitting := list(fit):
            return fitting
    return legal[:at_most] or [
        {key: new for key, new in _ONES.items() if new != value_of(config, key)}
    ]


def _candidates(config: ExperimentConfig, facts: ShapeFacts) -> dict[str, list[Size]]:
    """Return the other values worth trying of each size: legal by themselves, and near."""
    sizes = config.megatron
    most = max(config.megatron_worlds.values(), default=1)
    heads = math.gcd(facts.num_heads, facts.intermediate_size)
    if config.lora.enabled:  # adapters want whole key-value heads
        heads = math.gcd(heads, facts.num_key_value_heads)
    candidates: dict[str, list[Size]] = {
        "megatron.tensor_parallel_size": _divisors(heads, sizes.tensor_parallel_size, most),
        "megatron.pipeline_parallel_size": _divisors(
            facts.num_layers, sizes.pipeline_parallel_size, most
        ),
        "megatron.num_virtual_stages": _divisors(
            facts.num_layers, sizes.num_virtual_stages, facts.num_layers or 1
        ),
        "megatron.context_parallel_size": _divisors(0, sizes.context_parallel_size, most),
        "megatron.expert_parallel_size": _divisors(
            facts.num_experts or 1, sizes.expert_parallel_size, most
        ),
        "megatron.expert_tensor_parallel_size": _divisors(
            facts.expert_intermediate_size or 1, sizes.expert_tensor_parallel_size, most
        ),
    }
    candidates["megatron.sequence_parallel"] = [not sizes.sequence_parallel]
    for key in config.megatron_worlds:
        ranks = _ranks_per_node(config, key)
        most_ranks = max(_MOST_CPU_RANKS, ranks) if config.cluster.device == "cpu" else ranks
        candidates[key] = _divisors(0, ranks, most_ranks)
    return {key: values for key, values in candidates.items() if values}


def _divisors(number: int, value: int, most: int) -> list[Size]:
    """Return the divisors of ``number`` up to ``most`` that are nearest to ``value``, and 1."""
    nearest = divisors_near(number, value, at_most=most, count=_NEAREST)
    return list(dict.fromkeys([*nearest, *([1] if value != 1 else [])]))


def _distance(config: ExperimentConfig, changes: Sizes) -> float:
    """Switching sequence parallelism costs nothing: it is a matter of course with tensors."""
    pairs = (
        (value, value_of(config, key))
        for key, value in changes.items()
        if key != "megatron.sequence_parallel"
    )
    return sum(abs(math.log(new / old)) for new, old in pairs if new and old)
