"""Pools over engines that tests make up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec, cast

from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool

P = ParamSpec("P")


class Pool(EnginePool):
    """Has engines by their place, and notes lost ones; promises no other unless a test says so."""

    def __init__(
        self, *engines: object, num_slots: int = 2, vocab_size: int = 1000, version: int = 0
    ) -> None:
        super().__init__(
            {index: cast(EngineHandle, engine) for index, engine in enumerate(engines)},
            num_slots=num_slots,
            max_context_tokens=32,
            vocab_size=vocab_size,
            version=version,
        )
        self.reasons: dict[int, str] = {}
        self.is_promising = False
        self.on_lost = self._note

    def _note(self, index: int, _: EngineHandle, reason: str) -> bool:
        self.reasons[index] = reason
        return self.is_promising


def in_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
