"""Payloads: values that can be split into rows, joined again, and sent between processes.

The controller knows lists, numpy arrays, and plain tuples and dicts of payloads. Register another
type once, where it is defined: `register_payload` for splitting and joining, `register_reducer`
for its serialization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from hybridrl.errors import DispatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadOps:
    """How to count, split and join one type."""

    num_rows: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]
    """``take(value, start, stop)``: the rows ``start <= row < stop``; may be a view."""
    concat: Callable[[Sequence[Any]], Any]
    """Joins at least two values of the same type, in order."""
    accepts: Callable[[Any], bool] = lambda _: True
    """False for a value of the type that has no rows, for example a tensor without dimensions."""


_ops: dict[type, PayloadOps] = {}
_reducers: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
_after_call: list[Callable[[], None]] = []


def register_payload(cls: type, ops: PayloadOps) -> None:
    """Let dispatch modes split and join instances of ``cls`` and of its subclasses."""
    _ops[cls] = ops


def register_reducer(cls: type, reduce: Callable[[Any], tuple[Any, ...]]) -> None:
    """Pickle instances of exactly ``cls`` with ``reduce`` when Ray carries them, and only then.

    It returns what ``__reduce__`` may return. Buffers in it (numpy arrays) travel out of band, so
    the reader sees shared memory without a copy.
    """
    _reducers[cls] = reduce
    install_reducers()


def install_reducers() -> None:
    """Put the registered reducers into Ray's pickler, replacing Ray's own for the same types."""
    if ray.is_initialized():
        for cls in _reducers:
            # Ray adds its own when it first needs a serializer; a request for one adds them now.
            ray.util.deregister_serializer(cls)
    cloudpickle.CloudPickler.dispatch.update(_reducers)


def register_after_call(check: Callable[[], None]) -> None:
    """Run ``check`` in the worker after each remote call; an exception of it fails the call."""
    _after_call.append(check)


def run_after_call() -> None:
    """Run the registered checks."""
    for check in _after_call:
        check()


def is_payload(value: object) -> bool:
    """Return whether ``value`` has rows that can be dispatched."""
    return _find(value) is not None


def num_rows(payload: object) -> int:
    """Return the number of rows."""
    return _require(payload).num_rows(payload)


def take_rows(payload: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - any payload type
    """Return the rows ``start <= row < stop``, possibly as a view."""
    return _require(payload).take(payload, start, stop)


def concat_rows(parts: Sequence[Any]) -> Any:  # noqa: ANN401 - any payload type
    """Join values of one type, in order, in one new buffer; a single value is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    ops = _require(parts[0])
    types = {type(part) for part in parts}
    if len(types) > 1:
        names = sorted(cls.__name__ for cls in types)
        raise DispatchError(f"cannot join results of types {names}; return one type on all ranks")
    return ops.concat(parts)


def _find(value: object) -> PayloadOps | None:
    for cls in type(value).__mro__:
        ops = _ops.get(cls)
        if ops is not None:
            return ops if ops.accepts(value) else None
    return None


def _require(value: object) -> PayloadOps:
    ops = _find(value)
    if ops is None:
        raise DispatchError(
            f"{type(value).__name__} has no rows to split or join; "
            "register its type: hybridrl.single_controller.register_payload()"
        )
    return ops


def _common_num_rows(members: Sequence[object]) -> int:
    counts = [num_rows(member) for member in members]
    if len(set(counts)) != 1:
        raise DispatchError(
            f"the members of a tuple or dict have {counts} rows; give each the same number"
        )
    return counts[0]


def _slice(value: Any, start: int, stop: int) -> Any:  # noqa: ANN401
    return value[start:stop]


register_payload(
    list, PayloadOps(num_rows=len, take=_slice, concat=lambda parts: [*chain.from_iterable(parts)])
)
register_payload(
    np.ndarray,
    PayloadOps(
        num_rows=len,
        take=_slice,
        concat=np.concatenate,
        accepts=lambda value: value.ndim > 0,
    ),
)
register_payload(
    tuple,
    PayloadOps(
        num_rows=_common_num_rows,
        take=lambda value, start, stop: tuple(take_rows(v, start, stop) for v in value),
        concat=lambda parts: tuple(map(concat_rows, zip(*parts, strict=True))),
        # A named tuple would come back as a plain one, so it does not count as rows.
        accepts=lambda value: type(value) is tuple and bool(value) and all(map(is_payload, value)),
    ),
)
register_payload(
    dict,
    PayloadOps(
        num_rows=lambda value: _common_num_rows(list(value.values())),
        take=lambda value, start, stop: {k: take_rows(v, start, stop) for k, v in value.items()},
        concat=lambda parts: {key: concat_rows([part[key] for part in parts]) for key in parts[0]},
        accepts=lambda value: bool(value) and all(map(is_payload, value.values())),
    ),
)
