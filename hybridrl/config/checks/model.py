"""Rules about the model: its source, its shape, its context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.architecture import Architecture, find_architecture
from hybridrl.config.checks.divisors import divisors_of, multiples_near
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.families import FAMILIES, unsupported_settings
from hybridrl.config.foreign_names import answer_model
from hybridrl.config.model import (
    CRITIC_MODEL_TYPES,
    MEGATRON_MODEL_TYPES,
    SGLANG_MODEL_TYPES,
    TRANSFORMERS_MODEL_TYPES,
)
from hybridrl.config.model_folder import (
    flaw_of_files,
    num_labels_of,
    problem_of,
    read_settings,
)
from hybridrl.config.paths import flaw_of_file, flaw_of_folder
from hybridrl.config.spelling import to_override
from hybridrl.errors import ConfigError, ModelError

_MODEL_TYPES = {
    "fsdp2": TRANSFORMERS_MODEL_TYPES,
    "megatron": MEGATRON_MODEL_TYPES,
    "hf": TRANSFORMERS_MODEL_TYPES,
    "sglang": SGLANG_MODEL_TYPES,
}


def check_model_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Weights come from a folder or are made: exactly one of them."""
    model = config.model
    if model.path is None and model.starter is None:
        yield ConfigError(
            "model.path",
            None,
            "a run needs a model folder, or the shape of a model to make",
            remedies=[("model=starter",)],
            fix="set model=starter, or model=hf_folder model.path=FOLDER",
        )
    has_folder = model.path is not None and not flaw_of_folder(model.path)
    if has_folder and model.starter is not None:  # check_model_folder has the other case
        yield ConfigError(
            "model.starter",
            "{...}",
            f"would be ignored, because model.path={model.path} gives the weights",
            remedies=[
                ("model=hf_folder", f"model.path={to_override(model.path)}"),
                ("model.path=null",),
            ],
        )


def check_starter_shape(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Heads of the starter model divide its width, and their size is even for rotary embedding."""
    starter = config.model.starter
    if starter is None:
        return
    num_heads, num_kv_heads = starter.num_attention_heads, starter.num_key_value_heads
    if starter.hidden_size % (2 * num_heads):
        below, above = multiples_near(starter.hidden_size, 2 * num_heads)
        legal = below or above
        yield ConfigError(
            "model.starter.hidden_size",
            starter.hidden_size,
            f"must be a multiple of {2 * num_heads}: num_attention_heads={num_heads} heads of an "
            "even size",
            remedies=[(f"model.starter.hidden_size={legal}",)],
        )
    if num_heads % num_kv_heads:
        legal = min(divisors_of(num_heads), key=lambda n: abs(n - num_kv_heads))
        yield ConfigError(
            "model.starter.num_key_value_heads",
            num_kv_heads,
            f"must divide num_attention_heads={num_heads}",
            remedies=[(f"model.starter.num_key_value_heads={legal}",)],
        )


def check_starter_context(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The longest row fits into the context of the starter model."""
    starter = config.model.starter
    if starter is None or config.max_row_tokens <= starter.max_position_embeddings:
        return
    yield ConfigError(
        "model.starter.max_position_embeddings",
        starter.max_position_embeddings,
        f"the longest row has {config.max_row_tokens} tokens: data.max_prompt_tokens="
        f"{config.data.max_prompt_tokens} + rollout.max_response_tokens="
        f"{config.rollout.max_response_tokens}",
        remedies=[(f"model.starter.max_position_embeddings={config.max_row_tokens}",)],
    )


def check_starter_reads_plain_text(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The starter model learns to chat for the task calculator alone."""
    is_chat = config.data.use_chat_template and config.data.task != "calculator"
    if config.model.path is None and is_chat:
        yield ConfigError(
            "data.use_chat_template",
            got=True,
            rule="the made model (model.path=null) learned plain text, no chat template",
            remedies=[("data.use_chat_template=false",)],
        )


def check_chat_template(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A model folder has the chat template that ``data.apply_chat_template`` needs."""
    path = config.model.path
    if path is None or not config.data.use_chat_template or flaw_of_folder(path):
        return
    file = Path(path, "tokenizer_config.json")
    if flaw_of_file(file) or any(Path(path).glob("chat_template*")):
        return
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # the tokenizer reports its own errors
    if isinstance(settings, dict) and not settings.get("chat_template"):
        yield ConfigError(
            "data.use_chat_template",
            got=True,
            rule=f"the tokenizer in model.path={path} has no chat template",
            fix="set data.use_chat_template=false, or add chat_template.jinja to the folder",
            remedies=[("data.use_chat_template=false",)],
        )


def check_attention_runs_on_device(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Variable-length attention is a CUDA kernel for bfloat16."""
    device, dtype = config.cluster.device, config.actor.compute_dtype
    if config.model.attention == "varlen" and (device, dtype) != ("cuda", "bfloat16"):
        yield ConfigError(
            "model.attention",
            "varlen",
            f"runs on CUDA in bfloat16, not with cluster.device={device} and "
            f"actor.compute_dtype={dtype}",
            remedies=[("model.attention=auto",), ("model.attention=padded",)],
        )


def check_model_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A model folder exists, is readable, and its context holds the longest row."""
    path = config.model.path
    if path is None:
        return
    file = Path(path) / "config.json"
    flaw = flaw_of_folder(path) or (flaw_of_file(file) and f"it has no config.json: {file}")
    if flaw:
        yield ConfigError(
            "model.path",
            path,
            rule=f"must be a Hugging Face model folder; {flaw}",
            fix=f"{answer_model(path)}, or set model=starter model.path=null",
        )
        return
    if problem := problem_of(Path(path)):
        yield ConfigError("model.path", path, problem, fix="download the folder again")
        return
    # mode=plan reads config.json alone; a run refuses the folder where it loads it.
    if config.mode == "check" and (flaw := flaw_of_files(Path(path))):
        yield ConfigError("model.path", path, flaw, fix="download the folder again")
    model = find_architecture(config.model)
    if flaw := _flaw_of_classifier(model, Path(path), learns=config.mode == "reward_model"):
        fix = "set model.path to a ...ForCausalLM; a reward model is reward.function=model"
        yield ConfigError("model.path", path, flaw, fix=fix)
    if model is not None and config.max_row_tokens > (context := model.max_positions):
        yield ConfigError(
            "model.path",
            path,
            rule=f"its context is {context} tokens, fewer than data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}",
            remedies=_shorter_rows(config, context),
        )


def _flaw_of_classifier(model: Architecture | None, folder: Path, *, learns: bool) -> str:
    if model is None or model.classifier is None:
        return ""
    if not learns:
        return "its config.json names a classifier: such a model scores text and cannot write any"
    num_labels = num_labels_of(folder)
    return "" if num_labels == 1 else f"the model gives {num_labels} numbers, and a reward is one"


def check_engines_know_the_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each engine that is chosen supports the architecture, with all its settings."""
    model_type, path = _model_type_of(config), config.model.path
    if model_type is None or path is None:
        return
    if model_type not in FAMILIES:
        yield ConfigError(
            "model.path",
            path,
            f"its model_type={model_type!r} is not supported yet: supported "
            f"are {', '.join(FAMILIES)}",
            fix="set model.path to such a model",
        )
        return
    for problem in unsupported_settings(read_settings(Path(path)), FAMILIES[model_type]):
        yield ConfigError("model.path", path, problem, fix="set model.path to another model")
    samples = config.offline is None
    for key, engine, is_asked in (
        ("actor.engine", config.actor.engine, True),
        ("critic.engine", config.critic.engine, config.has_critic),
        ("rollout.engine", config.rollout.engine, samples),
    ):
        if is_asked and model_type not in _MODEL_TYPES[engine]:
            yield _engine_lacks_model(key, engine, model_type=model_type, path=path)
    is_critic_of_transformers = config.has_critic and config.critic.engine == "fsdp2"
    has_no_critic = model_type in TRANSFORMERS_MODEL_TYPES and model_type not in CRITIC_MODEL_TYPES
    if is_critic_of_transformers and has_no_critic:
        yield ConfigError(
            "algorithm.advantage",
            config.algorithm.advantage,
            f"trains a critic, and transformers has no {model_type} with a value head "
            f"(model.path={path})",
            fix=f"set algorithm=grpo, or model.path to one of {', '.join(CRITIC_MODEL_TYPES)}",
        )


def _engine_lacks_model(key: str, engine: str, *, model_type: str, path: str) -> ConfigError:
    section = key.partition(".")[0]
    others = ("hf", "sglang") if section == "rollout" else ("fsdp2", "megatron")
    able = [other for other in others if model_type in _MODEL_TYPES[other]]
    return ConfigError(
        key,
        engine,
        f"supports {', '.join(_MODEL_TYPES[engine])}, and model.path={path} is {model_type}",
        remedies=[(f"{section}={other}",) for other in able],
    )


def _model_type_of(config: ExperimentConfig) -> str | None:
    """Return the architecture that config.json names, supported or not; None without a folder."""
    try:
        path = config.model.path
        return None if path is None else str(read_settings(Path(path))["model_type"])
    except ModelError:
        return None  # check_model_folder reports the error in the file


def _shorter_rows(config: ExperimentConfig, context: int) -> list[tuple[str, ...]]:
    """Return the overrides with which the longest row fits into ``context`` tokens."""
    num_response, num_prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    remedies: list[tuple[str, ...]] = []
    if num_prompt < context:
        remedies.append((f"rollout.max_response_tokens={context - num_prompt}",))
    if num_response < context:
        remedies.append((f"data.max_prompt_tokens={context - num_response}",))
    half = context // 2
    return remedies or [
        (f"data.max_prompt_tokens={half}", f"rollout.max_response_tokens={context - half}")
    ]


RULES = (
    check_model_source,
    check_starter_shape,
    check_starter_context,
    check_starter_reads_plain_text,
    check_chat_template,
    check_attention_runs_on_device,
    check_model_folder,
    check_engines_know_the_model,
)
