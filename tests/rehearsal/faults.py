"""Faults that are put into the product, to see a rehearsal find them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """Other text in a module's source."""

    module: str
    right: str
    """Occurs once."""

    wrong: str

    def put_in(self) -> None:
        """Give the functions of the imported module the code of the faulty source."""
        module = import_module(self.module)
        source = inspect.getsource(module)
        if source.count(self.right) != 1:
            raise ValueError(f"{self.right!r} occurs {source.count(self.right)} times")
        right, wrong = (
            dict(_codes(compile(text, module.__file__ or "", "exec")))
            for text in (source, source.replace(self.right, self.wrong))
        )
        changed = {name for name, code in wrong.items() if _differ(code, right.get(name))}
        faulty = [each for each in _functions(module) if each.__qualname__ in changed]
        if not faulty:
            raise ValueError(f"{self.wrong!r} changes no function")
        for function in faulty:
            function.__code__ = wrong[function.__qualname__]


def _differ(one: CodeType, other: CodeType | None) -> bool:
    """Whether two functions do different things, wherever their lines are."""
    if other is None:
        return True
    parts = [
        (code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)])
        for code in (one, other)
    ]
    return parts[0] != parts[1]


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            yield from _codes(each)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    owners: list[Any] = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        for member in list(vars(owner).values()):
            function: Any = member.fget if isinstance(member, property) else member
            function = inspect.unwrap(getattr(function, "__func__", function))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
