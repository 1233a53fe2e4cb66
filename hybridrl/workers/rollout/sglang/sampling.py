"""A generate call on a server: all groups at once; responses that were cut off are sampled again.

Token ids travel in both directions: text is never tokenised twice.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, row_offsets
from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.workers.rollout.protocol import Response, SamplingParams
from hybridrl.workers.rollout.sampling import response_keys
from hybridrl.workers.rollout.sglang.client import ConnectionLostError, ServerClient, ServerError

log = logging.getLogger(__name__)

Body = dict[str, Any]

_NUM_ATTEMPTS = 3
_BUSY = 500  # the lowest status that is the server's fault, not the request's
_SEED_BITS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How a mixture-of-experts model routes a token."""

    num_layers: int
    num_experts_per_token: int


@dataclass(slots=True)
class Group:
    """The responses to one prompt: those that have arrived, and those still to be sampled."""

    token_ids: list[int]
    """Of the prompt."""

    seeds: list[int]
    """One a response, in [0, 2**31)."""

    responses: dict[int, Response] = field(default_factory=dict)
    """By index among the prompt's responses; a response that was cut off is never included."""

    @property
    def missing(self) -> list[int]:
        """Indices of the responses that are still to be sampled."""
        return [index for index in range(len(self.seeds)) if index not in self.responses]


def build_groups(prompts: PromptBatch, sampling: SamplingParams) -> list[Group]:
    """Split a batch into groups, each response with the random stream of the embedded engine."""
    tokens: list[int] = prompts.token_ids_PL.values().tolist()
    offsets: list[int] = row_offsets(prompts.token_ids_PL).tolist()
    index_G = torch.arange(sampling.num_responses_per_prompt)
    groups = []
    for prompt, (begin, end) in enumerate(pairwise(offsets)):
        key_G = response_keys(prompts.seed_P[prompt].repeat(len(index_G)), index_G) & _SEED_BITS
        groups.append(Group(tokens[begin:end], key_G.tolist()))
    return groups


class GroupSampler:
    """Samples groups of responses. Used once."""

    def __init__(
        self,
        client: ServerClient,
        sampling: SamplingParams,
        *,
        max_context_tokens: int,
        weight_version: str,
        timeout_s: float,
        adapter: str | None = None,
        experts: ExpertShape | None = None,
    ) -> None:
        """Prepare.

        Args:
            client: of the server.
            sampling: how to sample.
            max_context_tokens: a response also ends where it and its prompt fill this.
            weight_version: that every response must come from.
            timeout_s: seconds that one request may take.
            adapter: that every request names.
            experts: given if each token's experts are requested.
        """
        self._client = client
        self._sampling = sampling
        self._max_context_tokens = max_context_tokens
        self._weight_version = weight_version
        self._timeout_s = timeout_s
        self._experts = experts
        self._fields: Body = {} if adapter is None else {"lora_path": adapter}
        if experts is not None:
            self._fields["return_routed_experts"] = True
        self._num_responses = self._num_open = self._num_cached_tokens = 0

    def describe(self) -> str:
        """Report the progress."""
        return f"{self._num_responses} responses there, {self._num_open} requests open"

    def run(
        self, groups: Sequence[Group], *, on_cut_off: Callable[[int], None]
    ) -> tuple[list[Response], Metrics]:
        """Sample all responses of all groups.

        Args:
            groups: of ``build_groups``.
            on_cut_off: gets the number of missing responses before they are requested again; raises
                if they were cut off on purpose.

        Returns:
            Responses, those to one prompt adjacent, in prompt order; and metrics of the call.

        Raises:
            EngineError: the server is gone, refuses a request, or cut the same one off three times.
            DeadlineError: a request exceeded ``timeout_s``.
        """
        num_retried, reason = 0, ""
        num_responses = num_missing = sum(len(group.seeds) for group in groups)
        for attempt in range(_NUM_ATTEMPTS):
            if attempt:
                on_cut_off(num_missing)
                log.warning("asking again for responses: count=%d reason=%s", num_missing, reason)
                num_retried += num_missing
            reason = self._client.run(self._round([group for group in groups if group.missing]))
            num_missing = sum(len(group.missing) for group in groups)
            if not num_missing:
                break
        else:
            on_cut_off(num_missing)
            raise EngineError(
                f"{num_missing} of {num_responses} responses were cut off {_NUM_ATTEMPTS} times, "
                f"the last time by {reason}; nothing of them is scored"
            )
        num_prompt_tokens = sum(len(group.token_ids) * len(group.seeds) for group in groups)
        return [group.responses[index] for group in groups for index in range(len(group.seeds))], {
            "rollout/prefix_cache_hit_fraction": Mean(
                float(self._num_cached_tokens), float(num_prompt_tokens)
            ),
            "rollout/retried_requests": Sum(float(num_retried)),
        }

    async def _round(self, groups: Sequence[Group]) -> str:
        """Request all groups; return the reason of the last failed one."""
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
        """Request one group; return why a response of it was cut off, or an empty text."""
        missing = group.missing
        try:
            if len(missing) > 1:
                await self._ask(self.prefill_body(group))
            items = await self._ask(self.group_body(group))
        finally:
            self._num_open -= 1
        reason = ""
        for index, item in zip(missing, items, strict=True):
            meta = item["meta_info"]
            finish = meta["finish_reason"] or {"type": "unfinished"}
            if finish["type"] not in ("stop", "length"):
                reason = f"{finish['type']}: {finish.get('message', '')}"
                continue
            response = read_response(item, experts=self._experts)
            self._require_version(str(meta.get("weight_version")))
            self._num_cached_tokens += int(meta.get("cached_tokens") or 0)
            self._num_responses += 1
            group.responses[index] = response
        return reason

    async def _ask(self, body: Body) -> list[Body]:
        answer: list[Body] = await self._client.request(
            "/generate", body, timeout_s=self._timeout_s
        )
        return answer

    def prefill_body(self, group: Group) -> Body:
        """Request no token: this caches the prompt's keys and values once per group."""
        no_tokens = self._parameters(num_tokens=0, seed=group.seeds[group.missing[0]])
        return {"input_ids": group.token_ids, "sampling_params": no_tokens, **self._fields}

    def group_body(self, group: Group) -> Body:
        """Request all missing responses of a group at once."""
        num_tokens = min(
            self._sampling.max_response_tokens, self._max_context_tokens - len(group.token_ids)
        )
        return {
            "input_ids": [group.token_ids] * len(group.missing),
            "sampling_params": [
                self._parameters(num_tokens=num_tokens, seed=group.seeds[index])
                for index in group.missing
            ],
            "return_logprob": True,
            **self._fields,
        }

    def _parameters(self, *, num_tokens: int, seed: int) -> Body:
        """Return the sampling parameters of one response of at most ``num_tokens``."""
        return {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k or -1,
            "max_new_tokens": num_tokens,
            "stop_token_ids": list(self._sampling.stop_token_ids),
            # Else the model's own end of text would end responses that ask for no stop token.
            "ignore_eos": not self._sampling.stop_token_ids,
            "sampling_seed": seed,
        }

    def _require_version(self, version: str) -> None:
        if version != self._weight_version:
            raise EngineError(
                f"a response was sampled by weights of version {version}, and the policy is at "
                f"{self._weight_version}; somebody else updates this server"
            )


def read_response(item: Mapping[str, Any], *, experts: ExpertShape | None = None) -> Response:
    """Read one response of a server, which ended by itself.

    Args:
        item: the answer.
        experts: given if the experts of each token were requested.

    Raises:
        EngineError: log-probs and tokens do not match in number, or experts are missing.
    """
    meta, token_ids = item["meta_info"], item["output_ids"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != token_ids:
        raise EngineError(
            f"a response has {len(token_ids)} tokens and log-probs of {len(entries)} others; this "
            "version of SGLang does not return what training needs"
        )
    return Response(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor([entry[0] for entry in entries], dtype=torch.float32),
        is_truncated=meta["finish_reason"]["type"] == "length",
        routed_experts_LJK=None if experts is None else _read_experts(meta, experts),
    )


def _read_experts(meta: Mapping[str, Any], shape: ExpertShape) -> Tensor:
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(
            "rollout.routed_experts=true, and the server returned none: is the model a mixture of "
            "experts? Set rollout.routed_experts=false if it is not"
        )
    flat = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.int32)
    return flat.view(-1, shape.num_layers, shape.num_experts_per_token)
