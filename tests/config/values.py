"""Composed values and overrides on them, without composing anew for each test."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.main import compose

Values = dict[str, Any]


@cache
def _composed(*overrides: str) -> Mapping[str, object]:
    return compose(overrides)


def values_of(*overrides: str) -> Values:
    """The default experiment with overrides, in Hydra's spelling: key=value, ~key, group=option."""
    return with_overrides(copy.deepcopy(dict(_composed())), overrides)


def with_overrides(values: Values, overrides: Sequence[str]) -> Values:
    """Apply overrides to values that are composed already."""
    changed = copy.deepcopy(values)
    for override in overrides:
        key, _, value = override.lstrip("~").partition("=")
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        if override.startswith("~"):
            del section[name]
        elif not sections and isinstance(section[name], dict):
            section[name] = copy.deepcopy(_composed(override)[name])
        else:
            section[name] = yaml.safe_load(value)
    return changed


def config_of(*overrides: str) -> ExperimentConfig:
    return load_config(values_of(*overrides))
