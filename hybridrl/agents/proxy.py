"""The agent ``proxy``: a program of the user's, which samples through an OpenAI-compatible server.

What it sampled is the trajectory. A request that continues a chat continues its tokens; a request
with another history begins a sequence of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.agents.agent import Agent
from hybridrl.agents.chat import (
    ChatAnswer,
    ChatMessage,
    ChatRequest,
    Fields,
    RefusedRequest,
    to_template,
)
from hybridrl.agents.conversation import Conversation, ConversationEnded
from hybridrl.agents.program import AgentProgram, ProgramEnd
from hybridrl.agents.proxy_server import HOST, MODEL, serve
from hybridrl.agents.setting import Setting
from hybridrl.agents.templates import History, TurnTemplate
from hybridrl.agents.tool_calls import BrokenCall, ToolCall, text_before_calls
from hybridrl.agents.tools import ToolResult
from hybridrl.agents.trajectory import OpenSequence
from hybridrl.config.agent import AgentConfig
from hybridrl.data.rows import Message, Row
from hybridrl.errors import AgentError
from hybridrl.json_text import to_json_text
from hybridrl.sampler import Sample

log = logging.getLogger(__name__)

T = TypeVar("T")


class ProgramFailed(Exception):
    """An agent program gave no answer."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A chat up to an answer, and the tokens that stand for it."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Fields, ...]
    sequence: OpenSequence
    num_tokens: int
    """Of the sequence, up to the end of the answer."""

    is_cut: bool
    """Whether the answer lacks its stop token."""

    @property
    def is_last(self) -> bool:
        return len(self.sequence.token_ids) == self.num_tokens


class Chats:
    """The chats of one agent program: which tokens stand for which messages."""

    def __init__(
        self,
        conversation: Conversation,
        template: TurnTemplate,
        tokenizer: PreTrainedTokenizerBase,
        *,
        history: History,
    ) -> None:
        """Begin with none; ``history`` is ``agent.history``."""
        self._history = history
        self._conversation = conversation
        self._template = template
        self._tokenizer = tokenizer
        self._answered: list[_Answered] = []
        self._num_calls = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the engine's error, if there was one."""
        self.ended: ConversationEnded | None = None
        """The limit that refused a request, if one did."""

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Sample the answer to a request; any number of requests at a time.

        Raises:
            RefusedRequest: a limit is reached, or the chat template has no form for the messages.
            EngineError: the engine failed.
        """
        try:
            sequence = self._continued(request) or self._begun(request)
            num_prompt_tokens = len(sequence.token_ids)
            sample = await self._conversation.sample_turn(
                sequence,
                max_new_tokens=request.max_tokens,
                shorten=lambda sampled: _cut_behind(sampled, request.stops, self._tokenizer.decode),
            )
        except ConversationEnded as error:
            self.ended = error
            raise RefusedRequest(str(error), code="conversation_ended") from error
        except AgentError as error:
            raise RefusedRequest(str(error), param="messages") from error
        except Exception as error:
            if error is self._conversation.sampler_error and not self.failed.done():
                self.failed.set_exception(error)
            raise
        text: str = self._tokenizer.decode(
            sample.token_ids if sample.is_truncated else sample.token_ids[:-1]
        )
        stopped_text = _text_before(text, request.stops)
        is_limited = sample.is_truncated and stopped_text is None
        if is_limited and len(sample.token_ids) != request.max_tokens:
            self._conversation.end("tokens")
        message = self._message_of(
            text if stopped_text is None else stopped_text, reads_calls=bool(request.tools)
        )
        self._answered.append(
            _Answered(
                messages=(*request.messages, message),
                tools=request.tools,
                sequence=sequence,
                num_tokens=len(sequence.token_ids),
                is_cut=sample.is_truncated,
            )
        )
        self._num_calls += len(message.calls)
        return ChatAnswer(
            message=message,
            first_call=self._num_calls - len(message.calls),
            finish_reason=_finish_reason(message, is_limited=is_limited),
            tokens=self._tokenizer.batch_decode(sample.token_ids[:, None]),
            logprobs=sample.logprobs.tolist(),
            num_prompt_tokens=num_prompt_tokens,
        )

    @property
    def has_answer(self) -> bool:
        """Whether a request was answered."""
        return bool(self._answered)

    def _continued(self, request: ChatRequest) -> OpenSequence | None:
        """Append the new messages of a chat that is known so far."""
        known = [chat for chat in self._answered if _new_messages(chat, request)]
        if not known:
            return None
        chat = max(known, key=lambda chat: (len(chat.messages), chat.is_last))
        new = self._template.harmless(
            [Message(m.role, m.content) for m in _new_messages(chat, request)]
        )
        if self._history == "branch" and self._is_rewritten(chat, new):
            return None
        increment = torch.tensor(self._template.increment(new, is_cut=chat.is_cut))
        if not chat.is_last:  # the program has gone on from here before
            context = chat.sequence.token_ids[: chat.num_tokens]
            return self._conversation.begin(torch.cat([context, increment]))
        self._conversation.append_tokens(chat.sequence, increment, new)
        return chat.sequence

    def _begun(self, request: ChatRequest) -> OpenSequence:
        token_ids = self._in_either_form(
            request.messages, lambda messages: self._template.beginning(messages, request.tools)
        )
        return self._conversation.begin(torch.tensor(token_ids))

    def _is_rewritten(self, chat: _Answered, new: Sequence[Message]) -> bool:
        """Return whether the template shows a chat differently once messages follow."""
        context = self._in_either_form(
            chat.messages,
            lambda messages: self._template.rewritten(messages, new, tools=chat.tools),
        )
        return context is not None

    def _in_either_form(
        self, messages: Sequence[ChatMessage], render: Callable[[list[Fields]], T]
    ) -> T:
        """Render messages; some templates take the arguments of calls as JSON alone."""
        try:
            return render([to_template(m, has_json_arguments=False) for m in messages])
        except AgentError:
            return render([to_template(m, has_json_arguments=True) for m in messages])

    def _message_of(self, text: str, *, reads_calls: bool) -> ChatMessage:
        """Read the calls in the last turn. A turn with a call that cannot be read is text."""
        calls = self._conversation.read_calls(text) if reads_calls else ()
        for call in calls:
            is_broken = isinstance(call, BrokenCall)
            self._conversation.note_call(call, ToolResult("", is_error=is_broken, seconds=0.0))
        read = tuple(call for call in calls if isinstance(call, ToolCall) and _has_json_form(call))
        if not read or len(read) < len(calls):
            return ChatMessage("assistant", text.strip())
        return ChatMessage("assistant", text_before_calls(text).strip(), read)


def _new_messages(chat: _Answered, request: ChatRequest) -> tuple[ChatMessage, ...]:
    """Return the messages that a request has behind a chat; none if it is another one."""
    num_known = len(chat.messages)
    new = request.messages[num_known:]
    is_known = request.tools == chat.tools and request.messages[:num_known] == chat.messages
    return new if is_known and all(m.role in ("tool", "user") for m in new) else ()


def _cut_behind(sample: Sample, stops: Sequence[str], decode: Callable[[Tensor], str]) -> Sample:
    """Drop the tokens behind the one that completes the first stop string.

    The engine samples to the end of the turn, and knows nothing of strings: the tokens up to here
    do not depend on those behind them.

    Args:
        stops: not empty strings; may be none.

    Returns:
        The sample itself if its text has none of the strings; else one that lacks a stop token.
    """
    token_ids = sample.token_ids if sample.is_truncated else sample.token_ids[:-1]

    def has_stop(num_tokens: int) -> bool:
        return _text_before(decode(token_ids[:num_tokens]), stops) is not None

    if not stops or not has_stop(len(token_ids)):
        return sample
    num_tokens = bisect_left(range(len(token_ids)), 1, key=has_stop)
    return replace(
        sample,
        token_ids=token_ids[:num_tokens],
        logprobs=sample.logprobs[:num_tokens],
        finish_reason="length",
    )


def _text_before(text: str, stops: Sequence[str]) -> str | None:
    """Return a text up to the first stop string in it; None if it has none."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None


def _has_json_form(call: ToolCall) -> bool:
    try:
        to_json_text(call.arguments)
    except (TypeError, ValueError):
        return False
    return True


def _finish_reason(
    message: ChatMessage, *, is_limited: bool
) -> Literal["stop", "length", "tool_calls"]:
    if message.calls:
        return "tool_calls"
    return "length" if is_limited else "stop"


class Proxy:
    """The agent programs of a rank, and the server that they sample through."""

    appended_roles = ("tool", "user")

    def __init__(
        self,
        config: AgentConfig,
        template: TurnTemplate,
        tokenizer: PreTrainedTokenizerBase,
        *,
        hidden_variables: Collection[str],
    ) -> None:
        """Start nothing yet; ``agent.command`` is run for each conversation."""
        self._config = config
        self._hidden_variables = hidden_variables
        self._template = template
        self._tokenizer = tokenizer
        self._running: set[AgentProgram] = set()
        self._num_refused = 0

    def agent(self) -> Agent:
        """Return the agent of one conversation."""
        return self

    def take_num_refused(self) -> int:
        """Return the requests that were answered with an error since the last time."""
        num_refused, self._num_refused = self._num_refused, 0
        return num_refused

    @asynccontextmanager
    async def open(self, setting: Setting) -> AsyncIterator[None]:
        """Serve in the running event loop; at the end no program is left."""
        num_programs = self._config.num_conversations
        with ThreadPoolExecutor(num_programs, thread_name_prefix="program") as self._threads:
            try:
                limit = setting.sampler.max_context_tokens
                async with serve(setting.params, max_context_tokens=limit) as self._server:
                    yield
            finally:
                self._num_refused += self._server.num_refused
                for program in self._running:
                    program.kill()

    async def run(self, conversation: Conversation) -> None:
        """Run a program to its end: the last sampled turn is the answer.

        Raises:
            ProgramFailed: it sampled nothing, or ended with an error.
            ConversationEnded: a limit refused a request of it.
            EngineError: the engine failed.
        """
        chats = Chats(conversation, self._template, self._tokenizer, history=self._config.history)
        key = self._server.open(chats.ask)
        program = self._start(conversation.row, key)
        self._running.add(program)
        try:
            either: set[asyncio.Future[Any]] = {program.ended, chats.failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if chats.failed.done():
                chats.failed.exception()  # an error that nobody looks at would be logged
            was_running = not program.ended.done()
            self._server.close(key)
            program.kill()
            end = await asyncio.shield(program.ended)
            self._running.discard(program)
            if was_running:
                log.warning("killed an agent program that ran for too long: %s", end.last_line)
        if chats.failed.done():
            chats.failed.result()
        if chats.ended is not None:
            raise chats.ended
        if end.status:
            raise ProgramFailed(f"an agent program {_describe(end)}")
        if not chats.has_answer:
            raise ProgramFailed(f"an agent program sampled nothing; its last line: {end.last_line}")

    def _start(self, row: Row, key: str) -> AgentProgram:
        prompt: object = row.prompt
        if not isinstance(row.prompt, str):
            prompt = [{"role": m.role, "content": m.content} for m in row.prompt]
        variables = {
            "OPENAI_BASE_URL": self._server.address,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": ",".join(filter(None, (env.get("NO_PROXY"), HOST))),
        }
        fields = {"prompt": prompt, "answer": row.answer, "source": row.source}
        return AgentProgram(
            self._config.command,
            variables=variables,
            hidden_variables=self._hidden_variables,
            input_text=to_json_text(fields),
            threads=self._threads,
        )


def _describe(end: ProgramEnd) -> str:
    if end.status < 0:
        return f"was killed by {signal.Signals(-end.status).name}; its last line: {end.last_line}"
    return f"ended with exit status {end.status}; its last line: {end.last_line}"
