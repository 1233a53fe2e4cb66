"""The client of the rollout manager: it travels to the processes that call it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import DeadlineError, ServerDiedError
from hybridrl.metrics import Metrics
from hybridrl.network import rendezvous_address
from hybridrl.sampler import FinishedGroup, RequestParams, Sample, SamplingParams
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.sglang.broadcast import WeightGroup
from hybridrl.workers.sharding.control import attempt
from hybridrl.workers.sharding.weight_files import AdaptedWeights, Sent, WeightCopy, WeightSource

log = logging.getLogger(__name__)

Lent = Mapping[str, Sequence[str]]
"""Addresses of engines that ranks lend, in their order, by frozen model; by "" of the policy."""

NOBODY: Lent = {}

Answer = Sample | str
"""An answer of a frozen model, or why there is none."""


@dataclass(eq=False)
class ManagerClient:
    """The rollout manager, as the ranks and the driver call it.

    Methods raise ServerDiedError if the manager, or all engines, are gone, and DeadlineError if no
    answer comes in time.
    """

    manager: Any  # Ray's handle of the actor
    _: KW_ONLY
    timeout_s: float  # seconds that one call may take (``cluster.call_timeout_s``)
    weights: WeightRoute = "files"  # how they reach engines (``serving.weights``, if these can)
    weight_deltas: bool = False  # whether only changes follow the first (``serving.weight_deltas``)
    folder: Path | None = None  # of weights, removed at the end of the run; None: ``$TMPDIR``
    stage_timeout_s: float = 0.0  # of each bucket of a broadcast
    key: str = field(default="", repr=False)  # that engines of ranks require; empty: none is lent

    def __post_init__(self) -> None:
        self._group = WeightGroup(timeout_s=self.stage_timeout_s)
        self._sent = WeightCopy()

    @property
    def host(self) -> str:
        """Address at which all engines reach this process."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return rendezvous_address(ray.util.get_node_ip_address(), nodes)

    def start(self, *, timeout_s: float) -> None:
        """Start all engines; see ``RolloutManager.start``."""
        self._call("start", timeout_s=timeout_s)

    def shutdown(self, *, timeout_s: float) -> None:
        """End all engines, and the manager."""
        try:
            self._call("shutdown", timeout_s=timeout_s)
        except (ServerDiedError, DeadlineError) as error:
            log.warning("rollout servers did not end by themselves: %s", error)
        ray.kill(self.manager)

    def profile(self, stem: Path | None) -> None:
        """Let the engines of the policy profile themselves; see ``ProfilesItself``."""
        self._call("profile", stem)

    # -- weights ---------------------------------------------------------------------------------

    def need_weights(self, *, version: int) -> bool:
        """Return whether an engine of the policy does not serve with this version."""
        return bool(self._call("need_weights", version))

    def update(self, source: WeightSource, *, version: int) -> None:
        """Bring all engines of the policy to these weights; see ``RolloutServer.update``."""
        self._call("update", source, version)

    def update_adapter(self, base: Path, adapter: Bucket, *, version: int) -> None:
        """Bring all engines of the policy to this adapter; see ``update``."""
        sent = WeightCopy()
        sent.write(stage_by_reference(adapter), [])
        self._call("update", AdaptedWeights(base, sent), version)

    def begin_update(self, *, version: int, device: torch.device) -> None:
        """Stop all engines, and let their servers join, or StageError; ``device`` will send."""
        receivers = self._call("begin_update", version)
        self._sent = WeightCopy()
        try:
            self._group.join(receivers, device=device)
        except Exception as error:
            self.end_update(reason=str(error))
            raise

    def send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Send one bucket, staged by reference; EngineError if not all servers got it."""
        self._group.send(staged.tensors)
        # While it travels: engines that replace others within a phase need it on their node.
        self._sent.write(staged, handles)
        self._group.wait_until_sent()

    def end_update(self, *, reason: str = "") -> WeightCopy | None:
        """Let all engines serve the weights that were sent; ``reason`` says why not all were.

        Returns a copy of them, for as long as somebody has it.
        StageError names the engines that lack weights; always with a ``reason``.
        """
        if not reason:
            _, error = attempt(self._group.finish)
            reason = "" if error is None else str(error)
        copy = None if reason else self._sent
        self._sent = WeightCopy()  # else it would live as long as this client
        self._call("end_update", Sent(copy, reason, self._group.failures))
        return copy

    def leave(self) -> None:
        """End the group with the servers. Idempotent."""
        self._group.leave()

    # -- requests --------------------------------------------------------------------------------

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int, lent: Lent = NOBODY
    ) -> tuple[list[Sample], Metrics]:
        """Sample G responses to each of P prompts.

        Engines are ``lent`` by ranks: those of the policy for this call, and they serve this
        version; others until the next call, or as long as their rank lets them answer. Returns
        P * G samples in prompt order, those to the same prompt adjacent; and metrics.
        """
        answer: tuple[list[Sample], Metrics] = self._call(
            "sample", prompts, sampling, version, lent
        )
        return answer

    def lost_engines(self) -> Mapping[str, Collection[int]]:
        """Return, by model, which of the engines that were lent to the last call did not work."""
        lost: Mapping[str, Collection[int]] = self._call("lost_engines")
        return lost

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> tuple[Answered, Metrics]:
        """Admit prompts, and wait for P of all that were, with P * G samples; and metrics."""
        answer: tuple[Answered, Metrics] = self._call("exchange", prompts, sampling, version)
        return answer

    def begin_evaluation(self, tasks: Sequence[tuple[PromptBatch, SamplingParams]]) -> None:
        """Let the next exchange begin to sample these prompts, with the weights that it sends."""
        self._call("begin_evaluation", list(tasks))

    def end_evaluation(self) -> list[RolloutBatch]:
        """Wait for the responses to each task; before the next exchange, which has other weights.

        P * G rows of a task, in prompt order, those to the same prompt adjacent.
        """
        rollouts: list[RolloutBatch] = self._call("end_evaluation")
        return rollouts

    def finished_groups(self) -> dict[int, FinishedGroup]:
        """Return the groups that wait for a step, by prompt; for a checkpoint."""
        groups: dict[int, FinishedGroup] = self._call("finished_groups")
        return groups

    def keep_groups(self, groups: Mapping[int, FinishedGroup]) -> None:
        """Give groups of a checkpoint back: prompts of the next exchange need no other samples."""
        self._call("keep_groups", groups)

    def ask(
        self, model: str, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Answer]:
        """Answer contexts with a frozen model; see ``FrozenModel.ask``."""
        answers: list[Answer] = self._call("ask", model, list(contexts), params, timeout_s)
        return answers

    def _call(self, name: str, *args: object, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - each call's own
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(getattr(self.manager, name).remote(*args), timeout=limit_s)
        except GetTimeoutError as error:
            key = "cluster.call_timeout_s=" if timeout_s is None else ""
            raise DeadlineError(
                f"{name}: the rollout manager did not answer within {key}{limit_s:g} s"
            ) from error
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            raise ServerDiedError(f"{name}: the rollout manager is gone: {error}") from error
