"""Requests for samples and their answers as JSON, for an engine in another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from pybase64 import b64decode_as_bytearray, b64encode
from torch import Tensor

from hybridrl.errors import EngineError, RequestError, shorten
from hybridrl.sampler import RequestParams, Sample

Body = dict[str, Any]

SAMPLE_ROUTE = "/sample_group"
"""Of a request."""

DRIFTED = 409
"""Status of the answer if the engine has other weights than it should have."""

PROGRESS_ROUTE = "/v1/loads"
"""Says how far an engine is, with the fields of SGLang's route of this name."""


def request_body(
    token_ids: Sequence[int] | Tensor, params: RequestParams, keys: Sequence[int]
) -> Body:
    """Write a request; see ``Sampler.sample_group``."""
    tokens = torch.as_tensor(token_ids).tolist()
    return {"token_ids": tokens, "params": asdict(params), "keys": list(keys)}


def read_request(data: bytes) -> tuple[Tensor, RequestParams, list[int]]:
    """Read a request.

    Raises:
        RequestError: it is not one.
    """
    try:
        body = json.loads(data)
        token_ids, keys, stops = body["token_ids"], body["keys"], body["params"]["stop_token_ids"]
        params = RequestParams(**{**body["params"], "stop_token_ids": tuple(stops)})
        integers = [*token_ids, *keys, *stops, params.max_new_tokens, params.top_k]
        are_integers = all(type(number) is int for number in integers)
        if not are_integers or {type(params.temperature), type(params.top_p)} - {int, float}:
            raise TypeError("a token, key or parameter is no number, or a list of them")
        tokens = torch.tensor(integers, dtype=torch.int64)[: len(token_ids)]  # all must fit
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # torch's of large numbers
        reason = shorten(f"{type(error).__name__}: {error}")
        raise RequestError(f"not a request for samples: {reason}") from error
    return tokens, params, keys


def answer_body(samples: Sequence[Sample]) -> Body:
    """Write the answer to a request. float32 survives: a float64 of JSON holds each one exactly."""
    return {
        "samples": [
            {
                "token_ids": sample.token_ids.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "finish_reason": sample.finish_reason,
                "weight_version": sample.weight_version,
                "weight_versions": None
                if sample.weight_versions is None
                else sample.weight_versions.tolist(),
                "experts": None
                if sample.routed_experts_LJK is None
                else _spell_experts(sample.routed_experts_LJK),
            }
            for sample in samples
        ]
    }


def read_answer(body: Body) -> list[Sample]:
    """Read the answer to a request.

    Raises:
        EngineError: it is none; a log-prob that was not finite is null.
    """
    try:
        return [_read_sample(sample) for sample in body["samples"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer with samples: {error!r}") from error


def _spell_experts(experts_LJK: Tensor) -> Body:
    data = b64encode(experts_LJK.contiguous().numpy().tobytes()).decode()
    return {"shape": list(experts_LJK.shape), "int16": data}


def _read_experts(fields: Body) -> Tensor:
    data = b64decode_as_bytearray(fields["int16"], validate=True)
    return torch.frombuffer(data, dtype=torch.int16).view(fields["shape"])


def _read_sample(fields: Mapping[str, Any]) -> Sample:
    versions, experts = fields["weight_versions"], fields["experts"]
    return Sample(
        token_ids=torch.tensor(fields["token_ids"], dtype=torch.int64),
        logprobs=torch.tensor(fields["logprobs"], dtype=torch.float32),
        finish_reason=fields["finish_reason"],
        weight_version=fields["weight_version"],
        weight_versions=None if versions is None else torch.tensor(versions, dtype=torch.int64),
        routed_experts_LJK=None if experts is None else _read_experts(experts),
    )
