"""Tools of users in processes: a call that hangs, dies or floods costs its process alone.

Processes of tools and of environments import this module, so it does without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import AgentError
from hybridrl.json_text import to_json_text
from hybridrl.processes.child import Emit, Message, Service, declined_as, load_function
from hybridrl.processes.pool import CallFailed, Child, Garbage, LoadFailed

BYTES_PER_CHAR = 12  # of a character that JSON writes as two escapes
_ANSWER_BYTES = 1 << 12


class ToolFailed(Exception):
    """A call gave no result; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolLimits:
    """Limits of one call of a tool."""

    timeout_s: float
    max_chars: int
    """Characters of a result that the model gets; of a longer one it gets both ends."""


def to_text(value: object, *, max_chars: int) -> str:
    """Return the result of a tool as the model reads it: a text as it is, others as JSON.

    Long text loses its middle; text that UTF-8 cannot hold gets question marks. TypeError or
    ValueError: JSON cannot hold the value, which contains itself or a number of 1000s of digits.
    """
    text = value if isinstance(value, str) else to_json_text(value, keeps_unicode=True)
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return text.encode(errors="replace").decode()


def load(functions: Sequence[tuple[str, str]], max_chars: int) -> tuple[Service, None]:
    """Load files and names; the service, see ``processes/child.py``, calls them by number."""
    loaded = []
    for number, (path, name) in enumerate(functions):
        with declined_as(number):
            loaded.append(load_function(path, name))

    def call(message: Message, emit: Emit) -> None:
        value = loaded[message["function"]](**message["arguments"])
        emit(text=to_text(value, max_chars=max_chars))

    return call, None


class ToolProcess(Child):
    """One process with all tools loaded, started at its first call and after each failure."""

    def __init__(self, functions: Sequence[tuple[Path, str]], limits: ToolLimits) -> None:
        """Start nothing yet. ``functions`` are files and names, called by their number."""
        names = [(str(path), name) for path, name in functions]
        super().__init__(
            __name__,
            {"functions": names, "max_chars": limits.max_chars},
            names=[f"agent.tools={path}:{name}" for path, name in names],
            timeout_s=limits.timeout_s,
            is_silent=True,
        )
        self._max_chars = limits.max_chars

    def run(self, function: int, arguments: Mapping[str, object]) -> str:
        """Return the result as text; ToolFailed if the call raised, hung, or ended its process."""
        message = {"function": function, "arguments": arguments}
        max_bytes = _ANSWER_BYTES + BYTES_PER_CHAR * self._max_chars
        try:
            self.start()
            with self.call(message, max_bytes=max_bytes) as next_answer:
                text = next_answer().get("text")
                if not isinstance(text, str):
                    raise Garbage("answered with something that is not a text")
                return text
        except LoadFailed as failure:
            raise AgentError(f"{failure}; correct the file") from failure
        except CallFailed as failure:
            raise ToolFailed(to_text(str(failure), max_chars=self._max_chars)) from failure
