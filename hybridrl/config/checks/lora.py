"""Rules about adapters, checked against the model's config.json before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridrl.config.architecture import MLP_MODULES, Architecture, find_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import ALL_LINEAR, ATTENTION_LINEAR, LINEAR_MODULES
from hybridrl.errors import ConfigError, suggest_name

_OF_HEADS = ("q_proj", "k_proj", "v_proj")
"""Linear layers whose outputs are heads."""


def check_lora_targets(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Every target name adapts a layer: a name that matches none would silently train nothing."""
    lora = config.lora
    if not lora.enabled:
        return
    key, everything = "lora.target_modules", ("lora.target_modules=[all-linear]",)
    model = find_architecture(config.model)
    names = LINEAR_MODULES if model is None else tuple(model.linear_sizes)
    if not set(LINEAR_MODULES).issubset(names):
        everything = (f"lora.target_modules=[{','.join(names)}]",)
    else:
        names = (*names, ALL_LINEAR)
    if not lora.target_modules:
        yield ConfigError(key, [], "there must be a layer to adapt", remedies=[everything])
    for name in dict.fromkeys(lora.target_modules):
        if name not in names:
            yield ConfigError(
                key,
                name,
                f"matches no linear layer of a block ({suggest_name(name, names)})",
                remedies=[everything],
            )


def check_lora_rank(config: ExperimentConfig) -> Iterator[ConfigError]:
    """B A has at most the rank of its smallest side, so a higher rank wastes memory."""
    model = find_architecture(config.model)
    if not config.lora.enabled or model is None:
        return
    sizes = linear_sizes(model)
    targets = [name for name in config.lora.modules if name in sizes]
    if not targets:
        return  # check_lora_targets reports it
    smallest = min(targets, key=lambda name: min(sizes[name]))
    outputs, inputs = sizes[smallest]
    limit = min(outputs, inputs)
    if 0 < limit < config.lora.rank:  # check_starter_shape reports heads without a size
        yield ConfigError(
            "lora.rank",
            config.lora.rank,
            f"must be at most {limit}: {smallest} has {inputs} inputs and {outputs} outputs",
            remedies=[(f"lora.rank={limit}",)],
        )


def check_lora_dropout(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The trained policy is the one that sampled."""
    if config.lora.enabled and config.lora.dropout > 0:
        yield ConfigError(
            "lora.dropout",
            config.lora.dropout,
            "only 0 is supported: with dropout the policy that is trained is not the one that "
            "sampled, and its probability ratios are noise",
            remedies=[("lora.dropout=0.0",)],
        )


def check_lora_base(config: ExperimentConfig) -> Iterator[ConfigError]:
    """``lora.base`` matters only if frozen weights are separate and engines sleep."""
    lora = config.lora
    if not lora.enabled or lora.base in ("auto", "resident"):
        return
    ignored = [
        (is_ignored, why, remedy)
        for is_ignored, why, remedy in (
            (lora.sync == "merged", "lora.sync=merged", "lora.sync=adapter"),
            (not config.rollout.sleep, "rollout.sleep=false", "rollout.sleep=true"),
        )
        if is_ignored
    ]
    if ignored:
        yield ConfigError(
            "lora.base",
            lora.base,
            "would be ignored, because of " + " and ".join(why for _, why, _ in ignored),
            remedies=[("lora.base=resident",), tuple(remedy for _, _, remedy in ignored)],
        )


def check_adapted_layers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Adapters need full heads and full experts of megatron-core's linear layers on a rank."""
    megatron, lora = config.megatron, config.lora
    model = find_architecture(config.model)
    if config.actor.engine != "megatron" or not lora.enabled or model is None:
        return
    num_kv_heads = model.num_key_value_heads
    tensor, adapted = megatron.tensor_parallel_size, set(lora.modules)
    if tensor > num_kv_heads and adapted & {*_OF_HEADS}:
        others = [name for name in LINEAR_MODULES if name not in _OF_HEADS and name in adapted]
        yield ConfigError(
            "megatron.tensor_parallel_size",
            tensor,
            f"each rank must have a full one of the model's {num_kv_heads} key-value heads: "
            f"{', '.join(_OF_HEADS)} have adapters",
            remedies=[(f"lora.target_modules=[{','.join(others or ['o_proj'])}]",)],
        )
    adapts_experts = model.experts is not None and not adapted.isdisjoint(MLP_MODULES)
    if adapts_experts and megatron.expert_tensor_parallel_size > 1:
        yield ConfigError(
            "megatron.expert_tensor_parallel_size",
            megatron.expert_tensor_parallel_size,
            "an expert with an adapter must be on one rank",
            remedies=[
                ("megatron.expert_tensor_parallel_size=1",),
                (f"lora.target_modules=[{','.join(ATTENTION_LINEAR)}]",),
            ],
        )


def check_experts_are_not_adapted(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Transformers computes all experts of a layer by one product, which peft cannot adapt."""
    lora, model = config.lora, find_architecture(config.model)
    if not lora.enabled or model is None or model.experts is None:
        return
    samples = config.offline is None and config.rollout.engine == "hf" and lora.sends_adapters
    engines = ["actor.engine=fsdp2"] * (config.actor.engine == "fsdp2")
    engines += ["rollout.engine=hf"] * samples
    if engines and not set(lora.modules).isdisjoint(MLP_MODULES):
        yield ConfigError(
            "lora.target_modules",
            list(lora.target_modules),
            f"{' and '.join(engines)} cannot adapt experts, but attention alone: one product "
            "computes all experts of a layer",
            remedies=[(f"lora.target_modules=[{','.join(ATTENTION_LINEAR)}]",)],
        )


def linear_sizes(model: Architecture) -> Mapping[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of a block, or of one of its experts."""
    if model.experts is not None:
        model = replace(model, intermediate_size=model.experts.intermediate_size)
    return model.linear_sizes


RULES = (
    check_lora_targets,
    check_lora_rank,
    check_lora_dropout,
    check_adapted_layers,
    check_experts_are_not_adapted,
)
