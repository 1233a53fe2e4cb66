"""Rules of sizes that divide each other: prompts, responses, mini-batches, ranks, layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Fused
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import Architecture, find_architecture

_MOST = 2**20  # prompts
_PROMPTS = "trainer.num_prompts_per_step"
_TENSOR = "megatron.tensor_parallel_size"
_SEQUENCE = "megatron.sequence_parallel"
_PIPELINE = "megatron.pipeline_parallel_size"
_VIRTUAL = "megatron.num_virtual_stages"
_FIRST = "megatron.num_layers_in_first_stage"
_LAST = "megatron.num_layers_in_last_stage"
_CONTEXT = "megatron.context_parallel_size"
_EXPERT = "megatron.expert_parallel_size"
_EXPERT_TENSOR = "megatron.expert_tensor_parallel_size"


def num_rollout_engines(config: ExperimentConfig) -> int:
    """Return how many engines divide the prompts of a step; a rollout manager gets all: 1."""
    if not isinstance(config.topology, Fused):
        return 1
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
    experts = config.megatron.expert_parallel_ranks if config.megatron_worlds else 1
    if num_ranks % math.lcm(config.num_ranks_per_group, experts):
        return  # check_parallel_sizes or check_fsdp2 reports it
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
    num_groups, size = config.num_train_groups, config.num_ranks_per_group
    if size == 1:
        return f"{num_groups} ranks"
    together = "hold one model" if config.megatron_worlds else "compute the same rows"
    return f"{num_groups} data-parallel ranks, of {size} ranks each that {together} together,"


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


def check_parallel_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks, heads, layers and experts divide; all violations are reported at once."""
    if not config.megatron_worlds:
        return
    model = find_architecture(config.model)
    yield from _ranks(config, model)
    if model is not None:
        yield from _tensor(config, model)
        yield from _pipeline(config, model)
        yield from _experts(config, model)


def _ranks(config: ExperimentConfig, model: Architecture | None) -> Iterator[ConfigError]:
    sizes, pipeline = config.megatron, config.megatron.pipeline_parallel_size
    expert, expert_tensor = sizes.expert_parallel_size, sizes.expert_tensor_parallel_size
    has_experts = model is not None and model.experts is not None
    for key, num_ranks in config.megatron_worlds.items():
        rule = f"ranks over all nodes, {num_ranks}, must be a multiple of"
        if num_ranks % sizes.model_parallel_size:
            product = (
                f"tensor {sizes.tensor_parallel_size} x pipeline {pipeline} x context "
                f"{sizes.context_parallel_size}"
            )
            fix = f"change {key}, or set a smaller {_TENSOR} or {_PIPELINE} or {_CONTEXT}"
            yield error(config, key, f"{rule} {sizes.model_parallel_size}: {product}", fix=fix)
        if has_experts and num_ranks % sizes.expert_parallel_ranks:
            product = f"expert {expert} x expert tensor {expert_tensor} x pipeline {pipeline}"
            rule = f"{rule} {sizes.expert_parallel_ranks}, for experts: {product}"
            fix = f"change {key}, or set a smaller {_EXPERT} or {_EXPERT_TENSOR} or {_PIPELINE}"
            yield error(config, key, rule, fix=fix)


def _tensor(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    size, num_kv_heads = config.megatron.tensor_parallel_size, model.num_key_value_heads
    inner = model.intermediate_size if model.has_dense_layers else 0
    shared = model.experts.shared_size if model.experts else 0
    projection = (model.num_heads + 2 * num_kv_heads) * model.head_size
    smaller = math.gcd(size, model.num_heads, num_kv_heads, inner, shared)
    fix = f"set {_TENSOR}={smaller}"
    for number, what in (
        (model.num_heads, "query heads"),
        (inner, "columns inside the MLP (intermediate_size)"),
        (shared, "columns inside the shared expert (shared_expert_intermediate_size)"),
    ):
        if number % size:
            yield error(config, _TENSOR, f"must divide the model's {number} {what}", fix=fix)
    if num_kv_heads % size and size % num_kv_heads:
        rule = f"must divide the model's {num_kv_heads} key-value heads, or be a multiple"
        yield error(config, _TENSOR, rule, fix=fix)
    elif projection % size:
        rule = f"must divide the {projection} rows of queries, keys and values together"
        yield error(config, _TENSOR, rule, fix=fix)
    is_sequence = config.megatron.sequence_parallel
    if is_sequence and size == 1:
        rule = "tokens are shared by tensor-parallel ranks, and tensor_parallel_size=1"
        yield error(config, _SEQUENCE, rule, fix=f"set {_SEQUENCE}=false")
    if model.experts and size > 1 and not is_sequence:
        rule = (
            f"megatron-core trains experts beside tensor_parallel_size={size} only where each of "
            "those ranks has tokens of its own"
        )
        yield error(config, _SEQUENCE, rule, fix=f"set {_SEQUENCE}=true")


def _pipeline(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    sizes, num_layers = config.megatron, model.num_layers
    num_stages, num_virtual = sizes.pipeline_parallel_size, sizes.num_virtual_stages
    if num_virtual > 1 and num_stages == 1:
        rule = "needs pipeline_parallel_size of at least 2"
        yield error(config, _VIRTUAL, rule, fix=f"set {_VIRTUAL}=1")
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
        yield error(config, uneven[0], rule, fix=fix)
    elif num_layers % num_stages:
        exception = "unless the first or the last stage has another number"
        rule = f"must divide the model's {num_layers} layers, {exception} ({_FIRST}, {_LAST})"
        fix = f"set {_PIPELINE}={math.gcd(num_stages, num_layers)}"
        yield error(config, _PIPELINE, rule, fix=fix)
    else:
        each = num_layers // num_stages
        fix = f"set {_VIRTUAL}={math.gcd(num_virtual, each)}"
        yield error(config, _VIRTUAL, f"must divide the {each} layers of a pipeline rank", fix=fix)


def _experts(config: ExperimentConfig, model: Architecture) -> Iterator[ConfigError]:
    sizes, experts = config.megatron, model.experts
    expert, expert_tensor = sizes.expert_parallel_size, sizes.expert_tensor_parallel_size
    num_experts = experts.num_experts if experts else 0
    width = experts.intermediate_size if experts else 0
    for key, size, number, what in (
        (_EXPERT, expert, num_experts, "experts"),
        (_EXPERT_TENSOR, expert_tensor, width, "columns inside an expert (moe_intermediate_size)"),
    ):
        if size > 1 and experts is None:
            rule = "the model has no experts to share"
            yield error(config, key, rule, fix=f"set {key}=1")
        elif number % size:
            fix = f"set {key}={math.gcd(size, number)}"
            yield error(config, key, f"must divide the model's {number} {what}", fix=fix)
    if expert_tensor > 1 and config.cluster.device == "cpu":
        rule = (
            "ranks that share an expert gather unequal numbers of tokens, which gloo, the "
            "collectives of cluster.device=cpu, cannot"
        )
        yield error(config, _EXPERT_TENSOR, rule, fix=f"set {_EXPERT_TENSOR}=1")
    # ``layers.mark_shards`` sums gradients for megatron-core's own layers alone. On CUDA ``auto``
    # counts as TransformerEngine: the ranks may have it although this machine has not.
    may_be_grouped = config.cluster.device == "cuda" and sizes.layers != "local"
    is_whole = expert == expert_tensor == 1 and sizes.tensor_parallel_size > 1
    if experts and may_be_grouped and is_whole:
        rule = (
            f"each of {sizes.tensor_parallel_size} tensor-parallel ranks would train its own copy "
            "of TransformerEngine's experts"
        )
        fix = f"share them out ({_EXPERT}), or set megatron.layers=local, which trains one"
        yield error(config, _EXPERT, rule, fix=fix)
