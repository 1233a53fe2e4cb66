"""Rules about models besides the policy: served frozen ones, judges, reward models, a teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.algorithm import INITIAL, POLICY, SERVED
from hybridrl.config.checks.messages import error, value_at
from hybridrl.config.checks.model import MODEL_TYPES
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import flaw_of_file, flaw_of_folder
from hybridrl.config.serving import ServedModelConfig
from hybridrl.errors import ConfigError, ModelError, suggest_name
from hybridrl.models.architecture import Architecture, find_architecture, read_architecture
from hybridrl.models.model_folder import (
    CONFIG,
    flaw_of_files,
    missing_tokenizer_of,
    num_labels_of,
    problem_of,
    read_settings,
)


def check_frozen_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The folder of a frozen model has weights and a tokenizer that its engines can load."""
    for name, model in config.serving.frozen.items():
        key, size = f"serving.models.{name}", model.max_context_tokens
        if config.serving.policy and (flaw := _flaw_of_served(config, model)):
            fix = f"set {key}.path to the folder of a language model"
            yield error(config, f"{key}.path", flaw, fix=fix)
        longest = _longest_context(Path(str(model.path)))
        if size is not None and longest is not None and size > longest:
            rule = f"the context of the model is {longest} tokens"
            key = f"{key}.max_context_tokens"
            yield error(config, key, rule, f"{key}={longest}")


def _flaw_of_served(config: ExperimentConfig, served: ServedModelConfig) -> str:
    folder = Path(str(served.path))
    if flaw := flaw_of_folder(folder) or flaw_of_file(folder / CONFIG) or problem_of(folder):
        return flaw
    if served.urls:  # it has the weights: here are the tokenizer and the facts to compare
        has_size = "vocab_size" in read_settings(folder)
        return missing_tokenizer_of(folder) if has_size else f"its {CONFIG} has no vocab_size"
    try:
        model = read_architecture(folder)
    except ModelError as err:
        return str(err)
    if model.classifier is not None:
        return "its config.json names a classifier: such a model scores text and cannot write any"
    return _flaw_of_files(config, folder, model, "rollout.engine")


def _flaw_of_files(config: ExperimentConfig, folder: Path, model: Architecture, key: str) -> str:
    engine = str(value_at(config, key))
    known = MODEL_TYPES[engine]
    if model.model_type not in known:
        return f"{key}={engine} supports {', '.join(known)}, and it is {model.model_type}"
    # mode=plan reads config.json alone.
    return flaw_of_files(folder) if config.mode != "plan" else ""


def _longest_context(folder: Path) -> int | None:
    """Return the tokens of the model's context; None if its folder cannot be read."""
    try:
        return read_architecture(folder).max_positions
    except ModelError:
        return None


def check_judges(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A judge is one of the served frozen models, and sees the response; its score can be read."""
    frozen, judges = config.serving.frozen, config.reward.judges
    asked = {judge.args.get("model") for judge in judges.values()}
    asked.update(config.algorithm.served_teachers)
    for name in frozen if config.serving.policy else ():
        if name not in asked:
            key = f"serving.models.{name}"
            rule = "no reward asks this model (reward.functions.NAME.function=judge)"
            fix = f"add ~{key}, a judge with args.model={name}, or algorithm.teacher_path={key}"
            yield error(config, key, rule, fix=fix, got="{...}")
    for name, judge in judges.items():
        root = "reward.args" if config.reward.function else f"reward.functions.{name}.args"
        model, template, pattern = map(judge.args.get, ("model", "template", "pattern"))
        if model is not None and not frozen:
            fix = f"add serving.models.{model}.path=FOLDER, with groups"
            yield error(config, f"{root}.model", "no frozen model is served", fix=fix)
        elif model is not None and model not in frozen:
            rule = f"serving.models has no frozen model of this name: {', '.join(frozen)}"
            yield error(config, f"{root}.model", rule, fix=suggest_name(str(model), list(frozen)))
        if isinstance(template, str) and "{response}" not in template:
            rule = "the judge would not see the response: it must contain {response}"
            fix = "put {response} into the question"
            yield error(config, f"{root}.template", rule, fix=fix)
        if isinstance(pattern, str) and (flaw := _flaw_of_pattern(pattern)):
            fix = "correct it; its first group is the score"
            yield error(config, f"{root}.pattern", flaw, fix=fix)


def _flaw_of_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as err:
        return f"not a regular expression: {err}"
    return ""


def check_reward_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A reward model can be loaded by the engine that trains the policy, and has one score."""
    reward = config.reward
    for name, path in reward.model_paths.items():
        key = "reward.args.path" if reward.function else f"reward.functions.{name}.args.path"
        if flaw := _flaw_of_scorer(Path(path), config):
            fix = f"set {key} to the folder of a classifier with one label"
            yield error(config, key, flaw, fix=fix, got=path)


def _flaw_of_scorer(folder: Path, config: ExperimentConfig) -> str:
    if flaw := flaw_of_folder(folder) or flaw_of_file(folder / CONFIG) or problem_of(folder):
        return flaw
    try:
        model = read_architecture(folder)
    except ModelError as err:
        return str(err)
    if model.classifier is None:
        return (
            f"{folder / CONFIG} names no ...ForSequenceClassification or "
            "...ForTokenClassification: the model has no scalar head"
        )
    if (num_labels := num_labels_of(folder)) != 1:
        return f"the model gives {num_labels} numbers (id2label), and a reward is one"
    return _flaw_of_files(config, folder, model, "actor.engine")


def check_teacher(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A teacher is read, can be loaded, and has the policy's vocabulary."""
    algorithm, key = config.algorithm, "algorithm.teacher_path"
    if not algorithm.has_teacher:  # then the keys of teachers are unread
        return
    if not algorithm.teachers:
        rule = "the advantage, or that of a source, reads the log-probs of a teacher"
        if algorithm.divergence_coefficient:
            rule = "algorithm.divergence_coefficient is above 0, and there is no teacher"
        yield error(config, key, rule, fix=f"set {key} to a Hugging Face folder")
    for source, path in algorithm.teachers.items():
        is_folder = path in algorithm.teacher_folders
        if is_folder and (flaw := _flaw_of_teacher(Path(path), config)):
            of_source = f"{key}s.{source}" if source else key
            fix = "set it to a folder of the policy's family"
            yield error(config, of_source, flaw, fix=fix, got=path)
    if POLICY in algorithm.teacher_names and algorithm.teacher_prompt is None:
        rule = "the policy is its own teacher, and both read the same: there is nothing to learn"
        fix = "set algorithm.teacher_prompt"
        yield error(config, key, rule, f"{key}=initial", fix=fix)
    yield from _check_teacher_prompt(config)


def check_served_teachers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """All teachers are served or none, and say what their engines can."""
    algorithm, rollout = config.algorithm, config.rollout
    if not algorithm.served_teachers:
        return
    for source, path in algorithm.teachers.items():
        if flaw := _flaw_of_served_teacher(path.removeprefix(SERVED), config):
            key = f"algorithm.teacher_paths.{source}" if source else "algorithm.teacher_path"
            fix = f"set it to {SERVED}NAME of a frozen model with the policy's vocabulary"
            yield error(config, key, flaw, fix=fix)
    if rollout.temperature != 1 and (rollout.engine == "sglang" or config.serving.external):
        key, rule = "rollout.temperature", "SGLang scores for a served teacher at 1 alone"
        yield error(config, key, rule, f"{key}=1.0")
    if rollout.sampling_masks and not algorithm.divergence_coefficient:
        key, rule = "rollout.sampling_masks", "a served teacher scores among all tokens"
        yield error(config, key, rule, f"{key}=false")


def _flaw_of_served_teacher(name: str, config: ExperimentConfig) -> str:
    frozen, policy = config.serving.frozen, find_architecture(config.model)
    if f"{SERVED}{name}" not in config.algorithm.teacher_names:
        return f"{config.algorithm.served_teachers[0]} is served, and with it all teachers are"
    if name not in frozen:
        return f"serving.models has no frozen model of this name: {', '.join(frozen) or 'none'}"
    if name in (judge.args.get("model") for judge in config.reward.judges.values()):
        return "a judge of this name is asked after sampling, and a teacher in it: serve it twice"
    if policy is not None and policy.tower is not None:
        return "a served teacher reads no images"
    if any(group.worker_type != "regular" for group in frozen[name].groups.values()):
        return "a decode engine knows no log-probs of a context: set worker_type=regular"
    folder = Path(str(frozen[name].path))
    longest, num_tokens = frozen[name].max_context_tokens, config.max_row_tokens
    if flaw := _flaw_of_teacher(folder, config):
        return flaw
    if (longest or read_architecture(folder).max_positions) <= num_tokens:
        key = f"serving.models.{name}.max_context_tokens"
        return f"its context ({key}) must have room for a row of {num_tokens} tokens and one more"
    return ""


def check_divergence(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Distributions are compared where all of their logits are, and all count."""
    if not config.algorithm.divergence_coefficient:
        return
    policy, top_k = find_architecture(config.model), config.algorithm.divergence_top_k
    is_full = top_k is None or (policy is not None and top_k >= policy.vocab_size)
    is_shared = config.actor.engine == "megatron" and config.megatron.tensor_parallel_size > 1
    if is_full and (is_shared or config.algorithm.served_teachers):
        key, rule = "algorithm.divergence_top_k", "a served teacher names its likeliest tokens"
        if is_shared:
            rule = (
                "megatron.tensor_parallel_size ranks share the vocabulary: none compares all of it"
            )
        yield error(config, key, rule, f"{key}=8")
    if config.rollout.sampling_masks:
        rule = "a teacher says tokens that sampling left out: their divergence is not finite"
        yield error(config, "rollout.sampling_masks", rule, "rollout.sampling_masks=false")


def _check_teacher_prompt(config: ExperimentConfig) -> Iterator[ConfigError]:
    algorithm, key = config.algorithm, "algorithm.teacher_prompt"
    if algorithm.teacher_prompt is None:
        return
    try:
        names = algorithm.teacher_columns
        algorithm.teacher_prompt.format_map(dict.fromkeys((*names, "prompt", "answer"), ""))
        flaw = next((f"{name!r} is none" for name in names if {*name} & {*".["}), "")
    except (ValueError, KeyError) as err:
        names, flaw = (), str(err)
    if flaw:
        rule = f"plain names stand in its braces: {flaw}; a brace itself is written twice"
        yield error(config, key, rule, f"{key}=null")
        return
    if config.data.task is not None and names:
        rule = f"it names {names[0]}, and rows of data.task={config.data.task} have no such column"
        yield error(config, key, rule, f"{key}=null")
    policy = find_architecture(config.model)
    if policy is not None and policy.tower is not None:
        yield error(config, key, "a model that sees is taught by its own prompts", f"{key}=null")
    replayed = {POLICY, INITIAL} if config.lora.enabled else {POLICY}
    if config.actor.replay_routing and replayed.intersection(algorithm.teacher_names):
        rule = "the policy goes through the experts of its own prompt (actor.replay_routing=true)"
        yield error(config, key, rule, "actor.replay_routing=false")
    if not config.agent.is_single_turn and config.agent.history == "branch":
        rule = "agent.history=branch gives a row several prompts"
        yield error(config, key, rule, f"{key}=null", "agent.history=keep")


def _flaw_of_teacher(folder: Path, config: ExperimentConfig) -> str:
    policy = find_architecture(config.model)
    if flaw := flaw_of_folder(folder):
        return flaw
    try:
        teacher = read_architecture(folder)
    except ModelError as err:
        return str(err)
    if teacher.classifier is not None:
        return "its config.json names a classifier, which has no log-probs"
    if policy is not None and policy.vocab_size != teacher.vocab_size:
        return (
            f"the teacher has {teacher.vocab_size} tokens and the policy {policy.vocab_size}, so "
            "their log-probs cannot be compared"
        )
    return ""
