"""The client of the rollout manager: it travels to the processes that call its servers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import DeadlineError, ServerDiedError
from hybridrl.metrics import Metrics
from hybridrl.network import rendezvous_address
from hybridrl.sampler import RequestParams, Sample, SamplingParams
from hybridrl.serving.answers import Answer
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.sharding.served_engines import Servers
from hybridrl.workers.sharding.weight_files import WeightSource

log = logging.getLogger(__name__)


class ManagedServers(Servers):
    """The manager, as the ranks and the driver call it. Travels to other processes."""

    def __init__(
        self,
        manager: Any,  # noqa: ANN401 - Ray's
        *,
        timeout_s: float,
        weights: WeightRoute = "files",
        key: str = "",
    ) -> None:
        self._manager = manager
        self.timeout_s = timeout_s
        self.weights = weights
        self.key = key

    @property
    def host(self) -> str:
        """See ``Servers``."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return rendezvous_address(ray.util.get_node_ip_address(), nodes)

    def need_weights(self, *, version: int) -> bool:
        """See ``Servers``."""
        return bool(self._call("need_weights", self._manager.need_weights, version))

    def update(self, source: WeightSource, *, version: int) -> None:
        """See ``Servers``."""
        self._call("update", self._manager.update, source, version)

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        fused: Sequence[str] = (),
    ) -> tuple[list[Sample], Metrics]:
        """See ``Servers``."""
        answer: tuple[list[Sample], Metrics] = self._call(
            "sample", self._manager.sample, prompts, sampling, version, list(fused)
        )
        return answer

    def lost_engines(self) -> Collection[int]:
        """See ``Servers``."""
        lost: Collection[int] = self._call("lost_engines", self._manager.lost_engines)
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
