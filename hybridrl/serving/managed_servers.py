"""The client of the rollout manager: it travels to the processes that call its servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import DeadlineError, ServerDiedError
from hybridrl.metrics import Metrics
from hybridrl.network import rendezvous_address
from hybridrl.sampler import RequestParams, Sample, SamplingParams
from hybridrl.serving.frozen import Answer
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket
from hybridrl.workers.rollout.sglang.broadcast import WeightGroup
from hybridrl.workers.sharding.control import attempt
from hybridrl.workers.sharding.publishing import NOBODY, Lent, Servers
from hybridrl.workers.sharding.weight_files import Sent, WeightCopy

log = logging.getLogger(__name__)


class ManagedServers(Servers):
    """The manager, as the ranks and the driver call it. Travels to other processes."""

    def __init__(
        self,
        manager: Any,  # noqa: ANN401 - Ray's
        *,
        timeout_s: float,
        weights: WeightRoute = "files",
        folder: Path | None = None,
        stage_timeout_s: float = 0.0,
        key: str = "",
    ) -> None:
        """Call a manager.

        Args:
            stage_timeout_s: seconds for a bucket of a broadcast.
        """
        self._manager = manager
        self.timeout_s = timeout_s
        self.weights = weights
        self.folder = folder
        self._group = WeightGroup(timeout_s=stage_timeout_s)
        self._names: list[str] = []
        self._copies: list[Callable[[], Bucket]] = []
        self.key = key

    @property
    def host(self) -> str:
        """See ``Servers``."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return rendezvous_address(ray.util.get_node_ip_address(), nodes)

    def need_weights(self, *, version: int) -> bool:
        """See ``Servers``."""
        return bool(self._call("need_weights", self._manager.need_weights, version))

    def update(self, source: Path, *, version: int) -> None:
        """See ``Servers``."""
        self._call("update", self._manager.update, source, version)

    def begin_update(self, *, version: int, device: torch.device) -> None:
        """See ``Servers``."""
        receivers = self._call("begin_update", self._manager.begin_update, version)
        self._names, self._copies = [], []
        try:
            self._group.join(receivers, device=device)
        except Exception as error:
            self.end_update(reason=str(error))
            raise

    def send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """See ``Servers``."""
        self._group.send(staged.tensors)
        # While it travels: engines that replace others within a phase need it on their node.
        on_host = [(name, tensor.detach().cpu()) for name, tensor in staged.tensors]
        self._names += [name for name, _ in on_host]
        self._copies.append(partial(ray.get, ray.put(on_host)))
        self._group.wait_until_sent()

    def end_update(self, *, reason: str = "") -> None:
        """See ``Servers``."""
        if not reason:
            _, error = attempt(self._group.finish)
            reason = "" if error is None else str(error)
        copy = None if reason else WeightCopy(frozenset(self._names), tuple(self._copies))
        self._names, self._copies = [], []  # they live as long as the manager has them
        self._call("end_update", self._manager.end_update, Sent(copy, reason, self._group.failures))

    def leave(self) -> None:
        """See ``Servers``."""
        self._group.leave()

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        lent: Lent = NOBODY,
    ) -> tuple[list[Sample], Metrics]:
        """See ``Servers``."""
        answer: tuple[list[Sample], Metrics] = self._call(
            "sample", self._manager.sample, prompts, sampling, version, lent
        )
        return answer

    def lost_engines(self) -> Mapping[str, Collection[int]]:
        """See ``Servers``."""
        lost: Mapping[str, Collection[int]] = self._call("lost_engines", self._manager.lost_engines)
        return lost

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> tuple[Answered, Metrics]:
        """See ``Servers``."""
        answer: tuple[Answered, Metrics] = self._call(
            "exchange", self._manager.exchange, prompts, sampling, version
        )
        return answer

    def ask(
        self,
        model: str,
        contexts: Sequence[Tensor],
        params: RequestParams,
        *,
        timeout_s: float,
    ) -> list[Answer]:
        """Answer contexts with a frozen model; see ``FrozenModel.ask``."""
        answers: list[Answer] = self._call(
            "ask", self._manager.ask, model, list(contexts), params, timeout_s
        )
        return answers

    def start(self) -> None:
        """Start all engines; see ``RolloutManager.start``."""
        self._call("start", self._manager.start)

    def shutdown(self) -> None:
        """End all engines, and the manager."""
        try:
            self._call("shutdown", self._manager.shutdown)
        except (ServerDiedError, DeadlineError) as error:
            log.warning("rollout servers did not end by themselves: %s", error)
        ray.kill(self._manager)

    def _call(self, name: str, method: Any, *args: object) -> Any:  # noqa: ANN401 - Ray's
        try:
            return ray.get(method.remote(*args), timeout=self.timeout_s)
        except GetTimeoutError as error:
            raise DeadlineError(
                f"{name}: the rollout manager did not answer within cluster.call_timeout_s="
                f"{self.timeout_s:g} s"
            ) from error
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            raise ServerDiedError(f"{name}: the rollout manager is gone: {error}") from error
