"""Weights through a process group of one sender and the ranks of a server that others run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.network import host_and_port
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.sglang.process import free_port
from hybridrl.workers.rollout.sglang.server_calls import ServerCalls
from hybridrl.workers.rollout.sglang.transports import Transport, on_the_host

_POLL_S = 0.0005
_BACKEND = "gloo"


JoinGroup = Callable[..., dist.ProcessGroup]
"""Makes a process group beside the default one, as the server does at its end."""


class BroadcastTransport(Transport):
    """One broadcast a bucket over gloo, out of host memory: the sender has no device."""

    def __init__(self, *, timeout_s: float, join: JoinGroup, dtype: torch.dtype) -> None:
        """Connect when first used.

        Args:
            timeout_s: seconds that one broadcast may take.
        """
        super().__init__(stages_bytes=True, allocate=on_the_host, dtype=dtype)
        self._timeout_s = timeout_s
        self._join = join
        self._name = ""
        self._group: dist.ProcessGroup | None = None

    def load(self, server: ServerCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Broadcast a bucket while the server gets its description.

        A server that refuses does not take part, so its answer is watched from the beginning. After
        any refusal the group is left: a half-sent bucket in it would be taken for the next one.
        """
        if staged.flat is None:
            return
        group = self._group or self._connect(server)
        answer = server.start(
            "/update_weights_from_distributed",
            names=[span.name for span in staged.spans],
            dtypes=[str(span.dtype).removeprefix("torch.") for span in staged.spans],
            shapes=[list(span.shape) for span in staged.spans],
            group_name=self._name,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        work = dist.broadcast(staged.flat, src=0, group=group, async_op=True)
        while not (answer.done() or work.is_completed()):
            time.sleep(_POLL_S)
        try:
            answer.result()
            _wait(work)
        except (EngineError, DeadlineError) as error:
            self._leave(server, work, asks=not isinstance(error, DeadlineError))
            raise

    def leave(self, server: ServerCalls) -> None:
        """End the group, so that the server keeps nothing of it."""
        if self._group is not None:
            self._destroy_at(server)
            self.forget()

    def forget(self) -> None:
        """Drop the group; the server is gone or about to end."""
        self.release_buffers()
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def _connect(self, server: ServerCalls) -> dist.ProcessGroup:
        self._name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        address, port, world_size = server.own_address, free_port(), 1 + server.num_ranks
        answer = server.start(
            "/init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=self._name,
            backend=_BACKEND,
        )
        try:
            group = self._join(
                backend=_BACKEND,
                init_method=f"tcp://{host_and_port(address, port)}",
                timeout=timedelta(seconds=self._timeout_s),
                world_size=world_size,
                rank=0,
                group_name=self._name,
            )
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"no {_BACKEND} group with the {server.num_ranks} ranks of the server: "
                f"{_said(answer) or error}"
            ) from error
        answer.result()
        self._group = group
        return group

    def _leave(self, server: ServerCalls, work: dist.Work, *, asks: bool) -> None:
        """End both ends of the group, and the pending operations of this end with the server's."""
        if asks:
            self._destroy_at(server)
        with suppress(EngineError):
            _wait(work)
        self.forget()

    def _destroy_at(self, server: ServerCalls) -> None:
        with suppress(EngineError, DeadlineError):  # gone, and its sockets with it
            server.require_success("/destroy_weights_update_group", group_name=self._name)


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise EngineError(f"the broadcast of a bucket of weights broke off: {error}") from error


def _said(answer: Future[Any]) -> str:
    error = answer.exception() if answer.done() else None
    return "" if error is None else str(error)
