"""Rules about adapters, checked against the model's config.json before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import ALL_LINEAR, ATTENTION_LINEAR, LINEAR_MODULES
from hybridrl.config.paths import flaw_of_file, flaw_of_folder
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.json_text import to_json_text
from hybridrl.models.architecture import MLP_MODULES, find_architecture

_OF_HEADS = ("q_proj", "k_proj", "v_proj")
"""Linear layers whose outputs are heads."""

_TARGETS = "lora.target_modules"
_ATTENTION_ALONE = f"{_TARGETS}=[{','.join(ATTENTION_LINEAR)}]"
_INIT, _NO_ADAPTER = "lora.init_from", "lora.init_from=null"
_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DEFAULTS: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of peft that are supported only with these values."""


def check_adapters(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Every name adapts a layer; dropout would train another policy than the one that sampled."""
    lora, model = config.lora, find_architecture(config.model)
    if not lora.enabled:
        return
    names = list(LINEAR_MODULES if model is None else model.linear_sizes)
    everything = f"{_TARGETS}=[{','.join(names)}]"
    if {*LINEAR_MODULES} <= {*names}:
        names, everything = [*names, ALL_LINEAR], f"{_TARGETS}=[{ALL_LINEAR}]"
    if not lora.target_modules:
        yield error(config, _TARGETS, "there must be a layer to adapt", everything)
    for name in dict.fromkeys(lora.target_modules):
        if name not in names:
            rule = f"matches no linear layer of a block ({suggest_name(name, names)})"
            yield error(config, _TARGETS, rule, everything, got=name)
    if lora.dropout > 0:
        rule = (
            "only 0 is supported: with dropout the policy that is trained is not the one that "
            "sampled, and its probability ratios are noise"
        )
        yield error(config, "lora.dropout", rule, "lora.dropout=0.0")


def check_rank(config: ExperimentConfig) -> Iterator[ConfigError]:
    """B A has at most the rank of its smallest side, so loading an adapter refuses more."""
    lora, model = config.lora, find_architecture(config.model)
    if not lora.enabled or model is None:
        return
    if model.experts is not None:  # the layers of one expert
        model = replace(model, intermediate_size=model.experts.intermediate_size)
    sizes = {name: model.linear_sizes[name] for name in lora.modules if name in model.linear_sizes}
    smallest = min(sizes, key=lambda name: min(sizes[name]), default="")
    outputs, inputs = sizes.get(smallest, (0, 0))
    if 0 < min(outputs, inputs) < lora.rank:
        limit = min(outputs, inputs)
        rule = f"must be at most {limit}: {smallest} has {inputs} inputs and {outputs} outputs"
        yield error(config, "lora.rank", rule, f"lora.rank={limit}")


def check_lora_base(config: ExperimentConfig) -> Iterator[ConfigError]:
    """``lora.base`` matters only if frozen weights are separate and engines sleep."""
    lora = config.lora
    causes = {"lora.sync=merged": "lora.sync=adapter"} if lora.sync == "merged" else {}
    if not config.rollout.sleep:
        causes["rollout.sleep=false"] = "rollout.sleep=true"
    if lora.enabled and lora.base not in ("auto", "resident") and causes:
        rule = f"would be ignored, because of {' and '.join(causes)}"
        remedy = " ".join(causes.values())
        yield error(config, "lora.base", rule, "lora.base=resident", remedy)


def check_adapted_layers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Megatron-core adapts full heads and experts; transformers cannot adapt experts at all."""
    lora, model = config.lora, find_architecture(config.model)
    if not lora.enabled or model is None:
        return
    megatron, adapted = config.megatron, {*lora.modules}
    adapts_experts = model.experts is not None and not adapted.isdisjoint(MLP_MODULES)
    num_kv_heads = model.num_key_value_heads
    is_megatron = config.actor.engine == "megatron"
    if is_megatron and megatron.tensor_parallel_size > num_kv_heads and adapted & {*_OF_HEADS}:
        others = [name for name in LINEAR_MODULES if name not in _OF_HEADS and name in adapted]
        rule = (
            f"each rank must have a full one of the model's {num_kv_heads} key-value heads: "
            f"{', '.join(_OF_HEADS)} have adapters"
        )
        remedy = f"{_TARGETS}=[{','.join(others or ['o_proj'])}]"
        yield error(config, "megatron.tensor_parallel_size", rule, remedy)
    if is_megatron and adapts_experts and megatron.expert_tensor_parallel_size > 1:
        key, rule = (
            "megatron.expert_tensor_parallel_size",
            "an expert with an adapter must be on one rank",
        )
        yield error(config, key, rule, f"{key}=1", _ATTENTION_ALONE)
    # Transformers computes all experts of a layer by one product, which peft cannot adapt.
    unable = ["actor.engine=fsdp2"] if config.actor.engine == "fsdp2" else []
    if config.offline is None and config.rollout.engine == "hf" and lora.sends_adapters:
        unable.append("rollout.engine=hf")
    if unable and adapts_experts:
        rule = (
            f"{' and '.join(unable)} cannot adapt experts, but attention alone: one product "
            "computes all experts of a layer"
        )
        yield error(config, _TARGETS, rule, _ATTENTION_ALONE)


def check_adapter_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An adapter to start from is complete, has the settings of ``lora``, and fits the model."""
    if not config.lora.enabled or config.lora.init_from is None:
        return
    folder = Path(config.lora.init_from)
    settings, flaw = _read_settings(folder)
    if flaw:
        fix = f"give a folder with {_SETTINGS} and {_WEIGHTS}, or set {_NO_ADAPTER}"
        yield error(config, _INIT, flaw, _NO_ADAPTER, fix=fix)
        return
    errors = [*_other_settings(config, settings)]
    yield from errors
    model = find_architecture(config.model)
    if errors or model is None or model.experts is not None:
        return
    with safe_open(folder / _WEIGHTS, framework="np") as tensors:  # loading compares shapes
        num_saved, num_wanted = len(tensors.keys()), 2 * model.num_layers * len(config.lora.modules)
    if num_saved != num_wanted:
        rule = f"made for another model: it has {num_saved} tensors, and this one {num_wanted}"
        yield error(config, _INIT, rule, _NO_ADAPTER)


def _read_settings(folder: Path) -> tuple[Mapping[str, object], str]:
    """Return the adapter's settings, or an error text."""
    if flaw := flaw_of_folder(folder):
        return {}, flaw
    try:
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"the folder has no {_SETTINGS}"
    except (OSError, ValueError, RecursionError) as err:
        return {}, f"{_SETTINGS} is incomplete or corrupt: {err}"
    if not isinstance(settings, dict) or not {"r", "lora_alpha", "target_modules"} <= set(settings):
        return {}, f"{_SETTINGS} does not say r, lora_alpha and target_modules, as LoRA's does"
    if flaw_of_file(folder / _WEIGHTS):
        return {}, f"the folder has no {_WEIGHTS}"
    try:
        safe_open(folder / _WEIGHTS, framework="np")
    except (SafetensorError, OSError) as err:
        return {}, f"{_WEIGHTS} is incomplete or corrupt: {err}"
    return settings, ""


def _other_settings(
    config: ExperimentConfig, settings: Mapping[str, object]
) -> Iterator[ConfigError]:
    """Rank, scaling and modules equal those of section ``lora``; others are peft's defaults."""
    for name, usual in _DEFAULTS.items():
        got = settings.get(name, usual)
        if got != usual and (got or usual):  # peft writes null, {} and [] for nothing
            rule = f"its {name}={got!r} is not supported, only {usual!r} is"
            yield error(config, _INIT, rule, _NO_ADAPTER)
    lora, saved = config.lora, settings["target_modules"]
    modules = sorted(map(str, saved)) if isinstance(saved, list) else [str(saved)]
    for key, wanted, got in (
        ("rank", lora.rank, settings["r"]),
        ("alpha", lora.alpha, settings["lora_alpha"]),
        ("use_rslora", lora.use_rslora, bool(settings.get("use_rslora"))),
        ("target_modules", sorted(lora.modules), modules),
    ):
        if got != wanted:
            rule = f"the adapter in lora.init_from={lora.init_from} was made with {got}"
            typed = to_json_text(got, separators=(",", ":")).replace('"', "")
            is_legal = key != "target_modules" or {*modules} <= {*LINEAR_MODULES}
            remedy = f"lora.{key}={typed}" if is_legal else ""
            yield error(config, f"lora.{key}", rule, remedy, _NO_ADAPTER, got=wanted)


RULES = (check_adapters, check_rank, check_adapted_layers, check_adapter_folder)
