"""The parts of a run: functions that the configuration names, most of them of the algorithm.

A part is found by its name in ``parts.yaml``, or by ``path/to/file.py:function``. Both are read
from their source, so that no check needs torch. ``algorithms/load.py`` imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import hybridrl
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.functions.signatures import Signature, SignatureError, read_signature
from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import suggest_name

_PACKAGE = Path(hybridrl.__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class PartKind:
    """One kind of part."""

    noun: str
    """As messages call it."""

    key: str
    """Dotted key that names it."""

    args_key: str | None
    """Dotted key that holds its numbers; None if parts of this kind have none."""

    built_in: Mapping[str, str]
    """Module below ``hybridrl.algorithms``, by name of the function in it."""

    inputs: frozenset[str]
    """Inputs that a part may name; docs/how-to/algorithm.md describes them."""

    presets: Mapping[str, tuple[str, Mapping[str, ArgumentValue]]] = field(default_factory=dict)
    """By a name of verl: the built-in part, and its numbers."""

    def read(self, spelled: str) -> Signature:
        """Read the signature of the part that a user named, or raise a ``SignatureError``."""
        if spelled in self.presets:
            spelled, _ = self.presets[spelled]
        if spelled in self.built_in:
            return _read_built_in(self.built_in[spelled], spelled)
        path, colon, name = spelled.rpartition(":")
        if not colon:
            rule = f"neither a built-in {self.noun} nor path/to/file.py:function"
            names = [*self.built_in, *self.presets]
            raise SignatureError(rule, suggest_name(spelled, names))
        signature = read_signature(Path(path), name)
        if unknown := [given for given in signature.inputs if given not in self.inputs]:
            rule = f"{name} asks for {unknown[0]}, and no {self.noun} gets it"
            fix = f"name some of {', '.join(sorted(self.inputs))}; put numbers after a single *"
            raise SignatureError(rule, fix)
        return signature

    def reads(self, spelled: str, name: str) -> bool:
        """Return whether a part asks for an input; False for a part that cannot be read."""
        try:
            return name in self.read(spelled).inputs
        except SignatureError:
            return False


@cache
def _read_built_in(module: str, name: str) -> Signature:
    return read_signature(_PACKAGE / "algorithms" / f"{module.replace('.', '/')}.py", name)


def _read_kinds() -> dict[str, PartKind]:
    kinds: dict[str, Any] = read_yaml(
        (_PACKAGE / "config/functions/parts.yaml").read_text(encoding="utf-8")
    )
    return {
        name: PartKind(
            noun=kind["noun"],
            key=kind["key"],
            args_key=kind["args_key"],
            built_in={f: module for module, listed in kind["modules"].items() for f in listed},
            inputs=frozenset(kind["inputs"]),
            presets={name: tuple(preset) for name, preset in kind.get("presets", {}).items()},
        )
        for name, kind in kinds.items()
    }


_KINDS = _read_kinds()
KINDS = tuple(_KINDS.values())
ADVANTAGE = _KINDS["advantage"]
POLICY_LOSS = _KINDS["policy_loss"]
TOKEN_MASK = _KINDS["token_mask"]
AGGREGATION = _KINDS["aggregation"]
KL = _KINDS["kl"]
ROLLOUT_CORRECTION = _KINDS["rollout_correction"]
GROUP_FILTER = _KINDS["group_filter"]
ROW_FILTER = _KINDS["row_filter"]
PREFERENCE_LOSS = _KINDS["preference_loss"]
CHECKPOINT_FUNCTION = _KINDS["checkpoint_function"]
METRICS_FUNCTION = _KINDS["metrics_function"]
