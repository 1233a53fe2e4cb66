"""A generate call on a server: all groups at once, what was cut off again, nothing torn scored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.workers.rollout.protocol import Response, SamplingParams
from hybridrl.workers.rollout.sglang.client import ConnectionLostError, ServerClient, ServerError
from hybridrl.workers.rollout.sglang.requests import (
    Answer,
    ExpertShape,
    Group,
    group_body,
    prefill_body,
    read_answer,
)

log = logging.getLogger(__name__)

_NUM_ATTEMPTS = 3
_BUSY = 500  # the lowest status that is the server's fault, not the request's


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one generate call."""

    responses: list[Response]
    """Siblings adjacent, in prompt order."""

    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What holds for every request of a call."""

    sampling: SamplingParams

    max_context_tokens: int
    """A response also ends where it and its prompt fill this."""

    weight_version: str
    """That every response must come from."""

    timeout_s: float
    """Seconds one request may take."""

    fields: Mapping[str, object]
    """Further fields of every request, as the name of its adapter."""

    experts: ExpertShape | None = None
    """Given where each token's experts are asked for."""


class GroupSampler:
    """Samples groups of responses. Used once."""

    def __init__(
        self, client: ServerClient, terms: Terms, *, on_cut_off: Callable[[int], None]
    ) -> None:
        """Prepare.

        Args:
            client: of the server.
            terms: of all requests.
            on_cut_off: told how many responses are missing before they are asked for again; raises
                if they were cut off on purpose.
        """
        self._client = client
        self._terms = terms
        self._on_cut_off = on_cut_off
        self._answers: dict[tuple[int, int], Answer] = {}
        self._num_open = 0

    def describe(self) -> str:
        """Say how far it is."""
        return f"{len(self._answers)} responses there, {self._num_open} requests open"

    def run(self, groups: Sequence[Group]) -> Sampled:
        """Sample all siblings of all groups.

        Raises:
            EngineError: the server is gone, refuses a request, or cut the same one off three times.
            DeadlineError: a request took longer than it may.
        """
        missing = list(groups)
        num_retried, reason = 0, ""
        for attempt in range(_NUM_ATTEMPTS):
            if attempt:
                num_missing = sum(len(group.siblings) for group in missing)
                self._on_cut_off(num_missing)
                log.warning("asking again for responses: count=%d reason=%s", num_missing, reason)
                num_retried += num_missing
            reason = self._client.run(self._round(missing))
            missing = [left for group in groups if (left := self._left_of(group)).siblings]
            if not missing:
                return self._sampled(groups, num_retried)
        num_missing = sum(len(group.siblings) for group in missing)
        self._on_cut_off(num_missing)
        raise EngineError(
            f"{num_missing} of {sum(len(group.siblings) for group in groups)} responses were cut "
            f"off {_NUM_ATTEMPTS} times, the last time by {reason}; nothing of them is scored"
        )

    async def _round(self, groups: Sequence[Group]) -> str:
        """Ask for all groups; return why the last of those that failed did."""
        self._num_open = len(groups)
        results = await self._client.settle([self._sample(group) for group in groups])
        reason = ""
        for result in results:
            if isinstance(result, ConnectionLostError) or (
                isinstance(result, ServerError) and result.status >= _BUSY
            ):
                reason = str(result)
            elif isinstance(result, EngineError | DeadlineError):
                raise result
            else:
                reason = result or reason
        return reason

    async def _sample(self, group: Group) -> str:
        """Ask for one group; return why a response of it was cut off, or an empty text."""
        try:
            if len(group.siblings) > 1:
                await self._ask(prefill_body(group, self._terms.sampling, self._terms.fields))
            num_tokens = min(
                self._terms.sampling.max_response_tokens,
                self._terms.max_context_tokens - len(group.token_ids),
            )
            items = await self._ask(
                group_body(group, self._terms.sampling, self._terms.fields, num_tokens=num_tokens)
            )
        finally:
            self._num_open -= 1
        reason = ""
        for sibling, item in zip(group.siblings, items, strict=True):
            answer = read_answer(item, experts=self._terms.experts)
            if answer.response is None:
                reason = answer.reason
            else:
                self._require_version(answer)
                self._answers[group.prompt, sibling] = answer
        return reason

    async def _ask(self, body: dict[str, object]) -> list[dict[str, object]]:
        answer: list[dict[str, object]] = await self._client.request(
            "/generate", body, timeout_s=self._terms.timeout_s
        )
        return answer

    def _require_version(self, answer: Answer) -> None:
        if answer.weight_version != self._terms.weight_version:
            raise EngineError(
                f"a response was sampled by weights of version {answer.weight_version}, and the "
                f"policy is at {self._terms.weight_version}; somebody else updates this server"
            )

    def _left_of(self, group: Group) -> Group:
        return group.only([s for s in group.siblings if (group.prompt, s) not in self._answers])

    def _sampled(self, groups: Sequence[Group], num_retried: int) -> Sampled:
        answers = [self._answers[group.prompt, s] for group in groups for s in group.siblings]
        num_prompt_tokens = sum(len(group.token_ids) * len(group.siblings) for group in groups)
        num_cached = sum(answer.num_cached_tokens for answer in answers)
        metrics: Metrics = {
            "rollout/prefix_cache_hit_fraction": Mean(float(num_cached), float(num_prompt_tokens)),
            "rollout/retried_requests": Sum(float(num_retried)),
        }
        responses = [answer.response for answer in answers if answer.response is not None]
        return Sampled(responses, metrics)
