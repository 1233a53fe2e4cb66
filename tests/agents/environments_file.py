"""Environments of a user: some work, some misbehave. Needs no torch."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy


class GuessNumber:
    """Says whether the number is lower or higher: plain methods, three values."""

    def reset(self, row: Any, seed: int) -> str:
        self.number = random.Random(seed).randint(1, 999)
        return f"I think of a number. {row.answer}"

    def step(self, action: str) -> tuple[str, float, bool]:
        if not action.isdecimal():
            return "That is no number", -0.5, False
        guess = int(action)
        return ("lower" if guess > self.number else "higher"), 0.25, guess == self.number

    def close(self) -> None:
        """Leave a trace for the test."""
        if folder := os.environ.get("HYBRIDRL_TEST_CLOSED"):
            with open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8") as file:
                file.write("closed")


class AsyncGuess:
    """The same with coroutines."""

    async def reset(self, row: Any, seed: int) -> str:
        await asyncio.sleep(0)
        self.game = GuessNumber()
        return self.game.reset(row, seed)

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0)
        return self.game.step(action)

    async def close(self) -> None:
        await asyncio.sleep(0)
        GuessNumber().close()


def make_async_guess() -> AsyncGuess:
    return AsyncGuess()


class Counts:
    """Two turns; the first earns its letters, the second one point, whatever the model writes."""

    def reset(self, row: Any, seed: int) -> str:
        self.num_steps = 0
        return "7"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.num_steps += 1
        return "8", float(len(action) % 7) if self.num_steps == 1 else 1.0, self.num_steps == 2


class Gym:
    """As of Gymnasium, with numbers of another library."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[object, object]:
        self.num_steps = 0
        return [numpy.array(1), options["answer"], options["columns"]], {"seed": seed}

    def step(self, action: str) -> tuple[object, object, bool, bool, object]:
        self.num_steps += 1
        return numpy.array(self.num_steps), numpy.float32(1.5), False, self.num_steps == 2, {}


def make_gym() -> Gym:
    return Gym()


class Chat:
    """Puts messages in place of the prompt, and answers with messages."""

    appended_roles = ("tool", "user")

    def reset(self, row: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "S<|im_end|>"}, {"role": "user", "content": "U"}]

    def step(self, action: str) -> tuple[list[dict[str, str]], int, bool, object]:
        return [{"role": "tool", "content": "T"}], 1, action == "end", {}


class Bad:
    """Misbehaves as the first turn asks for."""

    def reset(self, row: Any, seed: int) -> None:
        if row.answer == "hang":
            time.sleep(1000)
        if row.answer == "raise":
            raise KeyError("no board: \ud800")

    def step(self, action: str) -> object:
        if action in _FAULTS:
            _FAULTS[action]()
        return _ANSWERS.get(action, ("\ud800 fine", 1.0, False))

    def close(self) -> None:
        raise ConnectionError("it has gone")


def _raise() -> None:
    raise ValueError("no move")


def _print() -> None:
    for _ in range(100):
        sys.stdout.write("x" * 10**7)


_FAULTS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(1000),
    "raise": _raise,
    "die": lambda: os._exit(3),
    "fork": os.fork,
    "exit": lambda: sys.exit(1),
    "print": _print,
}
_ANSWERS: dict[str, object] = {
    "unencodable": (object(), 0.0, False),
    "nan": ("x", float("nan"), False),
    "pair": ("x", 1.0),
    "role": ([{"role": "system", "content": "x"}], 0.0, False),
    "flood": ("x" * 10**6, 1.0, False),
    "end": ("x", 1.0, True),
}


class Forks:
    """Counts its turns; from each of them two processes return."""

    def reset(self, row: Any, seed: int) -> None:
        self._num_turns = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        self._num_turns += 1
        os.fork()
        return f"turn {self._num_turns}", float(self._num_turns), False


class AsyncBad:
    """The same with coroutines."""

    async def reset(self, row: Any, seed: int) -> None:
        await asyncio.sleep(0)

    async def step(self, action: str) -> object:
        if action == "hang":
            await asyncio.sleep(1000)
        return Bad().step(action)

    async def close(self) -> None:
        raise ConnectionError("it has gone")


class WithoutStep:
    def reset(self, row: Any, seed: int) -> None:
        pass


class WithoutSeed:
    def reset(self, level: int) -> None:
        pass

    def step(self, action: str) -> object:
        return action


class Mixed:
    def reset(self, row: Any, seed: int) -> None:
        pass

    async def step(self, action: str) -> Any:
        return action
