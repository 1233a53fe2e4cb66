"""Served models that keep their weights, as a judge: on engines here, or on servers elsewhere.

Routes of servers elsewhere: ``/server_info``, ``/model_info``, ``/generate``, ``/v1/loads``,
``/weights_checker`` for checksums, and ``/abort_request`` of the run's own requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    ExternalServersError,
    RequestError,
    first_of,
)
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.sampler import RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle, Launch, answered
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.plan import ModelPlan, PlannedDevices, plan_own_engines
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.rollout.sglang.client import ControlClient, checksums_of
from hybridrl.workers.rollout.sglang.elsewhere import (
    BROKEN,
    Expectations,
    Questions,
    differences,
    expect_server,
    other_form,
)
from hybridrl.workers.rollout.sglang.sampling import HttpSampler
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.manager_client import Answer
from hybridrl.workers.sharding.publishing import update_with_tries
from hybridrl.workers.sharding.weight_files import FROZEN_VERSION


class FrozenModel:
    """The server of one frozen model, and engines of it that ranks lend."""

    def __init__(
        self, config: ExperimentConfig, plan: ModelPlan, launch: Launch, *, key: str
    ) -> None:
        """Start nothing yet; engines of ranks require ``key``."""
        self._name = plan.model
        self._config = config
        self._max_context_tokens = max_context_tokens(config, plan.model)
        self._folder = Path(str(config.serving.models[plan.model].path))
        self._vocab_size = read_architecture(self._folder).vocab_size
        self._server = RolloutServer(plan, launch, config=config.rollout)
        self.recovery = Recovery(
            self._server, health_timeout_s=config.serving.health_timeout_s, key=key
        )

    def start(self) -> None:
        """Start all engines, with the weights of the folder."""
        self._server.start()
        update_with_tries(partial(self._server.update, self._folder, version=FROZEN_VERSION))

    def ask(
        self, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Answer]:
        """Answer each context, int64 [n], once; all within ``timeout_s`` (``reward.timeout_s``).

        Own engines that are lost meanwhile or before are replaced. A DriftError if an engine has
        other weights than before.
        """
        with self.asked() as pool:
            return asyncio.run(self._answer_all(pool, contexts, params, timeout_s))

    @contextmanager
    def asked(self) -> Iterator[EnginePool]:
        """Yield the sampler over all engines, for one event loop; at any time there is one."""
        pool = self._server.pool(
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
            version=FROZEN_VERSION,
        )
        with self.recovery.filling(pool), self.recovery.monitor.watching():
            yield pool

    async def _answer_all(
        self, pool: EnginePool, contexts: Sequence[Tensor], params: RequestParams, timeout_s: float
    ) -> list[Answer]:
        async def answer(context: Tensor) -> Answer:
            try:
                return await pool.sample(context, params, key=_key_of(context, self._config.seed))
            except DriftError:
                raise
            except RequestError as error:
                return f"{self._name} refused the request: {error}"
            except EngineError as error:
                return f"{self._name}: {error}"

        tasks = [asyncio.create_task(answer(each)) for each in contexts]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            raise errors[0]
        late = f"{self._name} did not answer within reward.timeout_s={timeout_s:g} s"
        return [task.result() if task.done() else late for task in tasks]

    def shutdown(self) -> None:
        """End all engines."""
        self.recovery.lend(())
        self._server.shutdown()


def _key_of(context: Tensor, seed: int) -> int:
    """Return the random stream of an answer: that of the run's seed and the context alone."""
    digest = hashlib.sha256(f"{seed} {context.tolist()}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


log = logging.getLogger(__name__)

_WAIT_S = 1.0
"""Before a lost server is compared again: it may be about to start."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """API keys of rollout servers, for the manager. Never shown, logged or written."""

    own: str = field(default="", repr=False)
    """Of the router, of its servers, and of the engines of the ranks; made for the run."""

    by_model: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of servers that run elsewhere, by the name of their model; empty if they require none."""

    @classmethod
    def read(cls, config: ExperimentConfig, *, own: str) -> ApiKeys:
        """Read those of servers elsewhere from the environment of this process."""
        external = config.serving.external
        by_model = {name: env.get(model.key_variable or "") for name, model in external.items()}
        return cls(own, by_model)


class ExternalModel(FrozenModel):
    """The servers of one frozen model. A lost one gets no requests until it answers again."""

    def __init__(self, config: ExperimentConfig, model: str, *, keys: ApiKeys) -> None:
        """Ask nothing yet; see ``expect_server``."""
        self._expected = expect_server(config, model)
        self._keys = keys
        self._weight_versions: dict[str, str] = {}
        """Of each server at its first comparison."""
        self._handles: dict[str, ExternalHandle] = {}
        """The newest of each server."""
        (plan,) = (each for each in plan_own_engines(config) if each.model == model)
        super().__init__(config, plan, self._connect, key="")

    def _connect(self, engine: PlannedDevices) -> ExternalHandle:
        handle = self._handles[engine.url] = ExternalHandle(
            engine.url,
            expected=self._expected,
            config=self._config.rollout,
            key=self._keys.by_model[self._name],
            weight_versions=self._weight_versions,
        )
        return handle

    def start(self) -> None:
        """Compare all servers at once; an ExternalServersError names all differences of all."""
        try:
            super().start()
        except StageError as error:
            prefix = f"{ExternalServersError.__name__}: "
            raise self._unusable(
                [reason.removeprefix(prefix) for _, reason in sorted(error.failures.items())]
            ) from error
        if self._config.rollout.verify_weights == "always":
            self._require_equal_weights()
        urls = list(self._handles)
        log.info("servers elsewhere answer as needed: model=%s urls=%s", self._name, urls)

    def _require_equal_weights(self) -> None:
        futures = {url: handle.checksums() for url, handle in self._handles.items()}
        wait(futures.values())
        errors = [future.exception() for future in futures.values()]
        if reasons := [str(error) for error in errors if error is not None]:
            raise self._unusable(reasons)
        (first_url, first), *others = ((url, future.result()) for url, future in futures.items())
        lines = []
        for url, sums in others:
            names = sorted(n for n in first.keys() | sums.keys() if first.get(n) != sums.get(n))
            if names:
                lines.append(
                    f"{url}: {len(names)} of its tensors are not those of {first_url}: "
                    f"{first_of(names)}; start both with the same model and tensor-parallel size"
                )
        if lines:
            raise self._unusable(lines)

    def _unusable(self, reasons: Sequence[str]) -> ExternalServersError:
        return ExternalServersError(
            f"{len(reasons)} of {len(self._handles)} servers of {self._expected.key}.urls cannot "
            "be used:\n" + "\n".join(reasons)
        )


class ExternalHandle(EngineHandle):
    """A server of SGLang that others run; it is asked, and never started, changed or ended."""

    def __init__(
        self,
        url: str,
        *,
        expected: Expectations,
        config: RolloutConfig,
        key: str,
        weight_versions: dict[str, str],
    ) -> None:
        """Connect when first used; ``weight_versions`` are of servers compared before, by URL."""
        self._url = url.rstrip("/")
        self._expected = expected
        self._config = config
        self._weight_versions = weight_versions
        self._client = ControlClient(self._url, name=f"SGLang at {self._url}", key=key)
        self._questions = Questions(self._client, expected, config.stage_timeout_s)
        self._sampler: HttpSampler | None = None
        self._has_ended = False

    def build(self) -> Future[None]:
        """Compare the server; the future may hold an ExternalServersError, a line a difference."""
        return self._client.start(self._compare())

    def checksums(self) -> Future[dict[str, str]]:
        """Have the server compute checksums of its weights, by rank and its names of tensors."""
        return self._client.start(self._checksums())

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        """Sample several continuations of one context; see ``Sampler``."""
        return self._client.start(self._sample(request))

    def probe(self) -> Future[object]:
        """Return another moment: each request sees for itself that the server gets on."""
        return answered(time.monotonic())

    def end(self) -> None:
        """Close the connections; the server runs on. Idempotent."""
        with suppress(EngineError):  # it was ended before
            self._client.run(self._end())
        self._client.close()

    # -- on the client's loop --------------------------------------------------------------------

    async def _checksums(self) -> dict[str, str]:
        try:
            answer = await self._client.request(
                "/weights_checker", {"action": "checksum"}, timeout_s=self._config.stage_timeout_s
            )
            sums = checksums_of(answer)
            return {f"rank {rank}: {name}": value for (rank, name), value in sums.items()}
        except (EngineError, DeadlineError, *BROKEN) as error:
            raise ExternalServersError(
                f"{self._url}: it gives no checksums of its weights ({type(error).__name__}: "
                f"{error}): set rollout.verify_weights=first, which asks for none"
            ) from error

    async def _end(self) -> None:
        """Give up all that is asked, and close the connections."""
        self._has_ended = True
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._sampler is not None:
            await self._sampler.__aexit__()
            self._sampler = None

    async def _compare(self) -> None:
        if self._url in self._weight_versions:
            await asyncio.sleep(_WAIT_S)
        limit_s = self._config.stage_timeout_s
        comparison = asyncio.ensure_future(self._differences())
        # No wait_for: a request whose own limit ends just then would take the cancellation for it.
        await asyncio.wait({comparison}, timeout=limit_s)
        if comparison.done():
            lines = comparison.result()
        else:
            comparison.cancel()
            lines = [f"it gave no token within rollout.stage_timeout_s={limit_s:g} s"]
        if lines:
            raise ExternalServersError("\n".join(f"{self._url}: {line}" for line in lines))

    async def _differences(self) -> list[str]:
        try:
            server_info, model_info = await self._questions.facts()
        except (EngineError, DeadlineError) as error:
            return [self._questions.advice(error)]
        lines = differences(self._expected, server_info, model_info)
        version = str(model_info.get("weight_version"))
        known = self._weight_versions.setdefault(self._url, version)
        if version != known:
            lines.append(
                f"weight_version={version}, was {known}: somebody else updates this server"
            )
        return lines or await self._questions.unlike_in_use(version)

    async def _sample(self, request: SampleRequest) -> list[Sample]:
        if self._sampler is None:
            self._sampler = self._questions.sampler(
                self._weight_versions[self._url], timeout_s=self._config.request_timeout_s
            )
            await self._sampler.__aenter__()
        try:
            return await self._sampler.answer(request)
        except BROKEN as error:
            raise EngineError(other_form(self._url, error)) from error
        except asyncio.CancelledError as error:
            if self._has_ended:
                raise EngineError(f"{self._url}: the connections to it were closed") from error
            raise
