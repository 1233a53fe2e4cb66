"""Arguments passed to another package: those that follow from hybridrl keys are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import ConfigError

Reasons = Mapping[str, str]
"""By the name of an argument: the key that sets it, or the reason for its refusal."""


def by_argument(names: Mapping[str, str]) -> Reasons:
    """Return the reason of each argument.

    Args:
        names: of arguments, separated by spaces, by their common reason.
    """
    return {name: reason for reason, of_reason in names.items() for name in of_reason.split()}


def refuse_own_arguments(
    given: Mapping[str, ArgumentValue], section: str, *, typed: Reasons, taken: Reasons
) -> Iterator[ConfigError]:
    """Yield an error for each argument that a key sets, or that users may not choose.

    Args:
        given: arguments by their names in the other package.
        section: dotted key that holds them.
        typed: names of arguments that a key sets.
        taken: names of arguments that users may not choose.
    """
    for name, value in given.items():
        key = f"{section}.{name}"
        if name in typed:
            rule, fix = f"{typed[name]} sets it", f"set {typed[name]}, and ~{key}"
        elif name in taken:
            rule, fix = f"cannot be chosen: {taken[name]}", f"leave it out, or add ~{key}"
        else:
            continue
        yield ConfigError(key, value, rule, fix, remedies=[(f"~{key}",)])
