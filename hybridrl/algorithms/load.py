"""Imports the parts that a configuration names, each with its numbers."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.functions.parts import PartKind
from hybridrl.config.functions.signatures import SignatureError
from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import ConfigError, HybridRLError, TrainingError
from hybridrl.processes.child import load_module


@dataclass(frozen=True, slots=True)
class Part:
    """A function of the configuration, with its numbers."""

    key: str  # dotted key that names it
    spelled: str  # its name in the configuration
    inputs: tuple[str, ...]  # the inputs that it asks for
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any], **numbers: object) -> Self:
        """Return a function of this package as a part."""
        kinds = inspect.signature(function).parameters.values()
        inputs = tuple(given.name for given in kinds if given.kind is not given.KEYWORD_ONLY)
        return cls("part", function.__name__, inputs, partial(function, **numbers))

    def __call__(self, **inputs: object) -> Any:  # noqa: ANN401 - by the kind of part
        """Call it with those of ``inputs`` that it asks for.

        Raises:
            TrainingError: one of them is None, since this run does not have it; or the function
                raised. Names key, function and line.
        """
        given = {name: inputs[name] for name in self.inputs}
        if missing := [name for name, value in given.items() if value is None]:
            raise TrainingError(f"{self.key}={self.spelled} reads {missing[0]}, and there is none")
        try:
            return self.function(**given)
        except HybridRLError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainingError(
                f"{self.key}={self.spelled} raised {type(error).__name__}: {error} "
                f"({Path(line.filename).name}:{line.lineno})"
            ) from error


class HasParts(Protocol):
    """A section of the configuration that names parts: ``algorithm`` or ``dpo``."""

    @property
    def parts(self) -> tuple[tuple[PartKind, str, Mapping[str, ArgumentValue]], ...]:
        """Kind, name and given numbers of each part."""
        ...


def load_part(section: HasParts, kind: PartKind) -> Part | None:
    """Import the part of a kind, None if the section names none; ConfigError if it cannot be."""
    for named, spelled, numbers in section.parts:
        if named is kind:
            return load_by_name(kind, spelled, numbers)
    return None


def load_parts_by_source(algorithm: AlgorithmConfig) -> dict[str, Part]:
    """Import the advantages of sources, by name; see ``load_part``."""
    return {name: load_by_name(*part) for name, part in algorithm.parts_by_source.items()}


def require_part(section: HasParts, kind: PartKind) -> Part:
    """Import a part that the section always names; see ``load_part``."""
    part = load_part(section, kind)
    if part is None:
        raise ConfigError(kind.key, None, f"there must be a {kind.noun}", f"set {kind.key}")
    return part


def load_by_name(kind: PartKind, spelled: str, numbers: Mapping[str, object]) -> Part:
    """Import a part by its name or ``path/to/file.py:function``; see ``load_part``."""
    try:
        signature = kind.read(spelled)
    except SignatureError as error:
        raise ConfigError(kind.key, spelled, error.rule, error.fix) from error
    if spelled in kind.presets:
        name, preset = kind.presets[spelled]
        part = load_by_name(kind, name, {**preset, **numbers})
        return replace(part, spelled=spelled)
    if spelled in kind.built_in:
        module = import_module(f"hybridrl.algorithms.{kind.built_in[spelled]}")
        function = vars(module)[spelled]
        return Part(kind.key, spelled, signature.inputs, partial(function, **numbers))
    path, _, name = spelled.rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(kind.key, spelled, f"{path} is not a Python file", "rename it to NAME.py")
    try:
        function = vars(load_module(path))[name]
    except Exception as error:
        rule = f"it cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(kind.key, spelled, rule, f"correct {path}") from error
    return Part(kind.key, spelled, signature.inputs, partial(function, **numbers))
