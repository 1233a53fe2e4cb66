"""A server that asks encoders for the embeddings of images."""

from __future__ import annotations

import asyncio
from typing import Any

from hybridrl.workers.rollout.sglang.client import Body, Endpoint, RefusedError
from hybridrl.workers.rollout.sglang.sampling import single_bodies

_NO_EMBEDDING = 503
_BETWEEN_S = 1.0
"""A server looks at its encoders every second, and asks none that did not answer three times
(``arguments.environment``)."""


class EncodedEndpoint(Endpoint):
    """The own server. Requests with images are sent one by one.

    For a request with several responses SGLang 0.5.23 asks no encoder, and computes their images
    itself.
    """

    def __init__(self, own: Endpoint) -> None:
        """Send to ``own``."""
        super().__init__(own.base_url, name=own.name, key=own.key)
        self._own = own

    async def request(self, path: str, body: Body | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Do one call; one that was lost with an encoder is repeated until there is another."""
        if path != "/generate" or body is None or "image_data" not in body:
            return await self._own.request(path, body, **given)
        asked = [self._ask(one, **given) for one in single_bodies(body)]
        answers = await asyncio.gather(*asked, return_exceptions=True)  # none outlives the call
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        return answers

    async def _ask(self, body: Body, **given: Any) -> Any:  # noqa: ANN401
        while True:  # the caller limits the wait
            try:
                return await self._own.request("/generate", body, **given)
            except RefusedError as error:
                if error.status != _NO_EMBEDDING:
                    raise
            await asyncio.sleep(_BETWEEN_S)
