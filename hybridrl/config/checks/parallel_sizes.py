"""Parallel sizes of megatron-core: each divides ranks or a size of the model, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from hybridrl.config.architecture import Architecture, find_architecture
from hybridrl.config.checks.divisors import divisors_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_TENSOR = "megatron.tensor_parallel_size"
_SEQUENCE = "megatron.sequence_parallel"
_PIPELINE = "megatron.pipeline_parallel_size"
_VIRTUAL = "megatron.num_virtual_stages"
_FIRST = "megatron.num_layers_in_first_stage"
_LAST = "megatron.num_layers_in_last_stage"
_CONTEXT = "megatron.context_parallel_size"
_EXPERT = "megatron.expert_parallel_size"
_EXPERT_TENSOR = "megatron.expert_tensor_parallel_size"

_MOST_SHOWN = 8


def check_parallel_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks, heads, layers and experts divide; all violations are reported at once."""
    if not config.megatron_worlds:
        return
    model = find_architecture(config.model)
    yield from _worlds(config, model)
    if model is not None:
        for rule in (_tensor, _sequence, _pipeline, _experts, _whole_experts):
            yield from rule(config, model)


def _broken(config: ExperimentConfig, key: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(key, attrgetter(key)(config), rule, fix)


def _divides(config: ExperimentConfig, key: str, rule: str, legal: Sequence[int]) -> ConfigError:
    """Name the legal values, of which 1 is one, and the next smaller one."""
    shown = ", ".join(map(str, legal[:_MOST_SHOWN])) + ", ..." * (len(legal) > _MOST_SHOWN)
    smaller = max(n for n in legal if n == 1 or n < attrgetter(key)(config))
    return _broken(config, key, f"{rule}; legal: {shown}", f"set {key}={smaller}")


def _worlds(config: ExperimentConfig, model: Architecture | None) -> Iterator[ConfigError]:
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
                fix = f"change {key}, or set a smaller {' or '.join(factors)}"
                yield _broken(config, key, f"{rule}{what}: {product}", fix)


def _tensor(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
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


def _sequence(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    sizes = config.megatron
    if sizes.sequence_parallel and sizes.tensor_parallel_size == 1:
        rule = "tokens are shared by tensor-parallel ranks, and tensor_parallel_size=1"
        yield _broken(config, _SEQUENCE, rule, f"set {_SEQUENCE}=false")
    if model.experts and sizes.tensor_parallel_size > 1 and not sizes.sequence_parallel:
        yield _broken(
            config,
            _SEQUENCE,
            "megatron-core trains experts beside tensor_parallel_size="
            f"{sizes.tensor_parallel_size} only where each of those ranks has tokens of its own",
            f"set {_SEQUENCE}=true",
        )


def _pipeline(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    sizes, num_layers = config.megatron, model.num_layers
    num_stages, num_virtual = sizes.pipeline_parallel_size, sizes.num_virtual_stages
    if num_virtual > 1 and num_stages == 1:
        rule = "needs pipeline_parallel_size of at least 2"
        yield _broken(config, _VIRTUAL, rule, f"set {_VIRTUAL}=1")
    if sizes.layers_of_stages(num_layers) is not None:
        return
    ends = {_FIRST: sizes.num_layers_in_first_stage, _LAST: sizes.num_layers_in_last_stage}
    uneven = [key for key, number in ends.items() if number is not None]
    if uneven:
        between = f"the others of the model's {num_layers} layers must divide by the stages in"
        virtual = f", and each number by {num_virtual} virtual stages" if num_virtual > 1 else ""
        alone = "there is one stage, which has all layers"
        rule = alone if num_stages == 1 else f"{between} between{virtual}"
        fix = f"set {' and '.join(f'{key}=null' for key in uneven)}, or other numbers"
        yield _broken(config, uneven[0], rule, fix)
    elif num_layers % num_stages:
        exception = "unless the first or the last stage has another number"
        rule = f"must divide the model's {num_layers} layers, {exception} ({_FIRST}, {_LAST})"
        yield _divides(config, _PIPELINE, rule, divisors_of(num_layers))
    else:
        each = num_layers // num_stages
        rule = f"must divide the {each} layers of a pipeline rank"
        yield _divides(config, _VIRTUAL, rule, divisors_of(each))


def _experts(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
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
            yield _broken(config, key, "the model has no experts to share", f"set {key}=1")
        elif number % size:
            rule = f"must divide the model's {number} {what}"
            yield _divides(config, key, rule, divisors_of(number))
    if sizes.expert_tensor_parallel_size > 1 and config.cluster.device == "cpu":
        yield _broken(
            config,
            _EXPERT_TENSOR,
            "ranks that share an expert gather unequal numbers of tokens, which gloo, the "
            "collectives of cluster.device=cpu, cannot",
            f"set {_EXPERT_TENSOR}=1",
        )


def _whole_experts(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    """Grouped experts that every tensor-parallel rank holds in full need their gradients summed.

    megatron-core's own layers have it done by ``layers.mark_shards``. On CUDA ``auto`` counts as
    TransformerEngine here: the ranks may have it although this machine has not.
    """
    sizes = config.megatron
    may_be_grouped = config.cluster.device == "cuda" and sizes.layers != "local"
    is_whole = sizes.expert_parallel_size == sizes.expert_tensor_parallel_size == 1
    if model.experts and may_be_grouped and is_whole and sizes.tensor_parallel_size > 1:
        yield _broken(
            config,
            _EXPERT,
            f"each of {sizes.tensor_parallel_size} tensor-parallel ranks would train its own copy "
            "of TransformerEngine's experts",
            f"share them out ({_EXPERT}), or set megatron.layers=local, which trains one",
        )
