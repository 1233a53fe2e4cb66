"""The agent ``environment``: turns of the model and answers of an environment, one after the other.

An environment is a class in a file (or a function that makes one): see
``observations.Environment``. One of coroutines plays in the event loop of the rank.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridrl.agents import built_in
from hybridrl.agents.conversation import Conversation
from hybridrl.agents.observations import Observed, Question
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.config.agent import BUILT_IN_ENVIRONMENTS, OPENENV
from hybridrl.data.images import look_at
from hybridrl.data.rows import Malformed, Message, RawMessage
from hybridrl.diagnostics import trace
from hybridrl.errors import AgentError, suggest_name
from hybridrl.loop_thread import LoopThread
from hybridrl.processes.child import last_line, load_module
from hybridrl.processes.pool import CallFailed, Child, Copy, LoadFailed

_ANSWER_BYTES = 1 << 16
_USUAL_MESSAGES = 8


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """Makes environments: one for each conversation."""

    path: Path
    name: str
    factory: Callable[[], Any]
    is_async: bool
    appended_roles: tuple[str, ...] = ("user",)
    """Of the messages that ``step`` returns: attribute of the class, or those of the user."""


def load_environment(spelled: str) -> EnvironmentKind:
    """Import an environment's class or factory; AgentError if that fails, or lacks a method."""
    if spelled.startswith(OPENENV):
        openenv, url = import_module("hybridrl.agents.openenv"), spelled.removeprefix(OPENENV)
        own = Path(str(openenv.__file__))
        return EnvironmentKind(own, url, partial(openenv.OpenEnv, url), is_async=True)
    file, _, name = spelled.rpartition(":")
    if not file and name not in BUILT_IN_ENVIRONMENTS:
        raise AgentError(
            f"agent.environment={spelled!r} is not built in; "
            f"{suggest_name(name, BUILT_IN_ENVIRONMENTS)} "
            "For your own set agent.environment=path/to/file.py:Class"
        )
    file = file or str(built_in.__file__)
    try:
        factory: Any = vars(load_module(file))[name]
        kind = factory
        if not inspect.isclass(factory):
            made = factory()
            kind = type(made)
            _close(made)
        roles = tuple(getattr(kind, "appended_roles", ("user",)))
        reset, step = kind.reset, kind.step
        parameters = inspect.signature(reset).parameters.values()
    except (Exception, SystemExit) as error:  # any user code
        raise AgentError(
            f"agent.environment={spelled} cannot be loaded: {last_line(error)}; it needs "
            "reset(row, seed) and step(action), or those of Gymnasium"
        ) from error
    names = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_all and names.isdisjoint({"row", "seed"}):
        raise AgentError(
            f"agent.environment={spelled}: its reset takes {', '.join(sorted(names - {'self'}))}; "
            "write reset(self, row, seed), or as in Gymnasium reset(self, *, seed, options)"
        )
    is_async = inspect.iscoroutinefunction(step)
    if inspect.iscoroutinefunction(reset) != is_async or not {"tool", "user"}.issuperset(roles):
        raise AgentError(
            f"agent.environment={spelled}: write reset and step both with `async def`, or none; "
            "appended_roles are of tool and user"
        )
    return EnvironmentKind(Path(file), name, factory, is_async, roles)


def _close(environment: Any) -> None:  # noqa: ANN401 - of a user
    """Close one that may be of coroutines, whether or not an event loop runs here."""

    async def close() -> None:
        closing = getattr(environment, "close", bool)()
        if inspect.isawaitable(closing):
            await closing

    loop = LoopThread("close an environment")
    try:
        loop.run(close())
    finally:
        loop.end()


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered in another form: its conversation ends."""


Ask = Callable[[Question], Awaitable[Observed]]
"""Returns an environment's answer; raises EnvironmentFailed."""


async def _ask_in_loop(environment: Any, limits: ToolLimits, question: Question) -> Observed:  # noqa: ANN401 - of a user
    """Ask one of coroutines: it must let itself be cancelled, and may not block."""
    deadline = asyncio.timeout(limits.timeout_s)
    try:
        async with deadline:
            value, read = question.put_to(environment, max_chars=limits.max_chars)
            return read(await value if inspect.isawaitable(value) else value)
    except (Exception, SystemExit) as error:  # any user code
        if deadline.expired():
            raise EnvironmentFailed(f"took longer than {limits.timeout_s:g} s") from error
        raise EnvironmentFailed(f"raised {last_line(error)}") from error


async def _ask_copy(copy: Copy, limits: ToolLimits, question: Question) -> Observed:
    """Ask one of plain methods, in a process of its own."""
    max_bytes = _ANSWER_BYTES + _USUAL_MESSAGES * limits.answer_bytes
    try:
        answer = await copy.call(question.to_json(), max_bytes=max_bytes)
        return Observed.from_json(answer["observed"])
    except CallFailed as error:
        raise EnvironmentFailed(str(error)) from error
    except (TypeError, KeyError) as error:
        raise EnvironmentFailed("sent something else than an observation") from error


class Environments:
    """The environments of a rank; close it at the end.

    Each plain one plays in a process of its own: one that hangs, dies, forks or floods costs its
    own conversation. They are copies of one process, which has loaded the file.
    """

    def __init__(self, kind: EnvironmentKind, *, limits: ToolLimits) -> None:
        """Start the process that makes plain ones; AgentError if it cannot load the file."""
        self.kind = kind
        self._limits = limits
        self._process: Child | None = None
        if not kind.is_async:
            self._process = Child(
                "hybridrl.agents.observations",
                {"path": str(kind.path), "name": kind.name, "max_chars": limits.max_chars},
                names=[f"agent.environment={kind.path}:{kind.name}"],
                timeout_s=limits.timeout_s,
                is_silent=True,
            )
            self._start(self._process)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """Make an environment, and let it close what it opened; its failure then costs nothing."""
        with ExitStack() as ended:
            if self._process is None:
                ask: Ask = partial(_ask_in_loop, self.kind.factory(), self._limits)
            else:
                self._start(self._process)
                copy = self._process.fork()
                ended.callback(copy.end)
                ask = partial(_ask_copy, copy, self._limits)
            try:
                yield ask
            finally:
                with suppress(EnvironmentFailed):
                    await ask(Question())

    async def look_at(self, messages: Sequence[RawMessage]) -> list[Message]:
        """Read the images of an observation; EnvironmentFailed names what is wrong."""
        try:
            return await look_at(messages, f"{self.kind.path}:", self._limits.images)
        except Malformed as error:
            raise EnvironmentFailed(f"its observation cannot be shown: {error}") from error

    def close(self) -> None:
        """End all processes. Twice is a no-op."""
        if self._process is not None:
            self._process.close()

    def _start(self, process: Child) -> None:
        try:
            process.start()
        except LoadFailed as failure:
            raise AgentError(f"{failure}; correct the file") from failure


class PlaysEnvironment:
    """Has an environment answer each turn, and passes its rewards on, until it is done."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.appended_roles = environments.kind.appended_roles

    async def run(self, conversation: Conversation) -> None:
        """Play until the environment is done, or ends by a limit of its own."""
        look_at = self._environments.look_at
        async with self._environments.open() as ask:
            observed = await ask(Question(row=conversation.row, seed=conversation.seed))
            if observed.text is not None:
                *earlier, last = conversation.messages
                (new,) = await look_at([RawMessage("user", observed.text)])
                if last.role == "user":  # one turn of the user
                    text, images = f"{last.content}\n\n{new.content}", (*last.images, *new.images)
                    conversation.begin_with([*earlier, Message("user", text, images)])
                else:
                    conversation.begin_with([*earlier, last, new])
            elif observed.messages:
                conversation.begin_with(await look_at(observed.messages))
            while True:
                action = await conversation.sample()
                begin_ns = time.perf_counter_ns()
                observed = await ask(Question(action=action))
                trace.add("environment", begin_ns, track=conversation.number)
                conversation.reward(observed.reward)
                if observed.is_truncated:
                    conversation.end("turns")
                if observed.is_done:
                    return
                # The form of others in the chat template was not checked before the run.
                roles = [message.role for message in observed.messages]
                if other := [role for role in roles if role not in self.appended_roles]:
                    raise EnvironmentFailed(
                        f"step returned a message of role {other[0][:80]!r}; its appended_roles "
                        f"are {', '.join(self.appended_roles)}"
                    )
                conversation.append(await look_at(observed.messages))
