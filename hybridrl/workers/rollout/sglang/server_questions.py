"""Questions to a server that others run, before its first request: its facts, and an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.sampler import RequestParams
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sglang.answers import ServedModel
from hybridrl.workers.rollout.sglang.client import ControlClient, ServerError
from hybridrl.workers.rollout.sglang.comparison import Expectations
from hybridrl.workers.rollout.sglang.connection import ProgramConnection
from hybridrl.workers.rollout.sglang.sampling import HttpSampler

CALL_S = 10.0
"""Seconds that the answer to a question may take that the server computes nothing for."""

BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors of reading an answer that has another form than SGLang's."""

REFUSED = (401, 403)
"""Statuses of a wrong key."""

_PROBE = RequestParams(max_new_tokens=1, temperature=1.0)
_NO_TOKEN = 2**31 - 1
_VOCAB_SIZE = re.compile(r"valid range is \[0, (\d+)\)")


class Questions:
    """Asks one server, on the loop of its client."""

    def __init__(
        self, client: ControlClient, expected: Expectations, *, has_key: bool, timeout_s: float
    ) -> None:
        """Ask nothing yet.

        Args:
            has_key: whether the client sends a key.
            timeout_s: seconds until it must have computed a token (``rollout.stage_timeout_s``).
        """
        self._client = client
        self._expected = expected
        self._has_key = has_key
        self._timeout_s = timeout_s

    async def facts(self) -> tuple[object, object]:
        """Return its answers to ``/server_info`` and ``/model_info``.

        Raises:
            EngineError: it does not answer, or refuses; see ``advice``.
            DeadlineError: it is too slow.
        """
        server_info, model_info = await asyncio.gather(
            self._get("/server_info"), self._get("/model_info")
        )
        return server_info, model_info

    async def _get(self, path: str) -> object:
        answer: object = await self._client.request(path, timeout_s=CALL_S, method="GET")
        return answer

    def advice(self, error: Exception) -> str:
        """Return a remedy for a question without an answer."""
        key = f"{self._expected.key}.key_variable"
        if isinstance(error, ServerError) and error.status in REFUSED:
            if self._has_key:
                return f"it refuses the key (status {error.status}): correct the variable of {key}"
            return f"it requires a key: set {key} to the environment variable that has it"
        return f"{error}: start it, or correct {self._expected.key}.urls"

    async def unlike_a_vocabulary(self) -> list[str]:
        """Ask for the log-prob of a token that no model has: the refusal names the range.

        Returns:
            A line if it is another one than that of the model.
        """
        try:
            await self._client.request(
                "/generate",
                {
                    "input_ids": [0],
                    "sampling_params": {"max_new_tokens": 1},
                    "return_logprob": True,
                    "token_ids_logprob": [_NO_TOKEN],
                },
                timeout_s=self._timeout_s,
            )
        except ServerError as error:
            size = _VOCAB_SIZE.search(error.text)
            if size is not None and int(size[1]) != self._expected.vocab_size:
                return [
                    f"vocab_size={size[1]}, must be {self._expected.vocab_size}: "
                    f"{self._expected.model_remedy}"
                ]
        except (EngineError, DeadlineError) as error:
            return [self.advice(error)]
        return []

    async def unlike_an_answer(self, model_info: object) -> list[str]:
        """Ask for a token with its log-prob, in the form of all later requests.

        Args:
            model_info: its last answer to ``/model_info``.

        Returns:
            A line if it does not answer so.
        """
        version = model_info.get("weight_version") if isinstance(model_info, Mapping) else None
        model = ServedModel(
            max_context_tokens=self._expected.max_context_tokens,
            vocab_size=self._expected.vocab_size,
            version=0,
            weight_version=str(version),
        )
        sampler = HttpSampler(
            ProgramConnection(self._client), model, ProgramCall(), timeout_s=self._timeout_s
        )
        reason = ""
        try:
            async with asyncio.timeout(self._timeout_s), sampler:  # others may keep it busy
                await sampler.sample_group([0], _PROBE, keys=[0])
        except (EngineError, DeadlineError) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no token within rollout.stage_timeout_s={self._timeout_s:g} s"
        except BROKEN as error:
            reason = other_form(self._client.base_url, error)
        if not reason:
            return []
        return [f"it does not answer a request for a token with its log-prob: {reason}"]


def other_form(url: str, error: Exception) -> str:
    """Say that an answer has another form than SGLang's: ``error`` is of ``BROKEN``."""
    return f"{url} answered in another form than SGLang's ({type(error).__name__})"
