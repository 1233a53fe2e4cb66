"""Agents, and how one of them holds a conversation: to its end, to a limit, or to an error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from hybridrl.agents.conversation import Conversation, ConversationEnded
from hybridrl.agents.setting import Prompt, Setting
from hybridrl.agents.trajectory import Trajectory
from hybridrl.diagnostics import trace
from hybridrl.loop_thread import is_cancelled
from hybridrl.processes.child import last_line

log = logging.getLogger(__name__)


class Agent(Protocol):
    """Holds conversations: any program over ``Conversation``. Made without arguments."""

    @property
    def appended_roles(self) -> Sequence[str]:
        """Return the roles of the messages that it appends, ``tool`` or ``user``.

        A class attribute: the chat template's form of them is checked before the run begins.
        """
        ...

    async def run(self, conversation: Conversation) -> None:
        """Sample turns and append messages until there is an answer.

        It returns when the last sampled turn is the answer. Errors that it raises end the
        conversation, not the run.
        """
        ...


async def hold(agent: Agent, prompt: Prompt, setting: Setting) -> Trajectory:
    """Let an agent hold one conversation, to its end or to a limit.

    Raises:
        EngineError: the engine failed.
    """
    conversation = Conversation(prompt, setting)
    begin_ns = time.perf_counter_ns()
    deadline = asyncio.timeout(setting.timeout_s)
    try:
        async with deadline:
            await agent.run(conversation)
    except ConversationEnded:
        pass
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # any user code
        if is_cancelled(error):
            raise
        if conversation.sampler_error is not None:
            raise conversation.sampler_error from error
        if deadline.expired():
            conversation.end("time")
        else:
            conversation.end("error", failure=last_line(error))
            log.warning("an agent failed, and its conversation ends there: %s", last_line(error))
    if conversation.sampler_error is not None:
        raise conversation.sampler_error
    trajectory = conversation.to_trajectory()
    trace.add(
        "conversation",
        begin_ns,
        track=prompt.number,
        turns=trajectory.num_sampled_turns,
        ended=trajectory.ended,
    )
    return trajectory
