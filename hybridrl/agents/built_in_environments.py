"""Environments that come with hybridrl. Written as a user's own."""

from __future__ import annotations

import re

from hybridrl.agents.built_in_tools import calculator
from hybridrl.data.rows import Message, Row

_CALL = re.compile(r"\[calculator\(expression='([^']*)'\)\]")


class Calculator:
    """Answers a call of the calculator with its result, and any other turn with its reward.

    Of ``data=calculator``. Turn by turn: 0.5 for the first call whose result is the answer, 1 for
    the right answer.
    """

    appended_roles = ("tool",)

    def __init__(self) -> None:
        self._answer = ""
        self._is_known = False

    async def reset(self, row: Row, seed: int) -> None:
        """Begin with the prompt of the row; nothing here is random."""
        self._answer = row.answer

    async def step(self, action: str) -> tuple[list[Message], float, bool]:
        """Compute what the turn asks for, or compare its answer."""
        call = _CALL.fullmatch(action.strip())
        if call is None:
            return [], float(action.strip() == self._answer), True
        try:
            result = await calculator(call.group(1))
        except (ValueError, ArithmeticError) as error:
            return [Message("tool", f"Error: {error}")], 0.0, False
        is_new = result == self._answer and not self._is_known
        self._is_known = self._is_known or is_new
        return [Message("tool", result)], 0.5 * is_new, False
