"""The configuration of a run, and its differences from the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridrl import env
from hybridrl.config.spelling import flatten, read_yaml

_DEFAULTS = env.CONFIG_ROOT / "hydra_configs"


class Settings:
    """Dotted keys and values of ``config.yaml``."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.flat = dict(flatten(values))

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read a file; a file without a YAML mapping gives no keys."""
        return cls(_load(path))

    def number(self, key: str) -> float | None:
        """Return the value of a key if it is a number."""
        value = _comparable(self.flat.get(key))
        return value if isinstance(value, float) and math.isfinite(value) else None

    def text(self, key: str) -> str:
        """Return the value of a key as typed; empty if there is no such key."""
        return to_text(self.flat[key]) if key in self.flat else ""

    def changes(self, defaults: Settings) -> dict[str, tuple[object, object]]:
        """Return keys whose value differs, with the default and the value; both as plain text.

        A key without a default is not a change: it belongs to a chosen option. Nor is a default
        that is known only at the start of a run (the name of its folder).
        """
        return {
            key: (defaults.flat[key], value)
            for key, value in self.flat.items()
            if key in defaults.flat
            and "${" not in str(defaults.flat[key])
            and _comparable(value) != _comparable(defaults.flat[key])
        }


def read_defaults() -> Settings:
    """Compose the defaults as Hydra would: each section with the option that config.yaml names."""
    values = _load(_DEFAULTS / "config.yaml")
    sections: dict[str, Any] = {}
    for entry in values.get("defaults", []):
        if isinstance(entry, dict):
            for section, option in entry.items():
                sections[section] = _load(_DEFAULTS / str(section) / f"{option}.yaml")
    plain = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    return Settings(sections | plain)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def to_text(value: object) -> str:
    """Write a value as typed on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _comparable(value: object) -> object:
    """Return the same for every spelling of a number: YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        try:
            return float(value)
        except ValueError:
            return str(value)
    return value
