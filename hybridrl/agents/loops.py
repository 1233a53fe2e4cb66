"""Agents that come with hybridrl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hybridrl.agents.conversation import Conversation
from hybridrl.agents.tool_calls import Calls
from hybridrl.data.rows import Message


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Lets the model call tools, several at a time, until a turn has no call: the answer."""

    parse: Callable[[str], Calls]

    async def run(self, conversation: Conversation) -> None:
        """Answer each turn's calls with their results."""
        while calls := self.parse(await conversation.sample()):
            results = await asyncio.gather(*map(conversation.call, calls))
            conversation.append([Message("tool", result.text) for result in results])
