"""Agents, and the conversations that they hold: to an end, to a limit, or to an error.

Whatever the agent does, the tokens here are those that the sampler returned, in order, and what was
appended between them.

Most agents ``sample`` and ``append`` alone, or write on within a turn (``append_text``). An agent
that renders its messages itself holds several sequences at the same time: it begins one for each
history that is no continuation of an earlier one (``begin``), appends what was rendered behind the
last turn (``append_tokens``), and samples in any of them (``sample_turn``). All of them become one
trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.stops import ends_with, sample_up_to
from hybridrl.agents.templates import History, TurnTemplate
from hybridrl.agents.tool_calls import BrokenCall, Calls, ToolCall, ToolFormat
from hybridrl.agents.tools import Toolbox, ToolResult
from hybridrl.agents.trajectory import (
    Ended,
    OpenSequence,
    TokenSequence,
    Trajectory,
    Turn,
    call_record,
)
from hybridrl.batch import MAX_PLAYERS
from hybridrl.data.images import look_at, with_images
from hybridrl.data.rows import Message, RawMessage, Row
from hybridrl.diagnostics import trace
from hybridrl.images import Images
from hybridrl.loop_thread import is_cancelled
from hybridrl.processes.child import last_line
from hybridrl.sampler import RequestParams, Sample, Sampler, request_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The beginning of a conversation."""

    row: Row
    """With the reference answer, for agents that play an environment."""

    token_ids: Tensor
    """int64 [n], n >= 1, of the rendered prompt."""

    seed: int
    """Of the prompt (``PromptBatch.seed_P``)."""

    response_index: int
    """Index of the conversation among those that start with the same prompt, from 0."""

    number: int
    """Of the conversation in its call, from 0."""

    images: Images = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The setting that all conversations of a rank share."""

    sampler: Sampler
    params: RequestParams
    """``max_new_tokens`` limits all tokens behind the prompt, tool results among them."""

    max_prompt_tokens: int
    """A longer first context takes from the tokens behind it. The sampler's own limit may be that
    of an evaluation, and rows of training are no longer than planned."""

    tokenizer: PreTrainedTokenizerBase
    template: TurnTemplate
    history: History = "strict"
    toolbox: Toolbox
    tool_format: ToolFormat
    max_turns: int
    """Turns of the assistant."""

    timeout_s: float
    """Seconds from the first request to the end."""


class ConversationEnded(BaseException):
    """A limit was reached; from here on every request of the conversation raises this.

    No ``Exception``: an agent that catches those and tries again for ever would stop its rank.
    """


class Conversation:
    """Records turns, and keeps within the limits.

    What puts tokens into it raises ConversationEnded if none could be sampled behind them. What
    samples raises EngineError if the engine failed.
    """

    def __init__(self, prompt: Prompt, setting: Setting) -> None:
        self._prompt = prompt
        self._setting = setting
        messages = with_images(prompt.row.prompt, prompt.images)
        self._messages = setting.template.specials.harmless_messages(messages)
        self._sequences = [OpenSequence(prompt.token_ids, prompt.images)]
        """In the order of their last turns: ``sample`` continues the last one."""
        self._is_begun = False
        self._is_open = False
        """Whether the last turn lacks the token that ends it."""
        self._last_turns: dict[int | None, tuple[OpenSequence, int]] = {}
        """The last sampled turn of each player, and of all (None): its sequence, and index in it.
        """
        self._max_tokens = self._limit_behind(prompt.token_ids)
        self._turn_lock = asyncio.Lock()
        self._num_sampled = 0
        self._has_sampled_placeholder = False
        self._results: list[ToolResult] = []
        self._busy_lanes: set[int] = set()
        """Of the trace, by calls that run."""
        self._ended: Ended | None = None
        self._failure = ""
        self.sampler_error: Exception | None = None
        """An error of the engine: unlike others it ends the run."""

    @property
    def row(self) -> Row:
        """Return the row of the data: prompt, answer and source."""
        return self._prompt.row

    @property
    def seed(self) -> int:
        """Return a number below 2**31, the same for all conversations of the prompt in a step.

        So responses that are compared with each other meet the same environment.
        """
        return self._prompt.seed % 2**31

    @property
    def number(self) -> int:
        """Return the number of the conversation in its call, for the trace."""
        return self._prompt.number

    @property
    def messages(self) -> Sequence[Message]:
        """Return the messages so far, those of the row's prompt first."""
        return tuple(self._messages)

    async def look_at(self, messages: Sequence[RawMessage], origin: str = "") -> list[Message]:
        """Read the images of messages that have parts, as those in data files.

        ``origin`` is ``file:name``, relative to whose folder paths are. Malformed: see ``look_at``.
        """
        return await look_at(messages, origin, self._setting.template.images)

    def begin_with(self, messages: Sequence[Message]) -> None:
        """Put messages in place of the row's prompt, before the first turn.

        AgentError: the chat template rejects them.
        """
        template = self._setting.template
        self._messages = template.harmless(messages)
        self.begin(torch.tensor(template.beginning(self._messages)), _images_of(self._messages))

    async def sample(
        self, player: int = 0, *, stops: Sequence[str] = (), max_new_tokens: int | None = None
    ) -> str:
        """Sample the assistant's next turn: its text, without the token that ended it.

        It has special tokens. ``player`` is the number of who speaks, from 0 to 127, where the
        policy plays several. The first of ``stops`` or ``max_new_tokens`` leaves the turn open:
        ``append_text`` and ``sample`` continue it, ``append`` ends it. The text then has the string
        that stopped it, to the end of its last token. ConversationEnded: a limit was reached,
        before the turn or in it.
        """
        sample = await self.sample_turn(
            self._sequences[-1], stops=stops, max_new_tokens=max_new_tokens, player=player
        )
        tokenizer, token_ids = self._setting.tokenizer, sample.token_ids
        is_stopped = sample.is_truncated and (
            len(token_ids) == max_new_tokens or ends_with(stops, token_ids, tokenizer)
        )
        self._end_if("tokens", reached=sample.is_truncated and not is_stopped)
        text: str = tokenizer.decode(token_ids if sample.is_truncated else token_ids[:-1])
        if self._is_open:
            self._write_on(text)
        else:
            self._messages.append(Message("assistant", text))
        self._is_open = sample.is_truncated
        return text

    def append_text(self, text: str) -> None:
        """Write on in an open turn of the assistant, such as what a search for it found.

        The policy did not choose these tokens: nothing is learned from them. Special tokens within
        the text lose their meaning. ValueError: no turn is open, or the text has no token.
        """
        if not self._is_open:
            raise ValueError(
                "no turn is open: append_text writes on behind sample(stops=[...]) or "
                "sample(max_new_tokens=...); behind a turn that has ended append messages"
            )
        (message,) = self._setting.template.harmless([Message("tool", text)])
        token_ids = self._setting.tokenizer.encode(message.content, add_special_tokens=False)
        if not token_ids:
            raise ValueError("append_text got no text")
        self.append_tokens(self._sequences[-1], torch.tensor(token_ids), [message])
        self._is_open = True
        self._write_on(message.content)

    def _write_on(self, text: str) -> None:
        last = self._messages[-1]
        self._messages[-1] = replace(last, content=last.content + text)

    def append(self, messages: Sequence[Message]) -> None:
        """Append tool results, or a user's turn, and the beginning of the assistant's next turn.

        With ``agent.history=branch``, where the template then shows earlier turns differently, a
        new sequence begins with the conversation as the template renders it. AgentError: the chat
        template has no form for them.
        """
        self._end_if("tokens", reached=self._num_left <= 0)
        template, context = self._setting.template, None
        new = template.harmless(messages)
        if self._setting.history == "branch":
            context = template.rewritten(self._messages, new)
        self._messages += new
        sequence = self._sequences[-1]
        if context is None:
            appended = template.increment(new, is_cut=self._is_open)
        else:
            known = sequence.token_ids.tolist()
            if context[: len(known)] != known:
                self.begin(torch.tensor(context), _images_of(self._messages))
                return
            appended = context[len(known) :]  # rendered differently, and in the same tokens
        self.append_tokens(sequence, torch.tensor(appended), new)

    async def sample_turn(
        self,
        sequence: OpenSequence,
        *,
        stops: Sequence[str] = (),
        max_new_tokens: int | None = None,
        player: int = 0,
    ) -> Sample:
        """Sample a turn behind a sequence, of which it becomes the last turn.

        Turns of a conversation are sampled one after the other, whichever tasks ask for them: so
        limits and random streams do not depend on time.

        ``max_new_tokens=None`` leaves it to the conversation's limits. The token that completes the
        first of ``stops`` is its last one. ConversationEnded: a limit was reached before it.
        ValueError: another form of an argument.
        """
        if not 0 <= player < MAX_PLAYERS:
            raise ValueError(f"a player has a number from 0 to {MAX_PLAYERS - 1}, not {player}")
        if isinstance(stops, str) or not all(isinstance(each, str) and each for each in stops):
            raise ValueError(f"stops is a list of texts, as in stops=['</answer>'], not {stops!r}")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is at least 1, or None, not {max_new_tokens}")
        self._is_begun = True
        async with self._turn_lock:
            setting = self._setting
            self._end_if("turns", reached=self._num_sampled >= setting.max_turns)
            self._end_if("tokens", reached=self._num_left <= 0)
            num_tokens = min(max_new_tokens or self._num_left, self._num_left)
            params = replace(setting.params, max_new_tokens=num_tokens)
            prompt = self._prompt
            key = request_key(prompt.seed, prompt.response_index, turn=self._num_sampled)
            begin_ns = time.perf_counter_ns()
            try:
                sample = await sample_up_to(
                    tuple(stops),
                    setting.sampler,
                    sequence.token_ids,
                    params,
                    key=key,
                    images=sequence.images,
                    tokenizer=setting.tokenizer,
                )
            except Exception as error:
                self.sampler_error = error
                raise
            trace.add("turn", begin_ns, track=prompt.number, tokens=len(sample.token_ids))
            self._num_sampled += 1
            if (sight := setting.template.images) is not None:
                self._has_sampled_placeholder = bool((sample.token_ids == sight.placeholder).any())
            last = self._last_turns[player] = (sequence, len(sequence.turns))
            self._last_turns[None] = last
            turn = Turn(sample.token_ids, sample.logprobs, sample.versions_L, player=player)
            sequence.add(turn)
            self._sequences.remove(sequence)
            self._sequences.append(sequence)
            return sample

    def begin(self, context: Tensor, images: Images = ()) -> OpenSequence:
        """Begin a sequence behind history that was rendered again; ``sample`` continues it.

        Earlier sequences stay as they are, and may continue. Of a conversation that has sampled no
        token yet the context replaces the prompt. It is int64 [n], n >= 1, with its images in
        order, and counts among the tokens of the conversation.
        """
        if not self._is_begun:
            self._sequences.clear()
            self._max_tokens = self._limit_behind(context)
        self._is_begun, self._is_open = True, False
        self._end_if("tokens", reached=len(context) >= self._num_left)
        self._sequences.append(OpenSequence(context, images))
        return self._sequences[-1]

    def append_tokens(
        self, sequence: OpenSequence, token_ids: Tensor, messages: Sequence[Message] = ()
    ) -> None:
        """Append tokens that the policy did not choose, int64 [n], to a sequence.

        They end with the beginning of the assistant's next turn. ``messages`` are their content,
        for samples, the report and rewards, and have their images.
        """
        self._is_begun, self._is_open = True, False
        self._end_if("tokens", reached=len(token_ids) >= self._num_left)
        sequence.add(Turn(token_ids, None, messages=tuple(messages)))

    def reward(self, value: float | Sequence[float], player: int | None = None) -> None:
        """Give the last sampled turn, of one player if named, a reward; those of a turn add up.

        The reward of the conversation is the sum over its turns. So an agent that rewards the
        conversation alone does that behind the last turn. ``value`` is of the turn, or one of each
        of its tokens (``last_turn``). ValueError: not a finite number, another number of tokens, or
        no turn was sampled.
        """
        sequence, index = self._find_last_turn(player)
        sequence.turns[index] = sequence.turns[index].rewarded(value)

    @property
    def last_turn(self) -> Turn:
        """The tokens of the last sampled turn; ValueError before the first."""
        sequence, index = self._find_last_turn()
        return sequence.turns[index]

    def _find_last_turn(self, player: int | None = None) -> tuple[OpenSequence, int]:
        if player not in self._last_turns:
            of_player = "" if player is None else f" of player {player}"
            raise ValueError(f"no turn{of_player} was sampled yet that could be rewarded")
        return self._last_turns[player]

    def read_calls(self, text: str) -> Calls:
        """Read the calls in a sampled turn, broken ones too; none is an answer."""
        return self.tool_format.read(text, self._setting.toolbox.schemas)

    @property
    def tool_format(self) -> ToolFormat:
        """Return the form of calls, for agents with tools of their own."""
        return self._setting.tool_format

    async def call(self, call: ToolCall | BrokenCall) -> ToolResult:
        """Call a tool. Its failure is a result, too."""
        begin_ns = time.perf_counter_ns()
        lane = next(number for number in count() if number not in self._busy_lanes)
        self._busy_lanes.add(lane)
        records = self._sequences[-1].calls_behind_last_turn()
        at = len(records)  # calls keep the order in which they began
        records.append(call_record(call, is_error=True))
        try:
            result = await self._setting.toolbox.call(call)
        finally:
            self._busy_lanes.remove(lane)
        records[at] = replace(records[at], is_error=result.is_error)
        trace.add(
            "tool",
            begin_ns,
            track=self._prompt.number,
            lane=lane,
            tool=records[at].name[:80] or "broken call",
            is_error=result.is_error,
        )
        self._results.append(result)
        return result

    def note_call(self, call: ToolCall | BrokenCall, result: ToolResult) -> None:
        """Count a call that others answered, and keep it with the last turn."""
        record = call_record(call, is_error=result.is_error)
        self._sequences[-1].calls_behind_last_turn().append(record)
        self._results.append(result)

    def end(self, ended: Ended, *, failure: str = "") -> None:
        """End it; the first reason counts. ``failure`` is what broke, if it ends by an error."""
        if self._ended is None:
            self._ended, self._failure = ended, failure

    def to_trajectory(self) -> Trajectory:
        """Return all sequences, without messages behind their last sampled turn.

        A conversation that ended before its first turn has one of no tokens, as an error.
        """
        if self._ended is None and not self._num_sampled:
            self.end("error", failure="the agent returned before it sampled a turn")
        closed = [sequence.close() for sequence in self._sequences]
        sequences = [sequence for sequence in closed if sequence is not None]
        if not sequences:
            prompt = self._prompt.token_ids
            turn = Turn(prompt[:0], torch.zeros(0))
            sequences = [TokenSequence(prompt, (turn,), self._prompt.images)]
        return Trajectory(
            sequences=tuple(sequences),
            ended=self._ended or "answer",
            failure=self._failure,
            num_tool_calls=len(self._results),
            num_tool_errors=sum(result.is_error for result in self._results),
            tool_seconds=sum(result.seconds for result in self._results),
        )

    @property
    def _num_left(self) -> int:
        """Tokens that may follow. Those of all sequences count: the trainer computes them all.

        None behind a sampled placeholder, which a later image would take for one of its own.
        """
        if self._has_sampled_placeholder:
            return 0
        num_tokens = sum(len(sequence.token_ids) for sequence in self._sequences)
        return self._max_tokens - num_tokens

    def _limit_behind(self, context: Tensor) -> int:
        """Return the tokens of a conversation with this first context."""
        setting = self._setting
        limit = min(len(context), setting.max_prompt_tokens) + setting.params.max_new_tokens
        return min(limit, setting.sampler.max_context_tokens)

    def _end_if(self, limit: Ended, *, reached: bool) -> None:
        if reached:
            self.end(limit)
        if self._ended is not None:
            raise ConversationEnded(f"the conversation has ended: {self._ended}")


def _images_of(messages: Sequence[Message]) -> Images:
    return tuple(image for message in messages for image in message.images)


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
    """Let an agent hold one conversation, to its end or to a limit; EngineError ends the run."""
    conversation = Conversation(prompt, setting)
    begin_ns = time.perf_counter_ns()
    deadline = asyncio.timeout(setting.timeout_s)
    try:
        async with deadline:
            returned: object = await agent.run(conversation)  # type: ignore[func-returns-value]
            if returned is not None:
                raise TypeError(
                    f"run returned a {type(returned).__name__}, which nobody reads: what it "
                    "samples and appends is the response, and reward(value) rewards it"
                )
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
