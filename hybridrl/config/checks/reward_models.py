"""Rules about rewards that a model gives: its folder is a classifier of one label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.architecture import read_architecture
from hybridrl.config.checks import preferences
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import MEGATRON_MODEL_TYPES, TRANSFORMERS_MODEL_TYPES
from hybridrl.config.model_folder import (
    CONFIG,
    flaw_of_files,
    num_labels_of,
    problem_of,
)
from hybridrl.config.paths import flaw_of_file, flaw_of_folder
from hybridrl.errors import ConfigError, ModelError


def check_reward_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A reward model can be loaded by the engine that trains the policy, and has one score."""
    reward = config.reward
    for name, path in reward.model_paths.items():
        key = "reward.args.path" if reward.function else f"reward.functions.{name}.args.path"
        if flaw := _flaw_of(path, config):
            fix = f"set {key} to the folder of a classifier with one label"
            yield ConfigError(key, path, flaw, fix=fix)


def _flaw_of(path: str, config: ExperimentConfig) -> str:
    folder = Path(path)
    if flaw := flaw_of_folder(path) or flaw_of_file(folder / CONFIG):
        return flaw
    try:
        flaw = problem_of(folder) or _flaw_of_model(folder, engine=config.actor.engine)
        # mode=plan reads config.json alone.
        return flaw or (flaw_of_files(folder) if config.mode != "plan" else "")
    except ModelError as error:
        return str(error)


def _flaw_of_model(folder: Path, *, engine: str) -> str:
    model = read_architecture(folder)
    if model.classifier is None:
        return (
            f"{folder / CONFIG} names no ...ForSequenceClassification or "
            "...ForTokenClassification: the model has no scalar head"
        )
    if (num_labels := num_labels_of(folder)) != 1:
        return f"the model gives {num_labels} numbers (id2label), and a reward is one"
    known = MEGATRON_MODEL_TYPES if engine == "megatron" else TRANSFORMERS_MODEL_TYPES
    if model.model_type not in known:
        return f"actor.engine={engine} supports {', '.join(known)}, and it is {model.model_type}"
    return ""


def check_reward_model_learns_all_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Adapters are for language models: a value head has none."""
    if config.lora.enabled:
        yield ConfigError(
            "lora.enabled",
            got=True,
            rule="mode=reward_model trains all weights, as the critic does",
            remedies=[("lora=none",)],
        )


RULES = (check_reward_models,)
TRAINING_RULES = (preferences.check_pairs_are_read, check_reward_model_learns_all_weights)
"""Of ``mode=reward_model``."""
