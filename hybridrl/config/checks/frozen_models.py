"""Rules about served models that keep their weights, and about the rewards that ask them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.architecture import read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.families import FAMILIES, unsupported_settings
from hybridrl.config.model import SGLANG_MODEL_TYPES, TRANSFORMERS_MODEL_TYPES
from hybridrl.config.model_folder import (
    CONFIG,
    flaw_of_files,
    missing_tokenizer_of,
    problem_of,
    read_settings,
)
from hybridrl.config.paths import flaw_of_file, flaw_of_folder
from hybridrl.config.serving import ServedModelConfig
from hybridrl.errors import ConfigError, ModelError, suggest_name


def check_frozen_folders(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The folder of a frozen model has weights and a tokenizer that its engines can load."""
    if len(config.serving.models) == len(config.serving.frozen):
        return  # one of them should have been the policy
    for name, model in config.serving.frozen.items():
        if flaw := _flaw_of(model, config):
            key = f"serving.models.{name}.path"
            fix = f"set {key} to the folder of a language model"
            yield ConfigError(key, model.path, flaw, fix=fix)


def _flaw_of(served: ServedModelConfig, config: ExperimentConfig) -> str:
    folder = Path(str(served.path))
    if flaw := flaw_of_folder(str(folder)) or flaw_of_file(folder / CONFIG):
        return flaw
    if served.urls:  # it has the weights: here are the tokenizer and the facts to compare
        return problem_of(folder) or _flaw_of_facts(folder) or missing_tokenizer_of(folder)
    try:
        flaw = problem_of(folder) or _flaw_of_model(folder, engine=config.rollout.engine)
        return flaw or (flaw_of_files(folder) if config.mode != "plan" else "")
    except ModelError as error:
        return str(error)


def _flaw_of_facts(folder: Path) -> str:
    return "" if "vocab_size" in read_settings(folder) else f"its {CONFIG} has no vocab_size"


def _flaw_of_model(folder: Path, *, engine: str) -> str:
    model = read_architecture(folder)
    known = SGLANG_MODEL_TYPES if engine == "sglang" else TRANSFORMERS_MODEL_TYPES
    if model.model_type not in known:
        return f"rollout.engine={engine} supports {', '.join(known)}, and it is {model.model_type}"
    if model.classifier is not None:
        return "its config.json names a classifier: such a model scores text and cannot write any"
    return next(iter(unsupported_settings(read_settings(folder), FAMILIES[model.model_type])), "")


def check_context_of_served_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A frozen model has a context of its own, as long as it can; the policy's is its rows'."""
    for name, model in config.serving.models.items():
        key, size = f"serving.models.{name}.max_context_tokens", model.max_context_tokens
        if model.path is None and size is not None:
            rule = "would be ignored: data.max_prompt_tokens and rollout.max_response_tokens limit "
            yield ConfigError(key, size, f"{rule}the policy", remedies=[(f"{key}=null",)])
            continue
        longest = _longest_context(model.path) if model.path is not None else None
        if size is not None and longest is not None and size > longest:
            rule = f"the context of the model is {longest} tokens"
            yield ConfigError(key, size, rule, remedies=[(f"{key}={longest}",)])


def _longest_context(path: str) -> int | None:
    """Return the tokens of the model's context; None if its folder cannot be read."""
    try:
        return read_architecture(Path(path)).max_positions
    except ModelError:
        return None


def check_judges_are_served(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A judge is one of the served frozen models, and each of these has a reward that asks it."""
    frozen = config.serving.frozen
    judges = config.reward.judges
    for name, judge in judges.items():
        root = "reward" if config.reward.function else f"reward.functions.{name}"
        key, model = f"{root}.args.model", judge.args.get("model")
        if model is None or model in frozen:
            continue
        if not frozen:
            rule = "no frozen model is served"
            fix = f"add serving.models.{model}.path=FOLDER, with groups"
            yield ConfigError(key, model, rule, fix=fix)
            continue
        rule = f"serving.models has no frozen model of this name: {', '.join(frozen)}"
        yield ConfigError(key, model, rule, suggest_name(str(model), list(frozen)))
    asked = {judge.args.get("model") for judge in judges.values()}
    has_policy = len(config.serving.models) > len(frozen)
    for name in frozen if has_policy else ():
        if name not in asked:
            yield ConfigError(
                f"serving.models.{name}",
                "{...}",
                "no reward asks this model (reward.functions.NAME.function=judge)",
                fix=f"add ~serving.models.{name}, or a judge with args.model={name}",
            )


def check_questions_of_judges(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A judge sees the response, and its score can be read."""
    for name, judge in config.reward.judges.items():
        root = "reward" if config.reward.function else f"reward.functions.{name}"
        template, pattern = judge.args.get("template"), judge.args.get("pattern")
        if isinstance(template, str) and "{response}" not in template:
            rule = "the judge would not see the response: it must contain {response}"
            fix = "put {response} into the question"
            yield ConfigError(f"{root}.args.template", template, rule, fix=fix)
        if isinstance(pattern, str) and (flaw := _flaw_of_pattern(pattern)):
            fix = "correct it; its first group is the score"
            yield ConfigError(f"{root}.args.pattern", pattern, flaw, fix=fix)


def _flaw_of_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"not a regular expression: {error}"
    return ""


RULES = (
    check_frozen_folders,
    check_context_of_served_models,
    check_judges_are_served,
    check_questions_of_judges,
)
