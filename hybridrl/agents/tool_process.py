"""Tools of users in processes: a call that hangs, dies or floods costs its process alone.

Processes of tools and of environments import this module, so it does without torch.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hybridrl.config.agent import MCP
from hybridrl.data.rows import IMAGE_MARK
from hybridrl.errors import AgentError
from hybridrl.json_text import to_json_text
from hybridrl.processes.child import Emit, Message, Service, declined_as, load_function
from hybridrl.processes.pool import CallFailed, Child, Garbage, LoadFailed

if TYPE_CHECKING:
    from hybridrl.images import ImageSettings

Content = str | list[Any]
"""A text, or parts of type ``text``, ``image`` and ``image_url``, as messages of data have them."""

BYTES_PER_CHAR = 12  # of a character that JSON writes as two escapes
_ANSWER_BYTES = 1 << 12
MCP_TOOLS = "hybridrl.agents.mcp_tools"
"""Imported by name where it is needed: the SDK is optional."""
_IMAGES_BYTES = 1 << 26
_OWN_MARK = (IMAGE_MARK, "\ufffd")  # beside an image this character would stand for another


class ToolFailed(Exception):
    """A call gave no result; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolLimits:
    """Limits of one call of a tool."""

    timeout_s: float
    max_chars: int
    """Characters of a result that the model gets; of a longer one it gets both ends."""

    images: ImageSettings | None = None
    """How the model cuts images; None: it sees none."""

    @property
    def answer_bytes(self) -> int:
        """Return the bytes that a text may have as JSON, with images if the model sees them."""
        return BYTES_PER_CHAR * self.max_chars + _IMAGES_BYTES * (self.images is not None)


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


def to_parts(value: object, *, max_chars: int) -> list[Any] | None:
    """Return a list of parts in types of JSON, each text as ``to_text``; None if it is none."""
    parts = value if isinstance(value, list | tuple) else ()
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not kinds or any(kind not in ("text", "image", "image_url") for kind in kinds):
        return None
    return [
        {**part, "text": to_text(part.get("text", ""), max_chars=max_chars).replace(*_OWN_MARK)}
        if kind == "text"
        else {name: _spell_image(entry) for name, entry in part.items()}
        for part, kind in zip(parts, kinds, strict=True)
    ]


def to_content(value: object, *, max_chars: int) -> Content:
    """Return the result of a tool as parts, or as text."""
    return to_parts(value, max_chars=max_chars) or to_text(value, max_chars=max_chars)


def _spell_image(value: Any) -> object:  # noqa: ANN401 - of a user
    """Return images of Pillow, and files as bytes, as data: URLs."""
    if hasattr(value, "save"):
        file = BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    return f"data:image/*;base64,{b64encode(value).decode()}" if type(value) is bytes else value


def load(functions: Sequence[tuple[str, str]], max_chars: int) -> tuple[Service, None]:
    """Load files and names; the service, see ``processes/child.py``, calls them by number.

    ``mcp:COMMAND`` stands in the place of a file: its server is started, once for all its tools.
    """
    loaded: list[Callable[[dict[str, Any]], Content]] = []
    servers: dict[str, Any] = {}
    for number, (path, name) in enumerate(functions):
        with declined_as(number):
            if path.startswith(MCP):
                if path not in servers:
                    servers[path] = import_module(MCP_TOOLS).Connection(path)
                loaded.append(partial(servers[path].call, name, max_chars=max_chars))
            else:
                function = load_function(path, name)
                loaded.append(partial(_call, function, max_chars=max_chars))

    def call(message: Message, emit: Emit) -> None:
        emit(content=loaded[message["function"]](message["arguments"]))

    return call, None


def _call(function: Callable[..., Any], arguments: dict[str, Any], *, max_chars: int) -> Content:
    return to_content(function(**arguments), max_chars=max_chars)


class ToolProcess(Child):
    """One process with all tools loaded, started at its first call and after each failure."""

    def __init__(self, functions: Sequence[tuple[str, str]], limits: ToolLimits) -> None:
        """Start nothing yet. ``functions`` are files and names, called by their number."""
        super().__init__(
            __name__,
            {"functions": list(functions), "max_chars": limits.max_chars},
            names=[f"agent.tools={path}:{name}" for path, name in functions],
            timeout_s=limits.timeout_s,
            is_silent=True,
        )
        self._limits = limits

    def run(self, function: int, arguments: Mapping[str, object]) -> Content:
        """Return the result; ToolFailed if the call raised, hung, or ended its process."""
        message = {"function": function, "arguments": arguments}
        max_bytes = _ANSWER_BYTES + self._limits.answer_bytes
        try:
            self.start()
            with self.call(message, max_bytes=max_bytes) as next_answer:
                content = next_answer().get("content")
                if not isinstance(content, str | list):
                    raise Garbage("answered with something that is not a text")
                return content
        except LoadFailed as failure:
            raise AgentError(f"{failure}; correct the file") from failure
        except CallFailed as failure:
            raise ToolFailed(to_text(str(failure), max_chars=self._limits.max_chars)) from failure
