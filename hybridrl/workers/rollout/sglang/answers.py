"""Answers of a server: responses with tokens, log-probs and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pybase64 import b64decode_as_bytearray
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.metrics import Mean
from hybridrl.sampler import Sample


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How a mixture-of-experts model routes a token."""

    num_layers: int
    num_experts_per_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model of a server, as its requests need it."""

    max_context_tokens: int
    vocab_size: int

    version: int
    """Policy version of its weights, which every response must come from."""

    weight_version: str | None = None
    """The server's own name of these weights; None: the number ``version``."""

    adapter: str | None = None
    """That every request names."""

    experts: ExpertShape | None = None
    """Given if each token's experts are requested."""


def read_sample(item: Mapping[str, Any], model: ServedModel) -> Sample:
    """Read one response of a server, which ended by itself or was interrupted.

    Raises:
        EngineError: log-probs and tokens do not match in number, or experts are missing.
    """
    meta, token_ids = item["meta_info"], item["output_ids"]
    finish: Literal["stop", "length", "abort"] = meta["finish_reason"]["type"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != token_ids:
        raise EngineError(
            f"a response has {len(token_ids)} tokens and log-probs of {len(entries)} others; this "
            "version of SGLang does not return what training needs"
        )
    return Sample(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor([entry[0] for entry in entries], dtype=torch.float32),
        finish_reason="interrupted" if finish == "abort" else finish,
        weight_version=model.version,
        routed_experts_LJK=None if model.experts is None else _read_experts(meta, model.experts),
    )


def accepted_drafts(meta: Mapping[str, Any]) -> Mean:
    """Return how many drafted tokens of a response the model took; without speculation none."""
    return Mean(
        float(meta.get("spec_num_correct_drafts", 0)),
        float(meta.get("spec_num_proposed_drafts", 0)),
    )


def _read_experts(meta: Mapping[str, Any], shape: ExpertShape) -> Tensor:
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(
            "rollout.routed_experts=true, and the server returned none: is the model a mixture of "
            "experts? Set rollout.routed_experts=false if it is not"
        )
    # A response of 8,192 tokens of Qwen3-30B-A3B has 16 MiB: 34 ms by Python's own base64, on the
    # loop that samples. A thread would not help, since either keeps the interpreter's lock.
    data = b64decode_as_bytearray(text, validate=True)
    flat = torch.frombuffer(data, dtype=torch.int32).to(torch.int16)
    return flat.view(-1, shape.num_layers, shape.num_experts_per_token)
