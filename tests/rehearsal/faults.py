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
        faulty = compile(source.replace(self.right, self.wrong), module.__file__ or "", "exec")
        codes = dict(_codes(faulty))
        num_changed = 0
        for function in _functions(module):
            code = codes[function.__qualname__]
            num_changed += code.co_code != function.__code__.co_code or _others(code) != _others(
                function.__code__
            )
            function.__code__ = code
        if not num_changed:
            raise ValueError(f"{self.wrong!r} changes no function")


def _others(code: CodeType) -> tuple[object, ...]:
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return (*constants, *code.co_names, *((each.co_code, _others(each)) for each in inner))


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            yield from _codes(each)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    owners: list[Any] = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        for member in list(vars(owner).values()):
            function = member.fget if isinstance(member, property) else member
            function = inspect.unwrap(getattr(function, "__func__", function))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
