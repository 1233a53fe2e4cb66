"""How one call on the driver becomes a call per rank, and how the results become one.

The vocabulary is verl's. A mode is a frozen `Dispatch` value: how an argument is split, and how the
results are collected. The mode alone decides the split; it is never guessed from a length.
``@register`` gives a method its mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from hybridrl.errors import DispatchError
from hybridrl.single_controller.payload import concat_rows, is_payload, num_rows, take_rows


class Execute(Enum):
    """Which ranks a call goes to."""

    ALL = auto()
    RANK_ZERO = auto()


class ResultLayout(Enum):
    """Layout of a split argument, or of uncollected results: the meaning of one entry.

    A future is passed to the next call without going through the driver if the output layout of
    one call is the input layout of the next.
    """

    WHOLE = auto()
    PER_RANK = auto()
    PER_DP_RANK = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Whole:
    """Wraps a payload that every rank gets in full although the mode splits: ``Whole(stops)``."""

    value: object


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which slice each rank takes, and which ranks return results."""

    dp_rank_of: tuple[int, ...]
    """By rank: the index of its slice. Ranks of one tensor-parallel group share it."""
    collects: tuple[bool, ...]
    """By rank: whether its result counts. Exactly one rank of each dp rank returns one."""

    def __post_init__(self) -> None:
        answering = [self.dp_rank_of[rank] for rank in self.collecting_ranks]
        if answering != list(range(self.dp_size)) or min(self.dp_rank_of) < 0:
            raise DispatchError(
                f"ranks say dp_rank {list(self.dp_rank_of)} and is_output_rank "
                f"{list(self.collects)}; give dp ranks 0..{self.dp_size - 1} and "
                "is_output_rank=True on exactly one rank each"
            )

    @classmethod
    def flat(cls, world_size: int) -> RankLayout:
        """Return the layout in which every rank has its own slice and its own result."""
        return cls(tuple(range(world_size)), (True,) * world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.dp_rank_of)

    @property
    def dp_size(self) -> int:
        """Number of distinct slices."""
        return max(self.dp_rank_of) + 1

    @property
    def collecting_ranks(self) -> list[int]:
        """The ranks that return results, by dp rank."""
        ranks = [rank for rank, collects in enumerate(self.collects) if collects]
        return sorted(ranks, key=self.dp_rank_of.__getitem__)


Split = Callable[[RankLayout, Any], Sequence[Any]]
Collect = Callable[[RankLayout, list[Any]], Any]


def split_whole(layout: RankLayout, value: object) -> list[object]:
    """Give every rank the same value."""
    return [value] * layout.world_size


def split_per_rank(layout: RankLayout, values: Any) -> Sequence[Any]:  # noqa: ANN401
    """Give entry i of a list or tuple to rank i."""
    if not isinstance(values, list | tuple) or len(values) != layout.world_size:
        length = f" of {len(values)}" if isinstance(values, list | tuple) else ""
        raise DispatchError(
            f"ALL_TO_ALL takes one entry per rank, got a {type(values).__name__}{length} for "
            f"{layout.world_size} ranks; pass a list of {layout.world_size}, or use ONE_TO_ALL"
        )
    return values


def split_by_dp_rank(layout: RankLayout, value: object) -> list[object]:
    """Split a payload into ``dp_size`` equal slices; each rank gets the slice of its dp rank.

    Values that are not payloads (a number, a config), and payloads in `Whole`, go to every rank.
    """
    dp_size = layout.dp_size
    if isinstance(value, Whole):
        return split_whole(layout, value.value)
    if dp_size == 1 or not is_payload(value):
        return split_whole(layout, value)
    rows_per_slice, remainder = divmod(num_rows(value), dp_size)
    if remainder:
        below = num_rows(value) - remainder
        sizes = f"{below} and {below + dp_size}" if below else f"{dp_size}"
        raise DispatchError(
            f"cannot split {num_rows(value)} rows evenly over {dp_size} data-parallel ranks; "
            f"nearest that works: {sizes} rows; pass a multiple of {dp_size} rows, or let the "
            "method pad: @register(..., pad=True)"
        )
    slices = [
        take_rows(value, dp_rank * rows_per_slice, (dp_rank + 1) * rows_per_slice)
        for dp_rank in range(dp_size)
    ]
    return [slices[dp_rank] for dp_rank in layout.dp_rank_of]


def collect_list(layout: RankLayout, results: list[Any]) -> list[Any]:
    """Return the result of every rank, by rank."""
    return results


def collect_list_by_dp_rank(layout: RankLayout, results: list[Any]) -> list[Any]:
    """Return the results of the output ranks, by dp rank."""
    return [results[rank] for rank in layout.collecting_ranks]


def collect_by_dp_rank(layout: RankLayout, results: list[Any]) -> Any:  # noqa: ANN401
    """Join the results of the output ranks, by dp rank; return a list if they are not payloads."""
    parts = collect_list_by_dp_rank(layout, results)
    return concat_rows(parts) if all(map(is_payload, parts)) else parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A dispatch mode. Build your own, or take one of the constants.

    A custom mode needs a name, ``split(layout, argument)``, which returns one entry per rank
    and is applied to each argument (return the same object for two ranks and it is sent once),
    and ``collect(layout, results)``, which gets one result per rank.
    """

    name: str
    split: Split
    collect: Collect
    input_layout: ResultLayout = ResultLayout.OTHER
    output_layout: ResultLayout = ResultLayout.OTHER
    mesh: str | None = None
    """The mesh that ranks reported with `Worker.register_mesh`; None: one slice per rank."""
    collect_from_all: bool = False
    """Whether ``collect`` gets the result of every rank that shares a slice; otherwise ranks that
    are not output ranks give None, and their results are not transferred."""
    pads: bool = False
    """Whether methods repeat rows to divide evenly, unless `register` says otherwise."""

    RANK_ZERO: ClassVar[Dispatch]
    """Only rank 0 is called, and its result is returned."""
    ONE_TO_ALL: ClassVar[Dispatch]
    """Every rank gets every argument in full; returns the list of results by rank."""
    ALL_TO_ALL: ClassVar[Dispatch]
    """Each argument is a list with one entry per rank; returns the list of results by rank."""
    DP_COMPUTE: ClassVar[Dispatch]
    """Payloads are split into one slice per rank; payload results are joined, others listed."""
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    """DP_COMPUTE that pads."""
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    """DP_COMPUTE that always returns the list of results."""


Dispatch.RANK_ZERO = Dispatch(
    name="RANK_ZERO", split=split_whole, collect=collect_list, input_layout=ResultLayout.WHOLE
)
Dispatch.ONE_TO_ALL = Dispatch(
    name="ONE_TO_ALL",
    split=split_whole,
    collect=collect_list,
    input_layout=ResultLayout.WHOLE,
    output_layout=ResultLayout.PER_RANK,
)
Dispatch.ALL_TO_ALL = Dispatch(
    name="ALL_TO_ALL",
    split=split_per_rank,
    collect=collect_list,
    input_layout=ResultLayout.PER_RANK,
    output_layout=ResultLayout.PER_RANK,
)
Dispatch.DP_COMPUTE = Dispatch(
    name="DP_COMPUTE",
    split=split_by_dp_rank,
    collect=collect_by_dp_rank,
    input_layout=ResultLayout.PER_DP_RANK,
    output_layout=ResultLayout.PER_DP_RANK,
)
Dispatch.DP_COMPUTE_PROTO = replace(Dispatch.DP_COMPUTE, name="DP_COMPUTE_PROTO", pads=True)
Dispatch.DP_COMPUTE_METRIC = replace(
    Dispatch.DP_COMPUTE,
    name="DP_COMPUTE_METRIC",
    collect=collect_list_by_dp_rank,
    output_layout=ResultLayout.OTHER,
)


def dispatch_by_mesh(mesh: str, base: Dispatch = Dispatch.DP_COMPUTE) -> Dispatch:
    """Return ``base`` over a named mesh, in which each rank has reported its dp rank.

    The mesh is read at the first call, so a worker may register it after its constructor.
    """
    return replace(base, name=f"{base.name}:{mesh}", mesh=mesh)


@dataclass(frozen=True, slots=True)
class Padding:
    """How many rows of each padded slice are real."""

    num_real_rows: int
    num_slices: int

    @property
    def rows_per_slice(self) -> int:
        """Rows of each slice, padding included."""
        return -(-self.num_real_rows // self.num_slices)

    def strip(self, layout: RankLayout, results: list[Any]) -> list[Any]:
        """Drop the results of repeated rows from those of ranks; others are left unchanged.

        A method may return several result rows per row (G responses per prompt), the same number
        for each.
        """
        return [
            self._strip_one(dp_rank, result) if is_payload(result) else result
            for dp_rank, result in zip(layout.dp_rank_of, results, strict=True)
        ]

    def _strip_one(self, dp_rank: int, result: object) -> object:
        results_per_row, remainder = divmod(num_rows(result), self.rows_per_slice)
        if remainder:
            raise DispatchError(
                f"{num_rows(result)} result rows for {self.rows_per_slice} padded rows: rows of "
                "padding cannot be identified; return a fixed number per row, or register with "
                "pad=False"
            )
        num_real = min(
            self.rows_per_slice, max(0, self.num_real_rows - dp_rank * self.rows_per_slice)
        )
        if num_real == self.rows_per_slice:
            return result
        return take_rows(result, 0, num_real * results_per_row)


def pad_arguments(values: Sequence[object], dp_size: int) -> tuple[list[object], Padding | None]:
    """Repeat rows of the payloads among ``values`` from their start until they divide evenly.

    Returns with the values how to undo it; None if nothing was padded.
    """
    counts = {num_rows(value) for value in values if is_payload(value)}
    if all(count % dp_size == 0 for count in counts):
        return list(values), None
    if len(counts) > 1:
        raise DispatchError(
            f"cannot pad arguments of {sorted(counts)} rows together; give each the same number, "
            "or wrap an argument that every rank needs in full: Whole(argument)"
        )
    padding = Padding(counts.pop(), dp_size)
    target = padding.rows_per_slice * dp_size
    padded = [_repeat(value, target) if is_payload(value) else value for value in values]
    return padded, padding


def _repeat(payload: object, target: int) -> object:
    copies, remainder = divmod(target, num_rows(payload))
    tail = [take_rows(payload, 0, remainder)] if remainder else []
    return concat_rows([payload] * copies + tail)


Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How the driver calls one method."""

    dispatch: Dispatch
    execute: Execute = Execute.ALL
    is_blocking: bool = True
    pads: bool = False
    timeout_s: float | None = None


# Beside the functions and not on them: no magic attribute, and a method keeps its full type.
_registrations: WeakKeyDictionary[Callable[..., Any], Registration] = WeakKeyDictionary()


def register(
    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    *,
    blocking: bool = True,
    pad: bool | None = None,
    timeout_s: float | None = None,
) -> Callable[[Method], Method]:
    """Make a method of a `Worker` callable on its group. An override keeps the registration.

    Args:
        dispatch_mode: how arguments are split and results collected.
        execute_mode: RANK_ZERO calls rank 0 alone and returns its result.
        blocking: False returns a `Future`, which the next call takes unresolved as an argument.
        pad: repeat rows of a batch that does not divide evenly, and drop their results; None:
            as the mode does.
        timeout_s: seconds that one call may take; None: the group's ``timeout_s``. A late call
            breaks the group, because a rank in a collective cannot be cancelled.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise DispatchError(
            f"dispatch_mode={dispatch_mode!r} is not a Dispatch; "
            "use a constant such as Dispatch.ONE_TO_ALL, or Dispatch(name=, split=, collect=)"
        )
    registration = Registration(
        dispatch=dispatch_mode,
        execute=Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else execute_mode,
        is_blocking=blocking,
        pads=dispatch_mode.pads if pad is None else pad,
        timeout_s=timeout_s,
    )

    def remember(method: Method) -> Method:
        _registrations[method] = registration
        return method

    return remember


def registered_methods(cls: type) -> dict[str, Registration]:
    """Return the registrations of a class by method name, with inherited ones."""
    methods: dict[str, Registration] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if inspect.isfunction(member):
                # Another decorator may lie above @register; functools.wraps links to its function.
                innermost = inspect.unwrap(member, stop=lambda f: f in _registrations)
                if innermost in _registrations:
                    methods[name] = _registrations[innermost]
    return methods
