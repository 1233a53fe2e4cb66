"""Answers of a frozen model to many contexts at once; each that fails has a reason instead."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from torch import Tensor

from hybridrl.errors import DriftError, EngineError, RequestError
from hybridrl.sampler import RequestParams, Sample, Sampler

Answer = Sample | str
"""An answer, or why there is none."""


async def answer_all(
    sampler: Sampler,
    contexts: Sequence[Tensor],
    params: RequestParams,
    *,
    model: str,
    seed: int,
    timeout_s: float,
) -> list[Answer]:
    """Answer each context once.

    Args:
        contexts: int64 [n] each.
        model: name, for reasons.
        timeout_s: ``reward.timeout_s``, of all answers.

    Raises:
        DriftError: an engine has other weights than before.
    """

    async def answer(context: Tensor) -> Answer:
        try:
            return await sampler.sample(context, params, key=_key_of(context, seed))
        except DriftError:
            raise
        except RequestError as error:
            return f"{model} refused the request: {error}"
        except EngineError as error:
            return f"{model}: {error}"

    tasks = [asyncio.create_task(answer(each)) for each in contexts]
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    if errors:
        raise errors[0]
    answers = [task.result() if task.done() else None for task in tasks]
    late = f"{model} did not answer within reward.timeout_s={timeout_s:g} s"
    return [late if answer is None else answer for answer in answers]


def _key_of(context: Tensor, seed: int) -> int:
    """Return the random stream of an answer: that of the run's seed and the context alone."""
    digest = hashlib.sha256(f"{seed} {context.tolist()}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
