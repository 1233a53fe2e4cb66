"""Classes of a user that say what the turns of a game on a server mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridrl.agents.openenv import InvalidAction, OpenEnv
from hybridrl.data.rows import Row
from hybridrl.env import everything


class InWords(OpenEnv):
    """Reads the number in a sentence, and is reset with the answer of the row."""

    def __init__(self) -> None:
        super().__init__(everything(but=())["GAME_SERVER"])

    def arguments(self, row: Row, seed: int) -> Mapping[str, Any]:
        return {"seed": int(row.answer)}

    def action(self, text: str) -> Mapping[str, Any]:
        if found := re.search(r"\d", text):
            return {"number": int(found[0])}
        raise InvalidAction("Say a digit.")

    def show(self, observation: Mapping[str, Any]) -> str:
        return f"It is {observation['hint']}."

    async def step(self, action: str) -> tuple[object, float, bool]:
        observation, reward, is_done = await super().step(action)
        state = await self.ask("state")
        return f"{observation} {state['step_count']} steps", reward, is_done
