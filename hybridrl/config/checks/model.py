"""Rules about the model: its source, its shape, its context; and adapters beside its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hybridrl.config.checks.agent import appends_messages
from hybridrl.config.checks.messages import error
from hybridrl.config.data import CHAT_TASKS
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.names import answer_model
from hybridrl.config.foreign.spelling import to_override
from hybridrl.config.functions.paths import flaw_of_file, flaw_of_folder
from hybridrl.config.model import (
    ALL_LINEAR,
    ATTENTION_LINEAR,
    LINEAR_MODULES,
    MEGATRON_MODEL_TYPES,
    SGLANG_MODEL_TYPES,
    TRANSFORMERS_MODEL_TYPES,
)
from hybridrl.errors import ConfigError, ModelError, suggest_name
from hybridrl.models.architecture import MLP_MODULES, find_architecture
from hybridrl.models.families import FAMILIES, unsupported_settings
from hybridrl.models.model_folder import (
    PROCESSORS,
    TEXT_CLASSES,
    flaw_of_files,
    num_labels_of,
    problem_of,
    read_settings,
)

MODEL_TYPES = {
    "fsdp2": TRANSFORMERS_MODEL_TYPES,
    "megatron": MEGATRON_MODEL_TYPES,
    "hf": TRANSFORMERS_MODEL_TYPES,
    "sglang": SGLANG_MODEL_TYPES,
}

_OF_HEADS = ("q_proj", "k_proj", "v_proj")
"""Linear layers whose outputs are heads."""

_TARGETS = "lora.target_modules"
_ATTENTION_ALONE = f"{_TARGETS}=[{','.join(ATTENTION_LINEAR)}]"
_NO_ADAPTER = "lora.init_from=null"
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


def check_model_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Weights come from a folder or are made: exactly one of them."""
    model = config.model
    if model.path is None and model.starter is None:
        rule = "a run needs a model folder, or the shape of a model to make"
        fix = "set model=starter, or model=hf_folder model.path=FOLDER"
        yield error(config, "model.path", rule, "model=starter", fix=fix)
    has_folder = model.path is not None and not flaw_of_folder(model.path)
    if has_folder and model.starter is not None:  # check_model_folder has the other case
        rule = f"would be ignored, because model.path={model.path} gives the weights"
        folder = f"model=hf_folder model.path={to_override(model.path)}"
        yield error(config, "model.starter", rule, folder, "model.path=null", got="{...}")


def check_made_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Heads of the made model divide its width; it has a chat template for some tasks."""
    is_made, key = config.model.path is None, "data.use_chat_template"
    if is_made and config.data.use_chat_template and config.data.task not in CHAT_TASKS:
        rule = "the made model (model.path=null) learned plain text, no chat template"
        plain = "agent=single_turn " * appends_messages(config.agent) + f"{key}=false"
        fix = f"set {plain}, or model=hf_folder model.path=FOLDER with a model that learned one"
        yield error(config, key, rule, plain, fix=fix)
    starter = config.model.starter
    if starter is None:
        return
    num_heads = starter.num_attention_heads
    # A model that sees has angles of time, rows and columns: a half, a quarter and a quarter.
    multiple = (8 if starter.num_vision_layers else 2) * num_heads
    if starter.hidden_size % multiple:
        key = "model.starter.hidden_size"
        rule = (
            f"must be a multiple of {multiple}: it has {num_heads} heads, each a multiple of "
            f"{multiple // num_heads}"
        )
        below = starter.hidden_size // multiple * multiple
        yield error(config, key, rule, f"{key}={below or multiple}")


def check_vision(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A model that sees has no critic; adapters of its tower are merged."""
    model = find_architecture(config.model)
    if model is None or model.tower is None:
        return
    is_also_alone = model.model_type in TEXT_CLASSES
    alone = f"; without {' and '.join(PROCESSORS)} its folder sees nothing" * is_also_alone
    if config.has_critic:
        key = "algorithm.advantage"
        rule = f"needs a critic, and no critic of a model that sees is supported{alone}"
        yield error(config, key, rule, "algorithm=grpo")
    if config.mode == "reward_model":
        rule = f"no reward model that sees is supported{alone}"
        yield error(config, "mode", rule, "mode=sft")
    if not config.agent.is_single_turn and (config.rollout.dump or config.rollout.replay):
        key = "rollout.dump" if config.rollout.dump else "rollout.replay"
        rule = "images that conversations with a model that sees met are not written to files"
        yield error(config, key, rule, "rollout.dump=false rollout.replay=null")
    is_sent = config.lora.sends_adapters and config.offline is None
    if is_sent and not config.model.freeze_vision:
        rule = "rollout engines apply adapters to the language model alone, not to the tower"
        yield error(config, "lora.sync", rule, "lora.sync=merged", "model.freeze_vision=true")


def check_attention(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Variable-length attention is a CUDA kernel for bfloat16."""
    key, device, dtype = "model.attention", config.cluster.device, config.actor.compute_dtype
    if config.model.attention != "varlen":
        return
    if (device, dtype) != ("cuda", "bfloat16"):
        rule = (
            f"runs on CUDA in bfloat16, not with cluster.device={device} and "
            f"actor.compute_dtype={dtype}"
        )
        yield error(config, key, rule, f"{key}=auto", f"{key}=padded")


def check_model_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A model folder exists and can be read."""
    path, key = config.model.path, "model.path"
    if path is None:
        return
    file = Path(path) / "config.json"
    if flaw := flaw_of_folder(path) or (flaw_of_file(file) and f"it has no config.json: {file}"):
        fix = f"{answer_model(path)}, or set model=starter model.path=null"
        yield error(config, key, f"must be a Hugging Face model folder; {flaw}", fix=fix)
        return
    if problem := problem_of(Path(path)):
        yield error(config, key, problem, fix="download the folder again")
        return
    # mode=plan reads config.json alone; a run refuses the folder where it loads it.
    if config.mode == "check" and (flaw := flaw_of_files(Path(path))):
        yield error(config, key, flaw, fix="download the folder again")


def check_context(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A folder holds a language model, or a reward model to train, and the longest row fits."""
    path, key, model = config.model.path, "model.path", find_architecture(config.model)
    if path is None or model is None or problem_of(Path(path)):
        return  # check_model_folder reports it
    if model.classifier is not None and (flaw := _flaw_of_classifier(config, Path(path))):
        fix = "set model.path to a ...ForCausalLM; a reward model is reward.function=model"
        yield error(config, key, flaw, fix=fix)
    longest, prompt = model.max_positions, f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
    remaining = longest - config.data.max_prompt_tokens
    for limited, limit in config.response_limits.items():
        typed = f"++{limited}" if limited.startswith("eval.sets.") else limited  # a set may lack it
        shorter = f"data.max_prompt_tokens={longest // 2} {typed}={longest // 2}"
        if remaining > 0:
            shorter = f"{typed}={remaining}"
        if limit > remaining and limited.startswith("eval."):
            rule = f"with {prompt} it exceeds the model's context of {longest} tokens"
            yield error(config, limited, rule, shorter, got=limit)
        elif limit > remaining:
            rule = f"its context is {longest} tokens, fewer than {prompt} + {limited}={limit}"
            yield error(config, key, rule, shorter)


def _flaw_of_classifier(config: ExperimentConfig, folder: Path) -> str:
    if config.mode != "reward_model":
        return "its config.json names a classifier: such a model scores text and cannot write any"
    num_labels = num_labels_of(folder)
    return "" if num_labels == 1 else f"the model gives {num_labels} numbers, and a reward is one"


def check_engines_know_the_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each engine that is chosen supports the architecture, with all its settings."""
    path = config.model.path
    try:
        settings = {} if path is None else read_settings(Path(path))
    except ModelError:
        return  # check_model_folder reports the error in the file
    if path is None:
        return
    model_type = str(settings["model_type"])
    if model_type not in FAMILIES:
        rule = (
            f"its model_type={model_type!r} is not supported yet: supported are "
            f"{', '.join(FAMILIES)}"
        )
        yield error(config, "model.path", rule, fix="set model.path to such a model")
        return
    for problem in unsupported_settings(settings, FAMILIES[model_type]):
        yield error(config, "model.path", problem, fix="set model.path to another model")
    for key, engine, is_asked, others in (
        ("actor.engine", config.actor.engine, True, ("fsdp2", "megatron")),
        ("rollout.engine", config.rollout.engine, config.offline is None, ("hf", "sglang")),
    ):
        if is_asked and model_type not in MODEL_TYPES[engine]:
            known, section = ", ".join(MODEL_TYPES[engine]), key.partition(".")[0]
            able = [f"{section}={other}" for other in others if model_type in MODEL_TYPES[other]]
            rule = f"supports {known}, and model.path={path} is {model_type}"
            yield error(config, key, rule, *able)


def check_adapters(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Every name adapts a layer."""
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


def check_lora_rank(config: ExperimentConfig) -> Iterator[ConfigError]:
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
    try:
        settings, saved = _read_adapter(Path(config.lora.init_from))
    except (SafetensorError, OSError, ValueError, RecursionError) as flaw:
        fix = f"give a folder with {_SETTINGS} and {_WEIGHTS}, or set {_NO_ADAPTER}"
        rule = f"its {_SETTINGS} or {_WEIGHTS} is missing, incomplete or corrupt: {flaw}"
        yield error(config, "lora.init_from", rule, _NO_ADAPTER, fix=fix)
        return
    of_tower = {name for name in saved if ".visual." in name}
    errors = [*_other_settings(config, settings, saved - of_tower)]
    yield from errors
    model, num_saved = find_architecture(config.model), len(saved - of_tower)
    if model is not None and model.tower and bool(of_tower) == config.model.freeze_vision:
        rule = f"lora.init_from={config.lora.init_from} has {len(of_tower)} tensors of the tower"
        remedy = f"model.freeze_vision={to_override(not of_tower)}"
        yield error(config, "model.freeze_vision", rule, remedy, _NO_ADAPTER)
    if errors or model is None or model.experts is not None:
        return
    num_mlp = len({*config.lora.modules} & {*MLP_MODULES})
    num_of_heads = (len(config.lora.modules) - num_mlp) * model.num_attention_layers
    num_wanted = 2 * (num_of_heads + num_mlp * model.num_layers)
    if num_saved != num_wanted:  # loading compares shapes
        rule = f"made for another model: it has {num_saved} tensors, and this one {num_wanted}"
        yield error(config, "lora.init_from", rule, _NO_ADAPTER)


def _read_adapter(folder: Path) -> tuple[Mapping[str, object], set[str]]:
    """Return the adapter's settings, and the names of its tensors."""
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not {"r", "lora_alpha", "target_modules"} <= set(settings):
        raise ValueError(f"{_SETTINGS} does not say r, lora_alpha and target_modules, as LoRA's")
    with safe_open(folder / _WEIGHTS, framework="np") as tensors:
        return settings, set(tensors.keys())


def _other_settings(
    config: ExperimentConfig, settings: Mapping[str, object], saved: set[str]
) -> Iterator[ConfigError]:
    """Rank, scaling and modules equal those of section ``lora``; others are peft's defaults."""
    for name, usual in _DEFAULTS.items():
        got = settings.get(name, usual)
        if got != usual and (got or usual):  # peft writes null, {} and [] for nothing
            rule = f"its {name}={got!r} is not supported, only {usual!r} is"
            yield error(config, "lora.init_from", rule, _NO_ADAPTER)
    lora, layers = config.lora, {name.partition(".lora_")[0] for name in saved}
    modules = sorted({layer.rpartition(".")[2] for layer in layers})
    for name, wanted, got in (
        ("rank", lora.rank, settings["r"]),
        ("alpha", lora.alpha, settings["lora_alpha"]),
        ("use_rslora", lora.use_rslora, bool(settings.get("use_rslora"))),
        ("target_modules", sorted(lora.modules), modules),
    ):
        if got != wanted:
            rule = f"the adapter in lora.init_from={lora.init_from} was made with {got}"
            remedy = f"lora.{name}={to_override(got)}"
            is_legal = name != "target_modules" or {*modules} <= {*LINEAR_MODULES}
            yield error(config, f"lora.{name}", rule, remedy * is_legal, _NO_ADAPTER, got=wanted)
