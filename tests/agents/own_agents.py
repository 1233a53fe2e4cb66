from __future__ import annotations

from itertools import count

from hybridrl.agents.conversation import Conversation
from hybridrl.agents.tool_calls import ToolCall
from hybridrl.data.rows import Message


class AsksTwice:
    """Calls the calculator after each of two turns, whatever the model wrote."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        for turn in range(2):
            await conversation.sample()
            call = ToolCall("calculator", {"expression": f"{turn}+7"})
            result = await conversation.call(call)
            conversation.append([Message("tool", result.text)])
        await conversation.sample()


class TakesTurns:
    """Lets two players call the calculator; each is rewarded for what it wrote."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        for player in range(2):
            try:
                await conversation.sample(player)
            finally:  # also of a turn that the limit cut
                conversation.reward(len(conversation.last_turn.token_ids) / 64, player)
            result = await conversation.call(ToolCall("calculator", {"expression": "0+7"}))
            conversation.append([Message("tool", result.text)])
        await conversation.sample()


class WritesOn:
    """Writes a column of the data into the turn, behind each low digit."""

    appended_roles = ()

    async def run(self, conversation: Conversation) -> None:
        while (await conversation.sample(stops=[*"01234"]))[-1:] in [*"01234"]:
            conversation.append_text(conversation.row.columns["metadata"]["hint"])


class BreaksOff:
    """Has a tool that breaks in the conversation of every other row."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()
        if int(conversation.row.answer) % 2:
            raise ConnectionError("the tool's server is away")
        conversation.append([Message("tool", "7")])
        await conversation.sample()


class TellsTheAnswer:
    """Plays a user who knows the answer."""

    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()
        row = conversation.row
        conversation.append([Message("user", f"{row.answer} of {row.prompt}")])
        await conversation.sample()


class Wordless:
    """Lacks the roles of the messages that it appends."""

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()


class SomeBreakAtOnce:
    """Goes on for three turns, but for each fourth conversation, which has none."""

    appended_roles = ("user",)

    numbers = count()

    async def run(self, conversation: Conversation) -> None:
        if next(self.numbers) % 4 == 3:
            raise ConnectionError("the tool's server is away")
        for _ in range(2):
            await conversation.sample()
            conversation.append([Message("user", "1+")])
        await conversation.sample()


class GoesOn:
    """Asks for more after each of three turns."""

    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        for _ in range(3):
            await conversation.sample()
            conversation.append([Message("user", "1+")])
        await conversation.sample()
