"""Requests of the embedded engine, and their responses while they decode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.images import with_identities
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.sampler import Sample, SampleRequest, uniforms
from hybridrl.workers.rollout.embedded.prefill import Prefilled
from hybridrl.workers.rollout.sampling import DrawParams


@dataclass(slots=True)
class RolloutStats:
    """Counts of one program."""

    num_slots: int
    num_context_tokens: int = 0  # of all responses
    num_prefill_tokens: int = 0  # those of them that ran: a group shares its context
    num_prefill_passes: int = 0  # forward passes over contexts
    num_decode_steps: int = 0  # each draws one token per slot in use
    num_slots_used: int = 0  # sum over decode steps

    def metrics(self) -> Metrics:
        """Describe the program under declared names."""
        num_steps, num_context = float(self.num_decode_steps), float(self.num_context_tokens)
        num_cached = num_context - self.num_prefill_tokens
        return {
            "rollout/decode_steps": Sum(num_steps),
            "rollout/slot_occupancy": Mean(self.num_slots_used / self.num_slots, num_steps),
            "rollout/prefix_cache_hit_fraction": Mean(num_cached, num_context),
        }


NO_ADAPTER: Mapping[str, Tensor] = {}
"""Of an engine without adapters."""


@dataclass(slots=True, eq=False)
class Request:
    """Responses to one context."""

    asked: SampleRequest
    future: asyncio.Future[list[Sample]]  # gets the samples; a cancelled one frees their slots
    image_begins: Sequence[int] = ()  # the token where each image begins
    num_tokens: int = field(init=False)  # L
    context: bytes = field(init=False)  # token ids, of images with their identities, to compare
    draw_params: DrawParams = field(init=False)
    adapter: Mapping[str, Tensor] = field(default_factory=lambda: NO_ADAPTER)  # of all its tokens
    samples: dict[int, Sample] = field(default_factory=dict)  # ended responses by their index
    step: int = 0  # the decode step before which it came
    num_seated: int = 0  # responses that got slots
    num_ended: int = 0  # responses that freed them again by themselves
    uniforms_GM: Tensor = field(init=False)  # random numbers of its tokens; come with ``prefilled``
    prefilled: Prefilled | None = None
    row: int = 0  # of ``prefilled``

    def __post_init__(self) -> None:
        self.num_tokens = len(self.asked.token_ids)
        marked_L = with_identities(self.asked.token_ids, self.asked.images, self.image_begins)
        self.context = marked_L.numpy().tobytes()
        params = self.asked.params
        self.draw_params = DrawParams(
            params.temperature, params.top_p, params.top_k, params.sampling_masks
        )

    def answer_if_complete(self) -> None:
        """Give the samples to the task that waits for them, if none is missing."""
        if len(self.samples) == len(self.asked.keys) and not self.future.done():
            self.future.set_result([self.samples[index] for index in range(len(self.asked.keys))])


def draw_uniforms(requests: Sequence[Request], *, max_tokens: int, device: torch.device) -> None:
    """Draw the random numbers of all tokens of these requests: all at once costs least.

    ``max_tokens`` are those of a context and its response.
    """
    keys = [key for request in requests for key in request.asked.keys]
    lengths = [request.num_tokens for request in requests for _ in request.asked.keys]
    room = max(request.asked.params.max_new_tokens for request in requests)
    token_M = torch.arange(min(room, max_tokens), device=device)
    key_N, length_N = torch.tensor([keys, lengths], device=device)
    uniform_NM = uniforms(key_N[:, None], length_N[:, None] + token_M)
    counts = [len(request.asked.keys) for request in requests]
    for request, uniform_GM in zip(requests, torch.split(uniform_NM, counts), strict=True):
        request.uniforms_GM = uniform_GM


class Seat(NamedTuple):
    """The response in a slot."""

    request: Request
    number: int  # among the request's responses
    lane: int  # row of the output
    first_step: int  # which drew its first token
    start: int  # tokens in the cache when a step draws, minus the step


class Ended(NamedTuple):
    """A response that ended in this step, or was interrupted after it."""

    seat: Seat
    num_tokens: int
    row: int  # of the cache, where its keys and values lie now
    is_interrupted: bool = False
