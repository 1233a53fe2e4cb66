"""Weights from the rank that gathers them into servers: one process group with the ranks of all.

This process is rank 0. Each bucket is described to the servers over HTTP, and broadcast tensor by
tensor out of the memory in which it was gathered: NCCL from GPUs, gloo from CPUs. A group never
outlives a failure, and no name is used twice.
"""

from __future__ import annotations

import gc
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.network import LOOPBACK, bind
from hybridrl.workers.rollout.buckets import Bucket
from hybridrl.workers.rollout.protocol import Receiver, left_s
from hybridrl.workers.rollout.sglang.client import Body, ControlClient, RefusedError

_POLL_S = 0.0005
_ANYWHERE = "0.0.0.0"
_FREED_SHARE, _FREED_S = 0.2, 10.0
"""Seconds in which a server that was freed answers: a share of the stage, and at most so many."""

_GLOO: Any = dist.ProcessGroupGloo  # whose stub lacks most of it


class WeightGroup:
    """A group with the servers of the last update; one that was started since needs another."""

    def __init__(self, *, timeout_s: float) -> None:
        """Have no member yet; in ``timeout_s`` seconds the group forms, or a bucket is sent."""
        self.failures: dict[int, str] = {}
        """Servers by whose fault the last transfer broke off, with reasons."""
        self._timeout_s = timeout_s
        self._device = torch.device("cpu")
        self._freed_s = min(_FREED_S, _FREED_SHARE * timeout_s)
        self._name = ""
        self._receivers: Mapping[int, Receiver] = {}
        self._clients: dict[int, ControlClient] = {}
        self._group: Any = None
        self._store: Any = None
        self._ranks: dict[int, range] = {}
        self._began_s = 0.0
        self._works: list[dist.Work] = []
        self._answers: dict[int, Future[Any]] = {}

    def join(self, receivers: Mapping[int, Receiver], *, device: torch.device) -> None:
        """Form a group with these servers, or keep it; after an EngineError see ``failures``."""
        self.failures = {}
        if self._receivers == receivers:
            return
        self.leave()
        if not receivers:
            return
        self._device, self._began_s = device, time.monotonic()
        self._name = f"hybridrl-{uuid.uuid4().hex}"
        own = {index: _address_towards(each.url) for index, each in receivers.items()}
        host = own[min(own)] if len(set(own.values())) == 1 else _ANYWHERE
        size = 1 + sum(each.num_ranks for each in receivers.values())
        listening = bind(host)
        listening.listen(size)
        port, first_rank = listening.getsockname()[1], 1
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listening.detach(),  # the store closes it
        )
        for index, receiver in receivers.items():
            name = f"SGLang at {receiver.url}"
            self._clients[index] = ControlClient(receiver.url, name=name, key=receiver.key)
            self._ask(
                index,
                "/init_weights_update_group",
                master_address=own[index],
                master_port=port,
                rank_offset=first_rank,
                world_size=size,
                backend="nccl" if self._device.type == "cuda" else "gloo",
            )
            self._ranks[index] = range(first_rank, first_rank + receiver.num_ranks)
            first_rank += receiver.num_ranks
        self._form(host, size)
        self._await(self._have_answered)
        self._receivers = receivers

    def send(self, bucket: Bucket) -> None:
        """Begin to send a bucket, as soon as all servers have loaded the last one."""
        self.finish()
        tensors = [(n, t.detach().to(self._device).contiguous()) for n, t in bucket]
        for index in self._clients:
            self._ask(
                index,
                "/update_weights_from_distributed",
                names=[name for name, _ in tensors],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                shapes=[list(tensor.shape) for _, tensor in tensors],
                flush_cache=False,
            )
        if self._group is not None:
            self._works = [self._group.broadcast([t], dist.BroadcastOptions()) for _, t in tensors]

    def wait_until_sent(self) -> None:
        """Wait until the bucket has left its memory; after an EngineError see ``failures``."""
        self._await(lambda: all(work.is_completed() for work in self._works))
        reasons = {_error_of(work) for work in self._works} - {None}
        self._works = []
        if reasons:
            self._break_off(str(reasons.pop()))

    def finish(self) -> None:
        """Wait until all servers have loaded what was sent. Fails as ``wait_until_sent``."""
        self._await(self._have_answered)
        self._answers = {}

    def leave(self) -> None:
        """End the group, so that servers that live on keep nothing of it. Idempotent."""
        self._destroy_at(self._clients)
        self._drop()
        for client in self._clients.values():
            client.close()
        self._receivers, self._clients, self._answers = {}, {}, {}

    def _ask(self, index: int, path: str, **body: object) -> None:
        """Begin a call, whose answer may come when a failure has freed the server."""
        timeout_s = left_s(self._timeout_s) + 2 * self._freed_s
        self._answers[index] = self._call(index, path, body, timeout_s)

    def _call(self, index: int, path: str, body: Body, timeout_s: float) -> Future[Any]:
        client, body = self._clients[index], {"group_name": self._name, **body}
        return client.start(client.succeed(path, body, timeout_s=timeout_s))

    def _have_come(self, size: int) -> bool:
        """Whether gloo's ends have written their addresses."""
        return bool(self._store.check([f"0/{rank}" for rank in range(1, size)]))

    def _have_answered(self) -> bool:
        return all(answer.done() for answer in self._answers.values())

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Wait for ``is_done``; a server that refuses or dies meanwhile will not come to it."""
        deadline = time.monotonic() + left_s(self._timeout_s)
        while True:
            has_ended = is_done()
            for index, answer in self._answers.items():
                if answer.done() and (error := answer.exception()) is not None:
                    self._break_off(f"engine {index}: {error}")
            if has_ended:
                return
            if time.monotonic() > deadline:
                self._break_off(f"it took over {self._timeout_s:g} s (rollout.stage_timeout_s)")
            time.sleep(_POLL_S)

    def _break_off(self, reason: str) -> None:
        """Free all servers, and raise; at fault are those still silent, else those that refused."""
        refused = {i: e for i, e in _errors_of(self._answers).items() if e is not None}
        self._wait_for_arrivals()
        self._destroy_at(refused)  # who refused takes no part, so nothing else ends the sending
        self._drop()
        wait(self._answers.values(), timeout=self._freed_s)
        errors = _errors_of(self._answers)
        silent = {
            i: e or DeadlineError("it did not answer, and does not since it was freed")
            for i, e in errors.items()
            if not self._answers[i].done() or not isinstance(e, RefusedError | None)
        }
        faults = silent or refused
        self.failures = {i: f"{type(e).__name__}: {e}" for i, e in faults.items()}
        for index in silent:
            self._clients.pop(index).close()
        self.leave()
        raise EngineError(f"weights did not reach all servers: {reason}")

    def _wait_for_arrivals(self) -> None:
        """Let servers reach the store, whose end frees them: later ones would wait for minutes."""
        deadline_s = self._began_s + self._timeout_s + self._freed_s
        while self._group is None and time.monotonic() < deadline_s:
            ranks = [
                rank
                for index, answer in self._answers.items()
                for rank in self._ranks[index]
                if not answer.done()
            ]
            if not ranks or self._store.check([f"0/{rank}" for rank in ranks]):
                return
            time.sleep(_POLL_S)

    def _destroy_at(self, indices: Collection[int]) -> None:
        path = "/destroy_weights_update_group"
        calls = [self._call(index, path, {}, self._freed_s) for index in indices]
        wait(calls, timeout=self._freed_s)
        for call in calls:
            call.cancel()

    def _form(self, host: str, size: int) -> None:
        """Make this end of the group beside all others of the process, and known to none of them.

        Torch's own functions would keep a reference, and split the communicator of a default group
        that is bound to a GPU: on this rank alone, so for good (``_new_process_group_helper``).
        """
        timeout = timedelta(seconds=self._timeout_s)
        is_cuda = self._device.type == "cuda"
        # As the servers nest them: init_custom_process_group, then two prefixes of torch. No
        # variable may refer to a store or a group here, which would keep servers waiting.
        for prefix in (self._name, f"{self._name}/", f"{self._device.type}/"):
            self._store = dist.PrefixStore(prefix, self._store)
        # A server that waits in the store is freed when that goes, so not before all are there is
        # it handed to gloo, which would keep it. NCCL connects in the first broadcast.
        self._await(self._have_answered if is_cuda else partial(self._have_come, size))
        try:
            if is_cuda:
                nccl: Any = dist.ProcessGroupNCCL
                options = nccl.Options()
                # Past it NCCL's watchdog ends this process: ours is the shorter wait.
                options._timeout = 3 * timeout
                self._group = nccl(self._store, 0, size, options)
            else:
                options = _GLOO._Options()
                options._timeout = timeout
                options._devices = [
                    _GLOO.create_default_device()
                    if host == _ANYWHERE
                    else _GLOO.create_device(hostname=host)
                ]
                self._group = _GLOO(self._store, 0, size, options)
        except RuntimeError as error:
            self._break_off(f"no group was formed: {error}")

    def _drop(self) -> None:
        """Drop every reference to the group and its store: that closes this end's connections.

        A group with pending operations is waited for: its end would hold up all threads.
        """
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        while not all(work.is_completed() for work in self._works):
            time.sleep(_POLL_S)
        self._works = []
        self._group = self._store = None
        gc.collect()


def _errors_of(answers: Mapping[int, Future[Any]]) -> dict[int, BaseException | None]:
    return {index: each.exception() if each.done() else None for index, each in answers.items()}


def _error_of(work: dist.Work) -> str | None:
    """Return why an operation failed, without the error: its frames would keep the group."""
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return None


def _address_towards(url: str) -> str:
    """Return the address of this machine on the way to a server; sends nothing."""
    parts = urlsplit(url)
    try:
        family, kind, *_, place = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
