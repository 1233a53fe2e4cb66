"""Requests for samples and their answers as JSON, for an engine in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.sampler import RequestParams, Sample

Body = dict[str, Any]

SAMPLE_ROUTE = "/sample_group"
"""Of a request."""

PROGRESS_ROUTE = "/v1/loads"
"""Says how far an engine is, with the fields of SGLang's route of this name."""


def request_body(
    token_ids: Sequence[int] | Tensor, params: RequestParams, keys: Sequence[int]
) -> Body:
    """Write a request; see ``Sampler.sample_group``."""
    tokens = torch.as_tensor(token_ids).tolist()
    return {"token_ids": tokens, "params": asdict(params), "keys": list(keys)}


def read_request(body: Body) -> tuple[Tensor, RequestParams, list[int]]:
    """Read a request.

    Raises:
        EngineError: it is not one.
    """
    try:
        params = RequestParams(
            **{**body["params"], "stop_token_ids": tuple(body["params"]["stop_token_ids"])}
        )
        tokens = torch.tensor(body["token_ids"], dtype=torch.int64)
        return tokens, params, [int(key) for key in body["keys"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not a request for samples: {type(error).__name__}: {error}") from error


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


def _read_sample(fields: Mapping[str, Any]) -> Sample:
    versions = fields["weight_versions"]
    return Sample(
        token_ids=torch.tensor(fields["token_ids"], dtype=torch.int64),
        logprobs=torch.tensor(fields["logprobs"], dtype=torch.float32),
        finish_reason=fields["finish_reason"],
        weight_version=fields["weight_version"],
        weight_versions=None if versions is None else torch.tensor(versions, dtype=torch.int64),
    )
