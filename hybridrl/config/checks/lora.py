"""Rules about adapters, held against the model's config.json before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import ALL_LINEAR, LINEAR_MODULES
from hybridrl.config.model_folder import read_settings
from hybridrl.errors import ConfigError, ModelError, suggest_name

Sizes = Mapping[str, tuple[int, int]]
"""(outputs, inputs) of each linear layer of a block."""

_OF_HEADS = ("q_proj", "k_proj", "v_proj")
"""Linear layers whose outputs are heads."""

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of an expert."""


def check_lora_targets(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Every name adapts something: a name that matches no layer would silently teach nothing."""
    lora = config.lora
    if not lora.enabled:
        return
    key, everything = "lora.target_modules", ("lora.target_modules=[all-linear]",)
    if not lora.target_modules:
        yield ConfigError(key, [], "there must be a layer to adapt", remedies=[everything])
    for name in dict.fromkeys(lora.target_modules):
        if name not in (*LINEAR_MODULES, ALL_LINEAR):
            yield ConfigError(
                key,
                name,
                f"matches no linear layer of a block ({suggest_name(name, LINEAR_MODULES)})",
                remedies=[everything],
            )


def check_lora_rank(config: ExperimentConfig) -> Iterator[ConfigError]:
    """B A has the rank of its smallest side, so a higher rank is memory for nothing."""
    sizes = linear_sizes(config)
    if not config.lora.enabled or sizes is None:
        return
    targets = [name for name in config.lora.modules if name in sizes]
    if not targets:
        return  # check_lora_targets says so
    smallest = min(targets, key=lambda name: min(sizes[name]))
    outputs, inputs = sizes[smallest]
    limit = min(outputs, inputs)
    if 0 < limit < config.lora.rank:  # of heads without a size check_starter_shape speaks
        yield ConfigError(
            "lora.rank",
            config.lora.rank,
            f"must be at most {limit}: {smallest} has {inputs} inputs and {outputs} outputs",
            remedies=[(f"lora.rank={limit}",)],
        )


def check_lora_dropout(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The policy that is trained is the one that sampled."""
    if config.lora.enabled and config.lora.dropout > 0:
        yield ConfigError(
            "lora.dropout",
            config.lora.dropout,
            "only 0 is supported: with dropout the policy that is trained is not the one that "
            "sampled, and its probability ratios are noise",
            remedies=[("lora.dropout=0.0",)],
        )


def check_lora_base(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Where frozen weights sleep matters only if they are kept apart and engines sleep."""
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
    """Adapters stand beside whole heads and whole experts of megatron-core's linear layers."""
    megatron, lora = config.megatron, config.lora
    if config.actor.engine != "megatron" or not lora.enabled:
        return
    num_kv_heads = model_values(config).get("num_key_value_heads")
    tensor, adapted = megatron.tensor_parallel_size, set(lora.modules)
    if isinstance(num_kv_heads, int) and tensor > num_kv_heads and adapted & {*_OF_HEADS}:
        others = [name for name in LINEAR_MODULES if name not in _OF_HEADS and name in adapted]
        yield ConfigError(
            "megatron.tensor_parallel_size",
            tensor,
            f"a rank must have a whole one of the model's {num_kv_heads} key-value heads where "
            f"{', '.join(_OF_HEADS)} have adapters",
            remedies=[(f"lora.target_modules=[{','.join(others or ['o_proj'])}]",)],
        )
    adapts_experts = model_values(config).get("num_experts") and set(lora.modules) & {*OF_EXPERTS}
    if adapts_experts and megatron.expert_tensor_parallel_size > 1:
        yield ConfigError(
            "megatron.expert_tensor_parallel_size",
            megatron.expert_tensor_parallel_size,
            "an expert with an adapter is whole on its rank",
            remedies=[
                ("megatron.expert_tensor_parallel_size=1",),
                ("lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",),
            ],
        )


def linear_sizes(config: ExperimentConfig) -> Sizes | None:
    """Return the sizes of the linear layers of a block; None where the model does not say them."""
    values = model_values(config)
    needed = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    hidden, num_heads, num_kv_heads, inner = (_size(values, name) for name in needed)
    if not (hidden and num_heads and num_kv_heads and inner):
        return None
    head = _size(values, "head_dim") or hidden // num_heads
    if values.get("num_experts"):
        inner = _size(values, "moe_intermediate_size") or inner
    return {
        "q_proj": (num_heads * head, hidden),
        "k_proj": (num_kv_heads * head, hidden),
        "v_proj": (num_kv_heads * head, hidden),
        "o_proj": (hidden, num_heads * head),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _size(values: Mapping[str, object], name: str) -> int:
    """Return a size of config.json; 0 where it says none, or none that could be one."""
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def model_values(config: ExperimentConfig) -> Mapping[str, object]:
    """Return the model's shape in the terms of config.json; empty where it cannot be read."""
    if config.model.path is None:
        starter = config.model.starter
        if starter is None:
            return {}
        return {
            "model_type": "qwen3",
            "hidden_size": starter.hidden_size,
            "num_attention_heads": starter.num_attention_heads,
            "num_key_value_heads": starter.num_key_value_heads,
            "intermediate_size": starter.intermediate_size,
            "num_hidden_layers": starter.num_layers,
        }
    try:
        values = read_settings(Path(config.model.path))
    except ModelError:
        return {}  # check_model_folder names what is wrong with the file
    # As transformers 5 spells it when it writes the file.
    return {"num_experts": values.get("num_local_experts"), **values}
