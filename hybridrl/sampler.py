"""The interface to tokens at the level of one request: programs sample through it alone.

A rollout is a *program*, an async function that gets a ``Sampler`` and may call it from many tasks
at once: ``RolloutEngine.run(program)``. Single-turn generation is the simplest
(``single_turn.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hybridrl.images import Images

T = TypeVar("T")

FinishReason = Literal["stop", "length", "interrupted", "failed"]

NO_VERSION = -1
"""In place of a policy version: no weights have sampled anything yet."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How to sample the responses of one request."""

    # hard stop, in tokens, >= 1. A response also ends where it fills the engine's context.
    max_new_tokens: int
    temperature: float  # divides the logits; 0 is greedy, with log-probs taken at temperature 1
    top_p: float = 1.0  # nucleus, in (0, 1]
    top_k: int = 0  # sample among the k likeliest tokens; 0 is off
    # a response ends with the first of these tokens, which belongs to the response
    stop_token_ids: tuple[int, ...] = ()
    # return which tokens top-p and top-k left, and log-probs among them
    sampling_masks: bool = False


class SamplingMasks(NamedTuple):
    """The tokens that top-k and top-p left, among which each of n tokens was drawn."""

    ids_M: Tensor  # int32 on the CPU, token ids, those of one drawn token after those of another
    # int32 [n] on the CPU, how many belong to each drawn token, itself among them; sum is M
    counts_n: Tensor

    def at(self, index_S: Tensor) -> SamplingMasks:
        """Return the masks of some tokens (int64 [S], of 0..n-1), in their order."""
        counts_S = self.counts_n[index_S].long()
        begins_n = self.counts_n.cumsum(0) - self.counts_n
        shifts_S = begins_n[index_S] - (counts_S.cumsum(0) - counts_S)
        index_M = shifts_S.repeat_interleave(counts_S)
        index_M += torch.arange(len(index_M))
        return SamplingMasks(self.ids_M[index_M], counts_S.int())


def join_masks(parts: Sequence[SamplingMasks]) -> SamplingMasks:
    """Lay the masks of at least one part end to end."""
    ids, counts = zip(*parts, strict=True)
    return SamplingMasks(torch.cat(ids), torch.cat(counts))


class Scoring(NamedTuple):
    """Asks what a model says of tokens that are there, at the temperature of the request."""

    begin: int  # first token of the context that is scored, >= 1; all behind it are, too
    num_likeliest: int  # K, of the model's likeliest tokens at each; may be 0


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Asks for several continuations of one context, which is prefilled once."""

    token_ids: Tensor  # int64 [L] on the CPU, of the context; at least 1
    params: RequestParams  # the same for all continuations
    # name the random stream of each continuation (`request_key`). Equal contexts, parameters and
    # keys give equal samples with the embedded engine.
    keys: Sequence[int]
    images: Images = ()  # of the context, in their order; each has its placeholders in `token_ids`
    # whether a later context is likely to begin with this one and its response: the embedded engine
    # keeps their keys and values until another response needs the slot
    is_turn: bool = False
    # the answer is then one sample, of the scored tokens, with `teacher_JL`: none is drawn
    scoring: Scoring | None = None
    # policy version of the adapter that answers, of those that its engine has. None: the newest.
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation of a context."""

    # int64 [n] on the CPU, 0 <= n <= max_new_tokens, with the stop token if one ended it
    token_ids: Tensor
    # float32 [n] nats, after the temperature and before top-p and top-k, for any engine: as the
    # trainer computes them for the same tokens. With `masks` after top-p and top-k, too.
    logprobs: Tensor
    # `stop`: its last token is a stop token. `length`: the limit or the context ended it.
    # `interrupted`: its engine stopped, perhaps before the first token; it may be continued.
    # `failed`: a tool, environment or program broke, and its conversation ends there.
    finish_reason: FinishReason
    weight_version: int  # policy version of the weights that sampled its first token
    # int64 [n], policy version of the weights that sampled each token. None: all are of
    # `weight_version`.
    weight_versions: Tensor | None = None
    # int16 [context + response - 1, layers, experts a token], experts of each token; the last token
    # was never an input. None unless `actor.replay_routing`.
    routed_experts_LJK: Tensor | None = None
    # bool [n], False for tokens that a program put between samples: of a template, of a tool. None:
    # all were sampled.
    is_sampled: Tensor | None = None
    # float32 [n], that a program gave its tokens. None: it gives none.
    rewards: Tensor | None = None
    # int8 [n], number of the player that sampled each token, 0 of others' tokens. None: there is
    # one.
    players: Tensor | None = None
    # int64 [n], n >= 1, the tokens before `token_ids`. None: those of the prompt.
    context: Tensor | None = None
    # where further sequences begin among `token_ids`: a program joins those of a conversation whose
    # history was rewritten. Their contexts are not sampled.
    sequence_begins: tuple[int, ...] = ()
    # of `context` and `token_ids`, in order. None: those of the prompt.
    images: Images | None = None
    # uint8 [n], the turns of a conversation (`agents/trajectory.py`). None: a single turn.
    turns: Tensor | None = None
    masks: SamplingMasks | None = None  # of its tokens. None unless `RequestParams.sampling_masks`
    # float32 [1 + 2 K, n], what a served teacher says of each token: its log-prob, and columns of
    # `models/divergence.TeacherTokens`. None: none was asked.
    teacher_JL: Tensor | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether the length limit ended it."""
        return self.finish_reason == "length"

    @property
    def is_failed(self) -> bool:
        """Whether something broke that is not the policy."""
        return self.finish_reason == "failed"

    @property
    def is_interrupted(self) -> bool:
        """Whether more of it may be sampled."""
        return self.finish_reason == "interrupted"

    @property
    def versions_L(self) -> Tensor:
        """Policy version of the weights that sampled each token, int64 [n]."""
        if self.weight_versions is not None:
            return self.weight_versions
        return torch.full((len(self.token_ids),), self.weight_version)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All responses to one prompt."""

    step: int  # at which the prompt was admitted: steps that were learned from before
    samples: tuple[Sample, ...]


def interrupted_sample(weight_version: int) -> Sample:
    """Return a response that was interrupted before its first token."""
    no_tokens = torch.zeros(0, dtype=torch.int64)
    return Sample(no_tokens, torch.zeros(0), "interrupted", weight_version)


def join_parts(begun: Sample, continued: Sample) -> Sample:
    """Return the response of which ``continued`` answers the context and the tokens of ``begun``.

    Both are of one stream of random numbers. Log-probs, versions and experts of a token stay those
    of the weights that sampled it. Joining is associative, and a part without tokens adds none.
    """
    if not begun.is_interrupted:
        raise ValueError(
            f"a response that ended with {begun.finish_reason} has no further tokens; continue "
            "interrupted ones alone"
        )
    if not len(begun.token_ids):
        return continued
    if not len(continued.token_ids):
        return replace(begun, finish_reason=continued.finish_reason)
    experts_LJK = None
    if begun.routed_experts_LJK is not None and continued.routed_experts_LJK is not None:
        # The second part begins with the last token of the first.
        further_LJK = continued.routed_experts_LJK[len(begun.routed_experts_LJK) :]
        experts_LJK = torch.cat([begun.routed_experts_LJK, further_LJK])
    versions = {part.weight_version for part in (begun, continued)}
    is_of_one = begun.weight_versions is None and continued.weight_versions is None
    return replace(
        begun,
        token_ids=torch.cat([begun.token_ids, continued.token_ids]),
        logprobs=torch.cat([begun.logprobs, continued.logprobs]),
        finish_reason=continued.finish_reason,
        weight_versions=None
        if is_of_one and len(versions) == 1
        else torch.cat([begun.versions_L, continued.versions_L]),
        routed_experts_LJK=experts_LJK,
        masks=None
        if begun.masks is None or continued.masks is None
        else join_masks([begun.masks, continued.masks]),
    )


class Sampler(Protocol):
    """Samples continuations; requests of any number of tasks run at the same time.

    To be awaited in the event loop of the program alone. A cancelled request frees its slot.
    """

    max_context_tokens: int
    """Limit of context + response. A request's context must leave room for at least 1 token."""

    async def answer(self, request: SampleRequest) -> list[Sample]:
        """Return one sample a key, in order.

        Raises:
            RequestError: the context or a parameter is refused; other requests are not affected.
            EngineError: the engine failed, or was drained; ``run`` ends with an error, too.
            DeadlineError: the engine made no progress within ``rollout.request_timeout_s``.
        """
        ...

    async def sample_group(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        keys: Sequence[int],
        images: Images = (),
    ) -> list[Sample]:
        """Sample several continuations of one context; see ``SampleRequest`` and ``answer``."""
        tokens_L = torch.as_tensor(token_ids, dtype=torch.int64)
        return await self.answer(SampleRequest(tokens_L, params, keys, images))

    async def sample(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        key: int,
        images: Images = (),
    ) -> Sample:
        """Sample one turn of a conversation; see ``SampleRequest`` and ``answer``."""
        tokens_L = torch.as_tensor(token_ids, dtype=torch.int64)
        (only,) = await self.answer(SampleRequest(tokens_L, params, (key,), images, is_turn=True))
        return only


Program = Callable[[Sampler], Coroutine[Any, Any, T]]
"""A rollout: samples as often as it likes, and returns a result."""


class Reporter(Protocol):
    """Hears of each response as soon as it has ended."""

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        """Take a response to the prompt with this index in its stream. Must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; the same for every prompt of a call. Else as ``RequestParams``."""

    num_responses_per_prompt: int  # responses G per prompt, >= 1
    max_response_tokens: int  # hard stop, in tokens
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling_masks: bool = False
    reporter: Reporter | None = None  # hears of responses before the call returns
    # prompts of each engine after whose last response the others are interrupted: they stay with
    # the engine's rank, and continue in a later call. None: the call answers all prompts.
    num_complete: int | None = None
    # likeliest tokens that served teachers say of each token. None: they are not asked.
    teacher_top_k: int | None = None

    def request_params(self) -> RequestParams:
        """Return the parameters of each request of the call."""
        return RequestParams(
            max_new_tokens=self.max_response_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            sampling_masks=self.sampling_masks,
        )


Bits = TypeVar("Bits", Tensor, int)

_UINT64 = 1 << 64
_UNIFORM_BITS = 52


def _signed(value: int) -> int:
    return value - _UINT64 if value >= _UINT64 // 2 else value


# The increment and the multipliers of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom
# Number Generators", OOPSLA 2014), as int64: torch multiplies those modulo 2**64, as required.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits_N: Bits, count: int) -> Bits:
    # ">>" copies the sign bit of an int64; the mask makes it the unsigned shift of the paper.
    return (bits_N >> count) & ((1 << (64 - count)) - 1)


def _mix(bits_N: Bits) -> Bits:
    # Of an int, which does not overflow, the lowest 64 bits are those of an int64.
    bits_N = (bits_N ^ _shift_right(bits_N, 30)) * _MULTIPLIER_1
    bits_N = (bits_N ^ _shift_right(bits_N, 27)) * _MULTIPLIER_2
    return bits_N ^ _shift_right(bits_N, 31)


def _key(seed_N: Bits, sibling_N: Bits) -> Bits:
    return _mix(_mix(seed_N + _INCREMENT) + (sibling_N + 1) * _INCREMENT)


def response_keys(seed_N: Tensor, sibling_N: Tensor) -> Tensor:
    """Name the random stream of each response for ``uniforms``; all int64 [N].

    The stream depends on the seed of the prompt, and on the response's index among those to it.
    """
    return _key(seed_N, sibling_N)


def request_key(seed: int, response_index: int, *, turn: int = 0) -> int:
    """Name the random stream of a response in a conversation, as ``response_keys`` in turn 0."""
    key = _key(seed, response_index)
    return _signed((_key(key, turn) if turn else key) % _UINT64)  # a tensor takes 0.1 ms


def uniforms(key_N: Tensor, position_N: Tensor) -> Tensor:
    """Return the random number of one token of each response; equal inputs give equal numbers.

    Args:
        key_N: int64 [N], from ``response_keys``.
        position_N: int64 [N], position of the token in prompt + response, from 0.

    Returns:
        float64 [N], multiples of 2**-52 in [0, 1).
    """
    bits_N = _mix(key_N + (position_N + 1) * _INCREMENT)
    return _shift_right(bits_N, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS
