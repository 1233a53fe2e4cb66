"""The composition root: from a checked configuration to a run."""

from __future__ import annotations

from pathlib import Path

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError
from hybridrl.run.record import RunFolder
from hybridrl.run.starter import ensure_starter, recipe_of
from hybridrl.run.starter_warmup import warm_up
from hybridrl.run.train_rl import train
from hybridrl.run.train_sft import train_sft


def run(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Find or make the model, then train it as ``mode`` says. Ray is connected."""
    folder = _find_model(config, record)
    if config.mode == "sft":
        train_sft(config, folder, record=record)
    else:
        train(config, folder, record=record)


def _find_model(config: ExperimentConfig, record: RunFolder) -> Path:
    """Return the folder of the model to start from; make the starter if that is asked for."""
    if config.model.path is not None:
        return Path(config.model.path)
    if config.model.starter is None:
        raise ConfigError(
            "model.path",
            None,
            rule="there is neither a folder nor a model to make",
            fix="set model.path=FOLDER, or model=starter",
        )
    recipe = recipe_of(config, config.model.starter)

    def teach(raw: Path, target: Path) -> None:
        warm_up(recipe, raw, cluster=config.cluster, record=record, target=target)

    return ensure_starter(recipe, cache=env.cache_dir(), warm_up=teach)
