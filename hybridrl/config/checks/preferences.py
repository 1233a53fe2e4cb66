"""Rules about modes that learn from preference pairs."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.checks.parts import check_part
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError


def check_pairs_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of files need a column of rejected answers to be preference pairs."""
    data = config.data
    rejected = [source.rejected_key or data.rejected_key for source in data.sources.values()]
    if data.task is not None or all(rejected or [data.rejected_key]):
        return
    yield ConfigError(
        "data.rejected_key",
        data.rejected_key,
        f"mode={config.mode} learns from pairs of a chosen and a rejected answer",
        remedies=[("data.answer_key=chosen", "data.rejected_key=rejected")],
        fix="set data=preferences for columns prompt, chosen and rejected; or "
        "data.rejected_key=COLUMN, beside data.answer_key for the chosen answer",
    )


def check_preference_loss(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The loss is built in, or a function in a file, and has the numbers that are given to it."""
    for kind, spelled, given in config.dpo.parts:
        yield from check_part(kind, spelled, given)


RULES = (check_pairs_are_read, check_preference_loss)
