"""A server of SGLang that runs elsewhere, as an engine: it is asked, never started and never ended.

Routes: ``/server_info``, ``/model_info``, ``/generate``, ``/v1/loads``, ``/weights_checker`` for
checksums, and ``/abort_request`` of its own requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import DeadlineError, EngineError, ExternalEngineError, PhaseError
from hybridrl.metrics import Metrics
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import answered
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sglang.answers import ServedModel
from hybridrl.workers.rollout.sglang.client import ControlClient, assume_alive
from hybridrl.workers.rollout.sglang.comparison import (
    BROKEN,
    Expectations,
    Questions,
    differences,
    other_form,
)
from hybridrl.workers.rollout.sglang.sampling import HttpSampler
from hybridrl.workers.sharding.lifecycle import Action

VERSION = 0
"""Of weights that never change."""


class ExternalEngine:
    """An ``EngineHandle`` for requests alone: its owner starts and ends the server."""

    def __init__(
        self, url: str, *, expected: Expectations, config: RolloutConfig, key: str
    ) -> None:
        """Connect when first used.

        Args:
            url: as ``http://HOST:PORT``.
            key: that the server requires; empty: it requires none.
        """
        self.url = url.rstrip("/")
        self._expected = expected
        self._config = config
        self._client = ControlClient(
            self.url, name=f"SGLang at {self.url}", require_alive=assume_alive, key=key
        )
        self._questions = Questions(
            self._client, expected, has_key=bool(key), timeout_s=config.stage_timeout_s
        )
        self._sampler: HttpSampler | None = None
        self._weight_version: str | None = None

    def build(self) -> Future[None]:
        """Compare the server with what is needed; again after a loss of the connection.

        The future holds an ExternalEngineError with all differences, a line each.
        """
        return self._client.start(self._compare())

    def checksums(self) -> Future[dict[str, str]]:
        """Have the server compute checksums of its weights; changes nothing.

        Returns:
            By rank and the server's own name of a tensor.
        """
        return self._client.start(self._checksums())

    def address(self) -> Future[str | None]:
        """Return the URL."""
        return answered(self.url)

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Sample several continuations of one context; see ``Sampler``."""
        return self._client.start(self._sample(token_ids, params, keys))

    def interrupt(self) -> NoReturn:
        """Refuse."""
        self._refuse("an interrupt")

    def take_metrics(self) -> Future[Metrics]:
        """Return nothing: others ask the server, too."""
        return answered({})

    def probe(self) -> Future[object]:
        """Return the load that the server's scheduler wrote last."""
        return self._client.start(self._client.loads())

    def is_alive(self) -> bool:
        """Assume so: its process is another machine's, as far as is known."""
        return True

    def end(self) -> None:
        """Close the connections; the server runs on. Idempotent."""
        with suppress(EngineError):  # it was ended before
            self._client.run(self._end())
        self._client.close()

    def act(self, action: Action) -> NoReturn:
        """Refuse."""
        self._refuse("an edge of the life cycle")

    def signal(self, number: int) -> NoReturn:
        """Refuse."""
        self._refuse("a signal")

    def cut(self) -> NoReturn:
        """Refuse."""
        self._refuse("a fault on purpose")

    def _refuse(self, what: str) -> NoReturn:
        raise PhaseError(f"{what} was meant for {self.url}, which others run")

    # -- on the client's loop --------------------------------------------------------------------

    async def _checksums(self) -> dict[str, str]:
        try:
            answer = await self._client.request(
                "/weights_checker", {"action": "checksum"}, timeout_s=self._config.stage_timeout_s
            )
            return {
                f"rank {rank}: {name}": str(value)
                for rank, sums in enumerate(answer["ranks"])
                for name, value in sums["checksums"].items()
            }
        except (EngineError, DeadlineError, *BROKEN) as error:
            raise ExternalEngineError(
                f"{self.url}: it gives no checksums of its weights ({type(error).__name__}: "
                f"{error}): set rollout.verify_weights=first, which asks for none"
            ) from error

    async def _end(self) -> None:
        """Give up all that is asked, and close the connections."""
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._sampler is not None:
            await self._sampler.__aexit__()
            self._sampler = None

    async def _compare(self) -> None:
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
            raise ExternalEngineError("\n".join(f"{self.url}: {line}" for line in lines))

    async def _differences(self) -> list[str]:
        try:
            server_info, model_info = await self._questions.facts()
        except (EngineError, DeadlineError) as error:
            return [self._questions.advice(error)]
        lines = differences(self._expected, server_info, model_info)
        if isinstance(model_info, dict):
            lines += self._changed_version(str(model_info.get("weight_version")))
        if lines:
            return lines
        return await self._questions.unlike_in_use(model_info)

    def _changed_version(self, version: str) -> list[str]:
        """Note the weights at the first comparison, and compare with them later."""
        known, self._weight_version = self._weight_version, self._weight_version or version
        if known in (None, version):
            return []
        return [f"weight_version={version}, was {known}: somebody else updates this server"]

    async def _sample(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, keys: Sequence[int]
    ) -> list[Sample]:
        if self._sampler is None:
            self._sampler = self._make_sampler()
            await self._sampler.__aenter__()
        try:
            return await self._sampler.sample_group(token_ids, params, keys=keys)
        except BROKEN as error:
            raise EngineError(other_form(self.url, error)) from error

    def _make_sampler(self) -> HttpSampler:
        model = ServedModel(
            max_context_tokens=self._expected.max_context_tokens,
            vocab_size=self._expected.vocab_size,
            version=VERSION,
            weight_version=self._weight_version,
        )
        return HttpSampler(
            self._client,
            model,
            ProgramCall(),
            timeout_s=self._config.request_timeout_s,
        )
