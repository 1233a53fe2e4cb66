"""``@register``: which methods of a worker the driver may call, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hybridrl.errors import DispatchError
from hybridrl.single_controller.dispatch import Dispatch, Execute

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How the driver calls one method."""

    dispatch: Dispatch
    execute: Execute = Execute.ALL
    is_blocking: bool = True
    pads: bool = False
    timeout_s: float | None = None


# Beside the functions and not on them: no magic attribute, and a method keeps its full type.
_registrations: WeakKeyDictionary[Callable[..., Any], Registration] = WeakKeyDictionary()


def register(
    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    *,
    blocking: bool = True,
    pad: bool | None = None,
    timeout_s: float | None = None,
) -> Callable[[Method], Method]:
    """Make a method of a `Worker` callable on its group. An override keeps the registration.

    Args:
        dispatch_mode: how arguments are split and results collected.
        execute_mode: RANK_ZERO calls rank 0 alone and returns its result.
        blocking: False returns a `Future`, which the next call takes unresolved as an argument.
        pad: repeat rows of a batch that does not divide evenly, and drop their results; None:
            as the mode does.
        timeout_s: seconds that one call may take; None: the group's ``timeout_s``. A late call
            breaks the group, because a rank in a collective cannot be cancelled.

    Raises:
        DispatchError: not a mode, or padding in a mode that does not split rows.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise DispatchError(
            f"dispatch_mode={dispatch_mode!r} is not a Dispatch; "
            "use a constant such as Dispatch.ONE_TO_ALL, or Dispatch(name=, split=, collect=)"
        )
    registration = Registration(
        dispatch=dispatch_mode,
        execute=Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else execute_mode,
        is_blocking=blocking,
        pads=dispatch_mode.pads if pad is None else pad,
        timeout_s=timeout_s,
    )

    def remember(method: Method) -> Method:
        _registrations[method] = registration
        return method

    return remember


def registered_methods(cls: type) -> dict[str, Registration]:
    """Return the registrations of a class by method name, inherited ones included."""
    methods: dict[str, Registration] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if inspect.isfunction(member):
                registration = _registration_of(member)
                if registration is not None:
                    methods[name] = registration
    return methods


def _registration_of(function: Callable[..., Any]) -> Registration | None:
    # Another decorator may lie above @register; functools.wraps links to the wrapped function.
    innermost = inspect.unwrap(function, stop=lambda f: f in _registrations)
    return _registrations.get(innermost)
