"""Generation requests of SGLang: groups of siblings out, responses in.

Token ids travel in both directions: text is never tokenised twice.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, row_offsets
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import Response, SamplingParams
from hybridrl.workers.rollout.sampling import response_keys

Body = dict[str, Any]

_SEED_BITS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings that are still to be sampled from one prompt."""

    prompt: int
    """Place of the prompt in its batch."""

    token_ids: list[int]
    """Of the prompt."""

    siblings: tuple[int, ...]
    """Places among the prompt's responses."""

    seeds: tuple[int, ...]
    """One a sibling, in [0, 2**31)."""

    def only(self, siblings: Sequence[int]) -> Group:
        """Return the group with these siblings alone."""
        seeds = dict(zip(self.siblings, self.seeds, strict=True))
        return Group(
            self.prompt, self.token_ids, tuple(siblings), tuple(seeds[s] for s in siblings)
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said about one sibling."""

    response: Response | None
    """None if it was cut off: such a response is never scored."""

    reason: str
    """Why it ended: ``stop``, ``length``, or what cut it off."""

    num_cached_tokens: int
    """Prompt tokens that were not computed again."""

    weight_version: str
    """Of the weights that sampled it."""


def build_groups(prompts: PromptBatch, sampling: SamplingParams) -> list[Group]:
    """Cut a batch into groups, each sibling with the random stream that the embedded engine has."""
    tokens: list[int] = prompts.token_ids_PL.values().tolist()
    offsets: list[int] = row_offsets(prompts.token_ids_PL).tolist()
    siblings = tuple(range(sampling.num_responses_per_prompt))
    groups = []
    for prompt, (begin, end) in enumerate(pairwise(offsets)):
        seed_G = prompts.seed_P[prompt].repeat(len(siblings))
        key_G = response_keys(seed_G, torch.tensor(siblings)) & _SEED_BITS
        groups.append(Group(prompt, tokens[begin:end], siblings, tuple(key_G.tolist())))
    return groups


def sampling_parameters(sampling: SamplingParams, *, num_tokens: int, seed: int) -> Body:
    """Spell how to sample one response of at most ``num_tokens``."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": num_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Else the model's own end of text would end responses that ask for no stop token.
        "ignore_eos": not sampling.stop_token_ids,
        "sampling_seed": seed,
    }


def prefill_body(group: Group, sampling: SamplingParams, extra: Mapping[str, object]) -> Body:
    """Ask for no token: the prompt's keys and values come to lie in the cache, once a group."""
    nothing = sampling_parameters(sampling, num_tokens=0, seed=group.seeds[0])
    return {"input_ids": group.token_ids, "sampling_params": nothing, **extra}


def group_body(
    group: Group, sampling: SamplingParams, extra: Mapping[str, object], *, num_tokens: int
) -> Body:
    """Ask for all siblings of a group at once."""
    return {
        "input_ids": [group.token_ids] * len(group.siblings),
        "sampling_params": [
            sampling_parameters(sampling, num_tokens=num_tokens, seed=seed) for seed in group.seeds
        ],
        "return_logprob": True,
        **extra,
    }


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How a mixture-of-experts model routes a token."""

    num_layers: int
    num_experts_per_token: int


def read_answer(item: Mapping[str, Any], *, experts: ExpertShape | None = None) -> Answer:
    """Read what the server says of one response.

    Args:
        item: the answer.
        experts: given where the experts of each token were asked for.

    Raises:
        EngineError: log-probs and tokens do not match in number, or experts are missing.
    """
    meta = item["meta_info"]
    finish = meta["finish_reason"] or {"type": "unfinished"}
    cached = int(meta.get("cached_tokens") or 0)
    version = str(meta.get("weight_version"))
    reason = str(finish["type"])
    if reason not in ("stop", "length"):
        return Answer(None, f"{reason}: {finish.get('message', '')}", cached, version)
    token_ids: list[int] = item["output_ids"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != token_ids:
        raise EngineError(
            f"a response has {len(token_ids)} tokens and log-probs of {len(entries)} others; this "
            "version of SGLang does not return what training needs"
        )
    response = Response(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor([entry[0] for entry in entries], dtype=torch.float32),
        is_truncated=reason == "length",
        routed_experts_LJK=None if experts is None else _read_experts(meta, experts),
    )
    return Answer(response, reason, cached, version)


def _read_experts(meta: Mapping[str, Any], shape: ExpertShape) -> Tensor:
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(
            "rollout.routed_experts=true, and the server returned none: is the model a mixture of "
            "experts? Set rollout.routed_experts=false if it is not"
        )
    flat = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.int32)
    return flat.view(-1, shape.num_layers, shape.num_experts_per_token)
