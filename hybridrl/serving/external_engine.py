"""A server of SGLang that runs elsewhere, as an engine: it is asked, never started and never ended.

Routes: ``/server_info``, ``/model_info``, ``/generate``, ``/v1/loads``, ``/weights_checker`` for
checksums, and ``/abort_request`` of its own requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import DeadlineError, EngineError, ExternalEngineError, PhaseError
from hybridrl.metrics import Metrics
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.comparison import ExpectedServer, differences, names_vocabulary
from hybridrl.serving.engine_handle import answered
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sglang.answers import ServedModel
from hybridrl.workers.rollout.sglang.client import ServerClient, ServerError, assume_alive
from hybridrl.workers.rollout.sglang.engine_choice import EngineChoice
from hybridrl.workers.rollout.sglang.sampling import ServerSampler
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.weight_files import WeightSource

VERSION = 0
"""Of weights that never change."""

_CALL_S = 10.0
_REFUSED = (401, 403)
_PROBE = RequestParams(max_new_tokens=1, temperature=1.0)
_NO_TOKEN = 2**31 - 1
_VOCAB_SIZE = re.compile(r"valid range is \[0, (\d+)\)")
_BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors of reading an answer that has another form than SGLang's."""


class ExternalEngine:
    """An ``EngineHandle`` for requests alone: its owner starts and ends the server."""

    def __init__(
        self, url: str, *, expected: ExpectedServer, config: RolloutConfig, key: str
    ) -> None:
        """Connect when first used.

        Args:
            url: as ``http://HOST:PORT``.
            expected: of its model.
            config: time limits.
            key: that the server requires; empty: it requires none.
        """
        self.url = url.rstrip("/")
        self._expected = expected
        self._config = config
        self._has_key = bool(key)
        self._client = ServerClient(
            self.url, name=f"SGLang at {self.url}", require_alive=assume_alive, key=key
        )
        self._sampler: ServerSampler | None = None
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
        return self._client.start(
            self._client.request("/v1/loads", timeout_s=_CALL_S, method="GET")
        )

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

    def load_weights(self, source: WeightSource, *, version: int) -> NoReturn:
        """Refuse."""
        self._refuse("weights")

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
        except (EngineError, DeadlineError, *_BROKEN) as error:
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
            server_info, model_info = await asyncio.gather(
                self._get("/server_info"), self._get("/model_info")
            )
        except (EngineError, DeadlineError) as error:
            return [self._advice(error)]
        lines = differences(self._expected, server_info, model_info)
        if isinstance(model_info, dict):
            lines += self._changed_version(str(model_info.get("weight_version")))
        if lines:
            return lines
        if names_vocabulary(server_info):
            lines += await self._unlike_a_vocabulary()
        return lines + await self._unlike_an_answer()

    async def _get(self, path: str) -> object:
        answer: object = await self._client.request(path, timeout_s=_CALL_S, method="GET")
        return answer

    def _advice(self, error: Exception) -> str:
        key = f"{self._expected.key}.key_variable"
        if isinstance(error, ServerError) and error.status in _REFUSED:
            if self._has_key:
                return f"it refuses the key (status {error.status}): correct the variable of {key}"
            return f"it requires a key: set {key} to the environment variable that has it"
        return f"{error}: start it, or correct {self._expected.key}.urls"

    def _changed_version(self, version: str) -> list[str]:
        """Note the weights at the first comparison, and compare with them later."""
        known, self._weight_version = self._weight_version, self._weight_version or version
        if known in (None, version):
            return []
        return [f"weight_version={version}, was {known}: somebody else updates this server"]

    async def _unlike_a_vocabulary(self) -> list[str]:
        """Ask for the log-prob of a token that no model has: the refusal names the range."""
        try:
            await self._client.request(
                "/generate",
                {
                    "input_ids": [0],
                    "sampling_params": {"max_new_tokens": 1},
                    "return_logprob": True,
                    "token_ids_logprob": [_NO_TOKEN],
                },
                timeout_s=self._config.request_timeout_s,
            )
        except ServerError as error:
            size = _VOCAB_SIZE.search(error.text)
            if size is not None and int(size[1]) != self._expected.vocab_size:
                return [
                    f"vocab_size={size[1]}, must be {self._expected.vocab_size}: set "
                    f"{self._expected.key}.path to its model"
                ]
        except (EngineError, DeadlineError) as error:
            return [self._advice(error)]
        return []

    async def _unlike_an_answer(self) -> list[str]:
        """Ask for a token with its log-prob, in the form of all later requests."""
        try:
            await self._sample([0], _PROBE, [0])
        except (EngineError, DeadlineError) as error:
            return [f"it does not answer a request for a token with its log-prob: {error}"]
        return []

    async def _sample(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, keys: Sequence[int]
    ) -> list[Sample]:
        if self._sampler is None:
            self._sampler = self._make_sampler()
            await self._sampler.__aenter__()
        try:
            return await self._sampler.sample_group(token_ids, params, keys=keys)
        except _BROKEN as error:
            raise EngineError(
                f"{self.url} answered in another form than SGLang's ({type(error).__name__})"
            ) from error

    def _make_sampler(self) -> ServerSampler:
        model = ServedModel(
            max_context_tokens=self._expected.max_context_tokens,
            vocab_size=self._expected.vocab_size,
            version=VERSION,
            weight_version=self._weight_version,
        )
        return ServerSampler(
            EngineChoice(self._client),
            model,
            ProgramCall(),
            timeout_s=self._config.request_timeout_s,
        )
