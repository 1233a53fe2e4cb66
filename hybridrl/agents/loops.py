"""Agents that come with hybridrl."""

from __future__ import annotations

import asyncio

from hybridrl.agents.conversation import Conversation
from hybridrl.data.rows import Message


class ToolCalls:
    """Lets the model call tools, several at a time, until a turn has no call: the answer."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        """Answer each turn's calls with their results."""
        while calls := conversation.read_calls(await conversation.sample()):
            results = await asyncio.gather(*map(conversation.call, calls))
            conversation.append([Message("tool", result.text) for result in results])
