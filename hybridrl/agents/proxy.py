"""The agent ``proxy``: a program of the user's, which samples as a client of OpenAI or Anthropic.

Whatever the program does, the event loop of the rollout is not held up: a thread reads what it
writes, since a loop that has output to read would never decode. It leaves no process behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hybridrl import env
from hybridrl.agents.conversation import Conversation, Setting
from hybridrl.agents.proxy_server import HOST, MODEL, Chats, serve
from hybridrl.config.agent import AgentConfig
from hybridrl.data.pixels import source_of_bytes
from hybridrl.data.prompts import message_parts
from hybridrl.data.rows import Row
from hybridrl.json_text import to_json_text
from hybridrl.processes.guard import end_guarded, guarded

log = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_LINE_CHARS = 300
# The guard reads its own standard input, so the command gets another.
_WITH_INPUT = ("/bin/sh", "-c", 'input=$1; shift; exec "$@" <"/proc/self/fd/$input"', "sh")


class AgentProgram:
    """A running command, with all processes that it starts. Kill it in any case."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        hidden_variables: Collection[str],
        input_text: str,
        threads: Executor,
    ) -> None:
        """Start it, with this process's environment but ``hidden_variables``, and ``variables``.

        One of ``threads`` is held for as long as the program runs.
        """
        descriptor = os.memfd_create("input")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(input_text.encode())
            self._process = subprocess.Popen(
                guarded([*_WITH_INPUT, str(descriptor), *command]),
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**env.everything(but=hidden_variables), **variables},
            )
        finally:
            os.close(descriptor)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[int, str]] = loop.run_in_executor(threads, self._watch)
        """Done when all processes have ended: the exit status (of a killed one the signal,
        negative), and the last line of standard error; empty without one."""

    def kill(self) -> None:
        """Begin to kill the program and all processes that it started. Twice is a no-op."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard waits for this

    def _watch(self) -> tuple[int, str]:
        """Read standard error until the guard has ended, which is when all processes are dead."""
        tail = b""
        with self._process.stderr or open(os.devnull, "rb") as errors:
            ended = os.pidfd_open(self._process.pid)
            poll = select.poll()
            for descriptor in (errors.fileno(), ended):
                poll.register(descriptor, select.POLLIN)
            is_open, has_ended = True, False
            while is_open and not has_ended:
                ready = {descriptor for descriptor, _ in poll.poll()}
                has_ended = ended in ready
                if errors.fileno() in ready:
                    part = os.read(errors.fileno(), 1 << 16)
                    tail, is_open = (tail + part)[-_TAIL_BYTES:], bool(part)
            os.close(ended)
        self._process.wait()
        end_guarded(self._process)  # if the guard itself was killed
        lines = tail.decode(errors="replace").splitlines()
        written = [line.strip() for line in lines if line.strip()]
        return self._process.returncode, written[-1][:_LINE_CHARS] if written else ""


class ProgramFailed(Exception):
    """An agent program gave no answer."""


class Proxy:
    """The agent programs of a call, and the server that they sample through."""

    appended_roles = ("tool", "user")

    def __init__(self, config: AgentConfig, *, hidden_variables: Collection[str]) -> None:
        """Start nothing yet; ``agent.command`` is run for each conversation."""
        self._config = config
        self._hidden_variables = hidden_variables
        self._running: set[AgentProgram] = set()
        self.num_refused = 0
        """Requests that were answered with an error."""

    @asynccontextmanager
    async def open(self, setting: Setting) -> AsyncIterator[None]:
        """Serve in the running event loop; at the end no program is left."""
        self._setting = setting
        num_programs = self._config.num_conversations
        with ThreadPoolExecutor(num_programs, thread_name_prefix="program") as self._threads:
            async with serve(setting) as self._server:
                try:
                    yield
                finally:
                    for program in self._running:
                        program.kill()
                    self.num_refused = self._server.num_refused

    async def run(self, conversation: Conversation) -> None:
        """Run a program to its end: the last sampled turn is the answer."""
        chats = Chats(conversation, self._setting)
        key = self._server.open(chats)
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
            status, last_line = await asyncio.shield(program.ended)
            self._running.discard(program)
            if was_running:
                log.warning("killed an agent program that ran for too long: %s", last_line)
        if chats.failed.done():
            chats.failed.result()
        if chats.ended is not None:
            raise chats.ended
        how = "" if chats.answered else "sampled nothing"
        if status:
            how = f"ended with exit status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        if how:
            raise ProgramFailed(f"an agent program {how}; its last line: {last_line}")

    def _start(self, row: Row, key: str) -> AgentProgram:
        variables = {
            "OPENAI_BASE_URL": self._server.address,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": self._server.address.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": MODEL,
            "NO_PROXY": ",".join(filter(None, (env.get("NO_PROXY"), HOST))),
        }
        return AgentProgram(
            self._config.command,
            variables=variables,
            hidden_variables=self._hidden_variables,
            input_text=to_json_text(_fields_of(row)),
            threads=self._threads,
        )


def _fields_of(row: Row) -> dict[str, object]:
    """Return the input of a program: the prompt as clients of OpenAI write it, and the answer."""
    fields = {"answer": row.answer, "source": row.source, "columns": row.columns}
    if isinstance(row.prompt, str):
        return {"prompt": row.prompt, **fields}
    urls = (
        source if source.startswith("data:") else source_of_bytes(Path(source).read_bytes())
        for source in row.images
    )
    images = ({"type": "image_url", "image_url": {"url": url}} for url in urls)
    messages = []
    for message in row.prompt:
        content: object = message.content
        if row.images:
            parts = message_parts(message.content)
            content = [part if "text" in part else next(images) for part in parts]
        messages.append({"role": message.role, "content": content})
    return {"prompt": messages, **fields}
