"""Weights by broadcast, at the receivers: join the sender's group and take bucket after bucket.

Each transfer has a gloo group of its own: rank 0 is the sender's process, the others are receivers.
So a group never has a member that is gone or was replaced.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import PhaseError, TransferError
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.buckets import Bucket, TensorSpan, tensors_in
from hybridrl.workers.rollout.stage_time import left_s, stage_time

MAX_LINE = 1 << 24
"""Bytes of a message: a name, and two numbers for each bucket."""

_GLOO: Any = dist.ProcessGroupGloo  # whose stub lacks most of it
_CANCEL_S = 5.0
_FREE_S = 30.0
"""Seconds for what a receiver does after it was freed: its call of a server may last longer."""
_ADVICE = " This is typically caused by"
"""In gloo's errors: begins a sentence that helps nobody here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOffer:
    """Weights that a sender has in memory, and the address where receivers ask for them."""

    host: str
    port: int
    """Where the sender listens."""

    key: str = field(repr=False)
    """Secret that a receiver must know."""

    generation: int
    """Number of the weights: the sender has newer ones under the same address later."""

    buckets: tuple[tuple[TensorSpan, ...], ...]
    """Tensors of each broadcast."""

    offsets: tuple[int, ...]
    """Position of each bucket in the sender's memory, in bytes."""

    group: str = ""
    """Name of one transfer, the same for all its receivers and never used again."""

    num_receivers: int = 0
    """Of that transfer."""

    def to_group(self, num_receivers: int) -> WeightOffer:
        """Return the offer for one transfer to so many receivers."""
        return replace(self, group=uuid.uuid4().hex, num_receivers=num_receivers)

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return frozenset(span.name for spans in self.buckets for span in spans)


@contextmanager
def receiving(offer: WeightOffer, *, timeout_s: float) -> Iterator[Iterator[Bucket]]:
    """Join the transfer, and yield its buckets; leave the group at the end, whatever happened.

    The next bucket travels while the caller has the last one: memory of two. A bucket is valid
    until the next is taken. Only after the last one is it known that all bytes are of the offer.

    Args:
        offer: with its group and the number of receivers.
        timeout_s: seconds for all together, the time of the caller included.

    Raises:
        TransferError: the sender or another receiver is gone, or did not answer in time.
    """
    with stage_time(timeout_s):
        with _naming(offer):
            group = TransferGroup(_join(offer, timeout_s), timeout_s=timeout_s)
        arriving = _receive(group, offer)
        try:
            yield arriving
        finally:
            arriving.close()
            group.leave()


@contextmanager
def _naming(offer: WeightOffer) -> Iterator[None]:
    """Raise errors of gloo, of sockets and of half a line as a TransferError."""
    try:
        yield
    except TransferError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).partition(_ADVICE)[0]
        raise TransferError(
            f"not all weights arrived from {offer.host}:{offer.port}: {reason}; a transfer "
            "may take rollout.stage_timeout_s"
        ) from error


def _receive(group: TransferGroup, offer: WeightOffer) -> Generator[Bucket, None, None]:
    sizes = [spans[-1].end for spans in offer.buckets]
    flats = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2)]
    generation = torch.empty(1, dtype=torch.int64)

    def begin(number: int) -> None:
        is_last = number == len(sizes)
        group.begin(generation if is_last else flats[number % 2][: sizes[number]])

    begin(0)
    for number, spans in enumerate(offer.buckets):
        with _naming(offer):
            group.finish()
            begin(number + 1)
        yield list(tensors_in(flats[number % 2], spans).items())
    with _naming(offer):
        group.finish()
    if int(generation) != offer.generation:
        raise TransferError(
            f"weights number {offer.generation} were overwritten by number {int(generation)} while "
            "they were sent; the next update sends the newest"
        )


def _join(offer: WeightOffer, timeout_s: float) -> Any:  # noqa: ANN401 - torch's
    """Report to the sender that this receiver is ready, and join when all are."""
    order = {
        "key": offer.key,
        "group": offer.group,
        "num_receivers": offer.num_receivers,
        "sizes": [spans[-1].end for spans in offer.buckets],
        "offsets": offer.offsets,
    }
    with socket.create_connection((offer.host, offer.port), left_s(timeout_s)) as connection:
        own_host = connection.getsockname()[0]
        connection.sendall(to_json_text(order).encode() + b"\n")
        line = connection.makefile("rb").readline(MAX_LINE)
    if not line:
        raise TransferError("the sender of the weights ended, or the transfer was given up")
    place = json.loads(line)
    store = dist.TCPStore(
        offer.host, place["port"], timeout=timedelta(seconds=left_s(timeout_s)), is_master=False
    )
    return make_group(
        store,
        name=offer.group,
        host=own_host,
        rank=place["rank"],
        size=1 + offer.num_receivers,
        timeout_s=left_s(timeout_s),
    )


def wait_for_receivers(
    offer: WeightOffer, receivers: Collection[Future[None]], *, timeout_s: float
) -> float:
    """Wait until all receivers of a transfer have ended, or one fails: that frees the others.

    Args:
        receivers: calls of ``receiving``, with this ``timeout_s``.

    Returns:
        Seconds in which those that are left end with a TransferError.
    """
    done, waiting = wait(receivers, timeout=timeout_s, return_when=FIRST_EXCEPTION)
    if waiting or any(future.exception() for future in done):
        _cancel(offer)
    return _FREE_S


def _cancel(offer: WeightOffer) -> None:
    """Let the sender give up this transfer: receivers that wait in it are freed."""
    try:
        with socket.create_connection((offer.host, offer.port), _CANCEL_S) as connection:
            order = {"key": offer.key, "group": offer.group, "num_receivers": 0}
            connection.sendall(to_json_text(order).encode() + b"\n")
    except OSError:  # it is gone, and has freed them so
        return


class TransferGroup:
    """A gloo group beside all others, in which rank 0 sends."""

    def __init__(self, members: Any, *, timeout_s: float) -> None:  # noqa: ANN401 - torch's
        """Own a group.

        Args:
            members: as ``make_group`` returns it.
            timeout_s: seconds that one broadcast may take, within those of the stage.
        """
        self._members: Any | None = members
        self._arriving: dist.Work | None = None
        self._timeout_s = timeout_s

    def begin(self, flat: Tensor) -> None:
        """Begin to send ``flat`` of rank 0 to all others."""
        if self._members is None:
            raise PhaseError("this end has left the group")
        options = dist.BroadcastOptions()
        options.timeout = timedelta(seconds=left_s(self._timeout_s))
        self._arriving = self._members.broadcast([flat], options)

    def finish(self) -> None:
        """Wait until it is there.

        Raises:
            RuntimeError: another end is gone, or was late.
        """
        if self._arriving is not None:
            self._arriving.wait()

    def leave(self) -> None:
        """Close the connections of this end, so that the sender notices at once. Idempotent."""
        self._members = self._arriving = None


def make_group(
    store: dist.Store, *, name: str, host: str, rank: int, size: int, timeout_s: float
) -> Any:  # noqa: ANN401 - torch's
    """Make a group beside all others, on the interface of an address. A collective call."""
    options = _GLOO._Options()
    options._devices = [_GLOO.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return _GLOO(dist.PrefixStore(name, store), rank, size, options)
