"""Parallel sizes of megatron-core: each divides ranks or a size of the model, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from hybridrl.config.architecture import Architecture, find_architecture
from hybridrl.config.checks.batch_sizes import BatchSizes
from hybridrl.config.checks.critic import check_critic_batch_sizes
from hybridrl.config.checks.divisors import divisors_near, divisors_of, multiples_near
from hybridrl.config.experiment import ExperimentConfig, with_value
from hybridrl.config.spelling import to_override
from hybridrl.errors import ConfigError, instruction

Changes = Mapping[str, int | bool | None]
"""Changed values, by key."""

_TENSOR = "megatron.tensor_parallel_size"
_SEQUENCE = "megatron.sequence_parallel"
_PIPELINE = "megatron.pipeline_parallel_size"
_VIRTUAL = "megatron.num_virtual_stages"
_FIRST = "megatron.num_layers_in_first_stage"
_LAST = "megatron.num_layers_in_last_stage"
_CONTEXT = "megatron.context_parallel_size"
_EXPERT = "megatron.expert_parallel_size"
_EXPERT_TENSOR = "megatron.expert_tensor_parallel_size"
_UNSPLIT: Changes = {
    **dict.fromkeys((_TENSOR, _PIPELINE, _VIRTUAL, _CONTEXT, _EXPERT, _EXPERT_TENSOR), 1),
    **{_SEQUENCE: False, _FIRST: None, _LAST: None},
}
"""The sizes that divide everything."""

_MOST_CPU_RANKS = 8
_MOST_REMEDIES = 3
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Broken:
    """A rule that a key breaks, and changes that may fix it, the nearest first."""

    key: str
    rule: str
    changes: Sequence[Changes] = ()


def check_parallel_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks, heads, layers and experts divide; all violations are reported at once."""
    model = find_architecture(config.model)
    unsplit = {key: n for key, n in _UNSPLIT.items() if n != attrgetter(key)(config)}
    for broken in _broken_rules(config, model):
        changes = [change for change in broken.changes if change != unsplit] + [unsplit]
        legal = [change for change in changes if _is_legal(config, model, change)]
        remedies = [_typed(change) for change in legal[:_MOST_REMEDIES]]
        also = "and change the other keys that are named"
        fix = "" if remedies else f"{instruction(_typed(changes[0]))}, {also}"
        value = attrgetter(broken.key)(config)
        yield ConfigError(broken.key, value, broken.rule, fix, remedies=remedies)


def _typed(changes: Changes) -> tuple[str, ...]:
    return tuple(f"{key}={to_override(value)}" for key, value in changes.items())


def _is_legal(config: ExperimentConfig, model: Architecture | None, changes: Changes) -> bool:
    """Return whether all sizes divide after changes, and rows over the data-parallel ranks too."""
    for key, value in changes.items():
        config = with_value(config, key, value)
    if next(_broken_rules(config, model), None) is not None:
        return False
    if config.offline is not None:
        return config.offline.batch_size % config.num_train_groups == 0
    return BatchSizes.of(config).are_legal and not any(check_critic_batch_sizes(config))


def _broken_rules(config: ExperimentConfig, model: Architecture | None) -> Iterator[_Broken]:
    """Yield every rule that the sizes break; none without megatron."""
    if not config.megatron_worlds:
        return
    yield from _worlds(config, model)
    if model is not None:
        for rule in (_tensor, _sequence, _pipeline, _experts, _whole_experts):
            yield from rule(config, model)


def _worlds(config: ExperimentConfig, model: Architecture | None) -> Iterator[_Broken]:
    sizes = config.megatron
    dense = {
        _TENSOR: ("tensor", sizes.tensor_parallel_size),
        _PIPELINE: ("pipeline", sizes.pipeline_parallel_size),
        _CONTEXT: ("context", sizes.context_parallel_size),
    }
    expert = {
        _EXPERT: ("expert", sizes.expert_parallel_size),
        _EXPERT_TENSOR: ("expert tensor", sizes.expert_tensor_parallel_size),
        _PIPELINE: ("pipeline", sizes.pipeline_parallel_size),
    }
    has_experts = model is not None and model.experts is not None
    for key, num_ranks in config.megatron_worlds.items():
        for multiple, what, factors in (
            (sizes.model_parallel_size, "", dense),
            (sizes.expert_parallel_ranks if has_experts else 1, ", for experts", expert),
        ):
            if num_ranks % multiple:
                product = " x ".join(f"{name} {size}" for name, size in factors.values())
                rule = f"ranks over all nodes, {num_ranks}, must be a multiple of {multiple}"
                smaller = {name: size for name, (_, size) in factors.items()}
                changes = [*_other_ranks(config, key), *_smaller(smaller)]
                yield _Broken(key, f"{rule}{what}: {product}", changes)


def _other_ranks(config: ExperimentConfig, key: str) -> Iterator[Changes]:
    """Yield numbers of ranks per node that all parallel sizes divide; GPUs are never added."""
    ranks: int = attrgetter(key)(config)
    most = max(_MOST_CPU_RANKS, ranks) if config.cluster.device == "cpu" else ranks
    for number in multiples_near(ranks, config.megatron.world_multiple):
        if 0 < number <= most:
            yield {key: number}


def _smaller(sizes: Mapping[str, int]) -> Iterator[Changes]:
    for key, size in sizes.items():
        yield from ({key: n} for n in divisors_near(size, size, at_most=size, count=2))


def _tensor(config: ExperimentConfig, model: Architecture) -> Iterator[_Broken]:
    size, num_kv_heads = config.megatron.tensor_parallel_size, model.num_key_value_heads
    inner = model.intermediate_size if model.has_dense_layers else 0
    shared = model.experts.shared_size if model.experts else 0
    projection = (model.num_heads + 2 * num_kv_heads) * model.head_size
    rules = []
    for number, what in (
        (model.num_heads, "query heads"),
        (inner, "columns inside the MLP (intermediate_size)"),
        (shared, "columns inside the shared expert (shared_expert_intermediate_size)"),
    ):
        if number % size:
            rules.append(f"must divide the model's {number} {what}")
    if num_kv_heads % size and size % num_kv_heads:
        rules.append(f"must divide the model's {num_kv_heads} key-value heads, or be a multiple")
    elif projection % size:
        rules.append(f"must divide the {projection} rows of queries, keys and values together")
    if not rules:
        return
    legal = [
        n
        for n in divisors_of(model.num_heads)
        if not (inner % n or shared % n or projection % n)
        and (num_kv_heads % n == 0 or (n % num_kv_heads == 0 and not config.lora.enabled))
    ]
    for rule in rules:
        yield _divides(config, _TENSOR, rule, legal)


def _divides(config: ExperimentConfig, key: str, rule: str, legal: Sequence[int]) -> _Broken:
    """Name the legal values, and propose the nearest that need no more ranks than there are."""
    size: int = attrgetter(key)(config)
    most = max(config.megatron_worlds.values())
    shown = ", ".join(map(str, legal[:_MOST_SHOWN])) + ", ..." * (len(legal) > _MOST_SHOWN)
    nearest = sorted((n for n in legal if n <= most and n != size), key=lambda n: abs(n - size))
    return _Broken(
        key, f"{rule}; legal: {shown}", [_tensors_apart(config, key, n) for n in nearest]
    )


def _tensors_apart(config: ExperimentConfig, key: str, size: int) -> Changes:
    """Return a change; without tensor parallelism sequence parallelism is off, too."""
    ends = key == _TENSOR and size == 1 and config.megatron.sequence_parallel
    return {key: size, _SEQUENCE: False} if ends else {key: size}


def _sequence(config: ExperimentConfig, model: Architecture) -> Iterator[_Broken]:
    sizes = config.megatron
    if sizes.sequence_parallel and sizes.tensor_parallel_size == 1:
        rule = "tokens are shared by tensor-parallel ranks, and tensor_parallel_size=1"
        yield _Broken(_SEQUENCE, rule, [{_SEQUENCE: False}])
    if model.experts and sizes.tensor_parallel_size > 1 and not sizes.sequence_parallel:
        yield _Broken(
            _SEQUENCE,
            "megatron-core trains experts beside tensor_parallel_size="
            f"{sizes.tensor_parallel_size} only where each of those ranks has tokens of its own",
            [{_SEQUENCE: True}],
        )


def _pipeline(config: ExperimentConfig, model: Architecture) -> Iterator[_Broken]:
    sizes, num_layers = config.megatron, model.num_layers
    num_stages, num_virtual = sizes.pipeline_parallel_size, sizes.num_virtual_stages
    if num_virtual > 1 and num_stages == 1:
        yield _Broken(_VIRTUAL, "needs pipeline_parallel_size of at least 2", [{_VIRTUAL: 1}])
    if sizes.layers_of_stages(num_layers) is not None:
        return
    ends = {_FIRST: sizes.num_layers_in_first_stage, _LAST: sizes.num_layers_in_last_stage}
    uneven = [key for key, number in ends.items() if number is not None]
    changes = [*_uneven_stages(num_layers, num_stages, num_virtual), dict.fromkeys(uneven)]
    if uneven:
        between = f"the others of the model's {num_layers} layers must divide by the stages in"
        virtual = f", and each number by {num_virtual} virtual stages" if num_virtual > 1 else ""
        alone = "there is one stage, which has all layers"
        rule = alone if num_stages == 1 else f"{between} between{virtual}"
        yield _Broken(uneven[0], rule, changes)
    elif num_layers % num_stages:
        exception = "unless the first or the last stage has another number"
        rule = f"must divide the model's {num_layers} layers, {exception}"
        broken = _divides(config, _PIPELINE, rule, divisors_of(num_layers))
        yield _Broken(_PIPELINE, broken.rule, [*changes[:-1], *broken.changes])
    else:
        each = num_layers // num_stages
        rule = f"must divide the {each} layers of a pipeline rank"
        legal = divisors_of(each)
        nearest = [{_VIRTUAL: n} for n in reversed(legal) if n < num_virtual]
        yield _Broken(
            _VIRTUAL, f"{rule}; legal: {', '.join(map(str, legal[:_MOST_SHOWN]))}", nearest
        )


def _uneven_stages(num_layers: int, num_stages: int, num_virtual: int) -> Iterator[Changes]:
    """Yield the split with the fewest layers on the first and last stage: they have embeddings."""
    if num_stages < 3:
        return
    each = -(-num_layers // (num_stages * num_virtual)) * num_virtual
    ends = num_layers - each * (num_stages - 2)
    first = ends // 2 // num_virtual * num_virtual
    if first > 0:
        yield {_FIRST: first, _LAST: ends - first}


def _experts(config: ExperimentConfig, model: Architecture) -> Iterator[_Broken]:
    sizes, experts = config.megatron, model.experts
    num_experts = experts.num_experts if experts else 0
    width = experts.intermediate_size if experts else 0
    for key, size, number, what in (
        (_EXPERT, sizes.expert_parallel_size, num_experts, "experts"),
        (
            _EXPERT_TENSOR,
            sizes.expert_tensor_parallel_size,
            width,
            "columns inside an expert (moe_intermediate_size)",
        ),
    ):
        if size > 1 and experts is None:
            yield _Broken(key, "the model has no experts to share", [{key: 1}])
        elif number % size:
            rule = f"must divide the model's {number} {what}"
            yield _divides(config, key, rule, divisors_of(number))
    if sizes.expert_tensor_parallel_size > 1 and config.cluster.device == "cpu":
        yield _Broken(
            _EXPERT_TENSOR,
            "ranks that share an expert gather unequal numbers of tokens, which gloo, the "
            "collectives of cluster.device=cpu, cannot",
            [{_EXPERT_TENSOR: 1}],
        )


def _whole_experts(config: ExperimentConfig, model: Architecture) -> Iterator[_Broken]:
    """Grouped experts that every tensor-parallel rank holds in full need their gradients summed.

    megatron-core's own layers have it done by ``layers.mark_shards``. On CUDA ``auto`` counts as
    TransformerEngine here: the ranks may have it although this machine has not.
    """
    sizes = config.megatron
    may_be_grouped = config.cluster.device == "cuda" and sizes.layers != "local"
    is_whole = sizes.expert_parallel_size == sizes.expert_tensor_parallel_size == 1
    if model.experts and may_be_grouped and is_whole and sizes.tensor_parallel_size > 1:
        yield _Broken(
            _EXPERT,
            f"each of {sizes.tensor_parallel_size} tensor-parallel ranks would train its own copy "
            "of TransformerEngine's experts; megatron.layers=local trains one",
            [{_EXPERT: n} for n in divisors_of(model.experts.num_experts)[1:]],
        )
