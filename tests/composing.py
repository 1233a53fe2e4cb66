"""Configurations as the command composes them, without reading all files for each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from hybridrl.env import ROOT
from hybridrl.main import compose_unresolved, resolved, with_free_keys_added

_GROUPS = {folder.name for folder in (ROOT / "hydra_configs").iterdir() if folder.is_dir()}


def composed(*overrides: str, base: tuple[str, ...] = ()) -> Mapping[str, object]:
    """What `hybridrl.main.compose` returns for ``base``, which many calls have, and overrides."""
    chosen = tuple(override for override in overrides if _chooses_file(override))
    config = copy.deepcopy(_unresolved((*base, *chosen)))
    apply([override for override in overrides if override not in chosen], config)
    return resolved(config)


def apply(overrides: list[str], config: DictConfig) -> None:
    """Apply overrides that choose no file to a configuration in place, as Hydra does it."""
    parsed = OverridesParser.create().parse_overrides(with_free_keys_added(overrides))
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)


def _chooses_file(override: str) -> bool:
    key = override.partition("=")[0]
    return key == "recipes" or key in _GROUPS


@cache
def _unresolved(overrides: tuple[str, ...]) -> DictConfig:
    return compose_unresolved(overrides)
