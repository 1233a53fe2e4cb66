"""The answers of an environment: of ``reset`` and ``step``, in this project's form or Gymnasium's.

Plain environments play in processes, which import this module, so it does without torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from hybridrl.agents.tool_process import Content, to_content, to_parts, to_text
from hybridrl.data.rows import Message, RawMessage, Row, read_record, write_record
from hybridrl.json_text import to_json_text
from hybridrl.processes.child import Emit, Service, declined_as, load_module


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """An answer of an environment."""

    text: Content | None = None
    """Of ``reset``: goes behind the row's prompt."""

    messages: tuple[RawMessage, ...] = ()
    """Of ``reset``: in place of the prompt. Of ``step``: what the model reads next."""

    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False
    """Whether a limit of the environment ended it."""

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """Read what ``asdict`` returned; TypeError or KeyError if it is of another form."""
        messages = tuple(RawMessage(*message) for message in form["messages"])
        return cls(**{**form, "messages": messages})


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A call of an environment: to begin, to answer a turn, or without either to close."""

    row: Row | None = None
    seed: int = 0
    action: str | None = None

    def put_to(
        self,
        environment: Any,  # noqa: ANN401 - of a user
        *,
        max_chars: int,
    ) -> tuple[object, Callable[[Any], Observed]]:
        """Call the method; return its value or coroutine, and a function that reads the value."""
        if self.row is not None:
            given = _arguments_of_reset(environment.reset, self.row, self.seed)
            value = environment.reset(**given)
            is_gymnasium = "row" not in given
            return value, partial(read_reset, is_gymnasium=is_gymnasium, max_chars=max_chars)
        if self.action is not None:
            return environment.step(self.action), partial(read_step, max_chars=max_chars)
        return getattr(environment, "close", bool)(), lambda _: Observed()

    def to_json(self) -> Mapping[str, Any]:
        """Return a form for ``from_json``."""
        record = None if self.row is None else write_record(self.row).decode()
        return {"record": record, "seed": self.seed, "action": self.action}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned."""
        record = form["record"]
        row = None if record is None else read_record(record.encode(), origin="")
        return cls(row=row, seed=form["seed"], action=form["action"])


def load(path: str, name: str, max_chars: int) -> tuple[Service, None]:
    """Load the class of an environment; its service, see ``processes/child.py``, plays one."""
    with declined_as(0):
        factory = vars(load_module(path))[name]
    made: list[Any] = []

    def play(message: dict[str, Any], emit: Emit) -> None:
        if not made:
            made.append(factory())
        value, read = Question.from_json(message).put_to(made[0], max_chars=max_chars)
        emit(observed=asdict(read(value)))

    return play, None


def _arguments_of_reset(reset: object, row: Row, seed: int) -> dict[str, object]:
    """Return those of row, seed and options that ``reset`` takes."""
    if not callable(reset):
        raise TypeError("it has no method reset")
    parameters = inspect.signature(reset).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    options: dict[str, object] = {"prompt": row.prompt, "answer": row.answer}
    options |= {"source": row.source, "columns": row.columns}
    given = {"row": row, "seed": seed, "options": options}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds and "row" not in parameters
    names = given if not takes_all else ("seed", "options")
    return {name: given[name] for name in names if takes_all or name in parameters}


def read_reset(value: object, *, is_gymnasium: bool, max_chars: int) -> Observed:
    """Read the answer of ``reset``, in Gymnasium's form an observation and a dict.

    A text longer than ``max_chars`` loses its middle. TypeError: the answer has another form, or
    cannot be written as JSON.
    """
    if is_gymnasium:
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(f"reset returned {_shown(value)}, must be (observation, info)")
        return Observed(text=_to_content(value[0], max_chars))
    if value is None or isinstance(value, str) or to_parts(value, max_chars=max_chars):
        return Observed(text=None if value is None else to_content(value, max_chars=max_chars))
    return Observed(messages=_to_messages(value, max_chars))


def read_step(value: object, *, max_chars: int) -> Observed:
    """Read the answer of ``step``: three values or four, the last ignored, or Gymnasium's five.

    TypeError: it has another form, or cannot be written as JSON. ValueError: an infinite reward.
    """
    if not isinstance(value, tuple) or len(value) not in (3, 4, 5):
        raise TypeError(
            f"step returned {_shown(value)}, must be (observation, reward, done), or (observation, "
            "reward, terminated, truncated, info) as in Gymnasium"
        )
    observation, reward, is_done, *further = value
    is_truncated = len(value) == 5 and bool(further[0])
    if not math.isfinite(reward := float(reward)):
        raise ValueError(f"step returned the reward {reward}, must be finite")
    is_over = bool(is_done) or is_truncated
    return Observed(
        messages=() if is_over else _to_messages(observation, max_chars),
        reward=reward,
        is_done=is_over,
        is_truncated=is_truncated and not is_done,
    )


def _to_messages(value: object, max_chars: int) -> tuple[RawMessage, ...]:
    """Return messages; anything else is the content of a user's message."""
    messages = [*map(_to_message, value)] if isinstance(value, list | tuple) else []
    if not messages or not all(messages):
        return (RawMessage("user", _to_content(value, max_chars)),)
    return tuple(
        RawMessage(str(m.role), to_content(m.content, max_chars=max_chars)) for m in messages if m
    )


def _to_message(value: object) -> Message | None:
    if isinstance(value, Mapping) and {"role", "content"} <= value.keys():
        return Message(value["role"], value["content"])
    return value if isinstance(value, Message) else None


def _to_content(value: object, max_chars: int) -> Content:
    """Return text and parts as they are, and numbers, lists and arrays as JSON."""
    if parts := to_parts(value, max_chars=max_chars):
        return parts
    text = value if isinstance(value, str) else to_json_text(value)
    return to_text(text, max_chars=max_chars)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.80}"
