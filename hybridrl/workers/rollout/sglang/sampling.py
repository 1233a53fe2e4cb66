"""The ``Sampler`` of a server: one request a group; responses that were cut off are sampled again.

Token ids travel in both directions: text is never tokenised twice.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import aiohttp
import torch
from pybase64 import b64decode_as_bytearray
from torch import Tensor

from hybridrl.errors import DriftError, EngineError
from hybridrl.images import ImageSettings, require_images_fit, with_identities
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.sampler import (
    FinishReason,
    Sample,
    Sampler,
    SampleRequest,
    SamplingMasks,
    Scoring,
    interrupted_sample,
)
from hybridrl.workers.rollout.event_loop import ProgramCall
from hybridrl.workers.rollout.sampling import check_request
from hybridrl.workers.rollout.sglang.client import (
    Body,
    ConnectionLostError,
    Endpoint,
    RefusedError,
    open_session,
    while_it_works,
)
from hybridrl.workers.rollout.sglang.pictures import collapsed, data_url

log = logging.getLogger(__name__)

_NUM_ATTEMPTS = 3
_ABORT_TIMEOUT_S = 5.0
_ABORT_EVERY_S = 0.05
"""Between tries to abort what is open: a request that was still on its way was not hit, and the
answer does not say so."""
_SEED_BITS = (1 << 31) - 1
_OF_EACH = ("input_ids", "image_data", "sampling_params", "rid")
"""Fields that a request for several responses has once for each."""

BELOW_ADAPTERS = "below adapters"
"""A server's name of weights that no step changes."""


def adapter_name(version: int) -> str:
    """Return a server's name of the adapter of a policy version."""
    return f"policy-{version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model of a server, as its requests need it."""

    max_context_tokens: int
    vocab_size: int
    version: int  # policy version of its weights, which every response must come from
    weight_version: str | None = None  # the server's own name of them; None: that number
    names_adapter: bool = False  # whether every request names the adapter of its version
    expert_shape: tuple[int, int] | None = None  # layers, experts of each, if requests ask for them
    images: ImageSettings | None = None  # how it cuts images; None: it sees none


def read_sample(item: Mapping[str, Any], model: ServedModel, *, has_masks: bool = False) -> Sample:
    """Read one response of a server, which ended by itself or was interrupted."""
    meta, token_ids = item["meta_info"], item["output_ids"]
    finish: Literal["stop", "length", "abort"] = meta["finish_reason"]["type"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != token_ids:
        raise EngineError(
            f"a response has {len(token_ids)} tokens and log-probs of {len(entries)} others; this "
            "version of SGLang does not return what training needs"
        )
    masks, logprobs = None, [entry[0] for entry in entries]
    if has_masks:
        masks = _read_masks(meta, len(token_ids))
        logprobs = meta["output_token_sampling_logprobs"]
    return Sample(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        finish_reason="interrupted" if finish == "abort" else finish,
        weight_version=model.version,
        routed_experts_LJK=_read_experts(meta, model.expert_shape) if model.expert_shape else None,
        masks=masks,
    )


def read_scores(meta: Body, token_ids: Tensor, scoring: Scoring, version: int) -> Sample:
    """Read the scores of given tokens; a first entry, before them, has no log-prob.

    It repeats their ids, too, but the last one of a vocabulary as 0 (0.5.23).
    """
    columns = [torch.tensor([[entry[0] for entry in meta["input_token_logprobs"][1:]]])]
    if scoring.num_likeliest:
        entries = meta["input_top_logprobs"][1:]
        pairs = [[entry[:2] for entry in of_token] for of_token in entries]
        columns += torch.tensor(pairs, dtype=torch.float64).permute(2, 1, 0).float()
    teacher_JL = torch.cat(columns)
    return Sample(token_ids, teacher_JL[0], "length", version, teacher_JL=teacher_JL)


def _read_masks(meta: Mapping[str, Any], num_tokens: int) -> SamplingMasks:
    masks: list[list[int]] = meta.get("output_token_sampling_mask") or []
    if len(masks) != num_tokens:
        raise EngineError(
            f"a response has {num_tokens} tokens and sampling masks of {len(masks)}: SGLang before "
            "0.5.23 returns none, nor does its router; set rollout.sampling_masks=false"
        )
    ids = torch.tensor([token for mask in masks for token in mask], dtype=torch.int32)
    return SamplingMasks(ids, torch.tensor([len(mask) for mask in masks], dtype=torch.int32))


def _read_experts(meta: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(
            "actor.replay_routing=true, and the server returned none: is the model a mixture of "
            "experts? Set actor.replay_routing=false if it is not"
        )
    # A response of 8,192 tokens of Qwen3-30B-A3B has 16 MiB: 34 ms by Python's own base64, on the
    # loop that samples. A thread would not help, since either keeps the interpreter's lock.
    data = b64decode_as_bytearray(text, validate=True)
    flat = torch.frombuffer(data, dtype=torch.int32).to(torch.int16)
    return flat.view(-1, *shape)


@dataclass(slots=True)
class Group:
    """The responses to one context: those that have arrived, and those still to be sampled."""

    request: SampleRequest
    context: tuple[int, ...]  # tokens with their images: equal contexts have equal ones
    token_ids: list[int]  # as they are sent: a server expands the one placeholder of each image
    image_urls: Sequence[str] = ()
    samples: dict[int, Sample] = field(default_factory=dict)
    """By index among the responses; one that was cut off is included on request alone."""

    @property
    def missing(self) -> list[int]:
        """Indices of the responses that are still to be sampled."""
        return [index for index in range(len(self.request.keys)) if index not in self.samples]


@dataclass(slots=True)
class SharedPrefill:
    """The request that caches a context, and the tasks that are about to sample behind it."""

    num_tasks: int = 0
    num_responses: int = 0
    task: asyncio.Task[list[Body]] | None = None


class HttpSampler(Sampler):
    """Samples by HTTP, for one program. Connections are open from entering it to leaving it."""

    def __init__(
        self, endpoint: Endpoint, model: ServedModel, call: ProgramCall, *, timeout_s: float
    ) -> None:
        """Connect when entered; a server must make progress within ``timeout_s`` seconds."""
        self.max_context_tokens = model.max_context_tokens
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._model = model
        self._call = call
        call.on_interrupt = self.interrupt
        self._timeout_s = timeout_s
        self._num_prompt_tokens = self._num_cached_tokens = self._num_retried = 0
        self._drafts = Mean(0.0, 0.0)
        self._prefills: dict[tuple[int, tuple[int, ...]], SharedPrefill] = {}
        """By policy version, and context."""
        self._aborts: set[asyncio.Task[Any]] = set()
        self._open: set[str] = set()
        """Names of open responses."""
        self._interrupting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HttpSampler:
        """Connect in the current event loop."""
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def describe(self) -> str:
        """Report the progress."""
        num_open = self._call.num_open
        return f"{self._call.num_requests - num_open} responses returned, {num_open} open"

    def take_metrics(self) -> Metrics:
        """Describe the requests since the last call under declared names."""
        metrics: Metrics = {
            "rollout/prefix_cache_hit_fraction": Mean(
                float(self._num_cached_tokens), float(self._num_prompt_tokens)
            ),
            "rollout/retried_requests": Sum(float(self._num_retried)),
        }
        if self._drafts.count:
            metrics["rollout/draft_acceptance_fraction"] = self._drafts
        self._num_prompt_tokens = self._num_cached_tokens = self._num_retried = 0
        self._drafts = Mean(0.0, 0.0)
        return metrics

    async def answer(self, request: SampleRequest) -> list[Sample]:
        """See ``Sampler``; an EngineError, too, if a response was cut off three times."""
        check_request(
            request, max_context_tokens=self.max_context_tokens, vocab_size=self._model.vocab_size
        )
        group = await self._group(request)
        num_responses = len(request.keys)
        self._num_prompt_tokens += len(request.token_ids) * num_responses
        with self._call.request(num_responses):
            await self._complete(group)
        return [group.samples[index] for index in range(num_responses)]

    async def _group(self, request: SampleRequest) -> Group:
        settings, tokens_L, images = self._model.images, request.token_ids, request.images
        begins = require_images_fit(tokens_L, images, settings)
        if settings is None or not images:
            token_ids: list[int] = tokens_L.tolist()
            return Group(request, tuple(token_ids), token_ids)
        return Group(
            request,
            tuple(with_identities(tokens_L, images, begins).tolist()),
            collapsed(tokens_L, images, begins, settings.placeholder),
            [await data_url(image) for image in images],
        )

    def interrupt(self) -> None:
        """Let all requests return with the tokens that they have; later ones with none.

        In the program's loop; until the call's ``is_interrupted`` is reset.
        """
        self._call.is_interrupted = True
        if self._interrupting is None or self._interrupting.done():
            self._interrupting = asyncio.ensure_future(self._abort_open())

    async def _abort_open(self) -> None:
        while self._open and self._call.is_interrupted:
            await self._ask_aborts(self._open)  # a server that is gone: its requests say so
            await asyncio.sleep(_ABORT_EVERY_S)

    async def _complete(self, group: Group) -> None:
        """Request a group until no response of it is missing."""
        reason = ""
        for attempt in range(_NUM_ATTEMPTS):
            if self._call.is_interrupted:
                empty = interrupted_sample(self._version_of(group))
                group.samples.update(dict.fromkeys(group.missing, empty))
                return
            num_missing = len(group.missing)
            if attempt:
                log.warning("asking again for responses: count=%d reason=%s", num_missing, reason)
                self._num_retried += num_missing
            reason = await self._attempt(group)
            if not group.missing:
                return
        raise EngineError(
            f"{len(group.missing)} of {len(group.request.keys)} responses were cut off "
            f"{_NUM_ATTEMPTS} times, the last time by {reason}; nothing of them is scored"
        )

    async def _attempt(self, group: Group) -> str:
        """Request the missing responses; return why one was cut off, or an empty text."""
        missing = group.missing
        try:
            await self._prefill(group)
            if self._call.is_interrupted:
                return "an interruption"
            items = await self._ask(self.group_body(group))
        except ConnectionLostError as error:
            return str(error)
        except RefusedError as error:
            if not error.is_servers_fault:
                raise
            return str(error)
        reasons = [
            self._take(group, index, item) for index, item in zip(missing, items, strict=True)
        ]
        return next(filter(None, reasons), "")

    def _take(self, group: Group, index: int, item: Body) -> str:
        """Keep a response that ended, or was interrupted; return why another one was cut off."""
        meta = item["meta_info"]
        finish = meta["finish_reason"] or {"type": "unfinished"}
        is_interrupted = finish["type"] == "abort" and self._call.is_interrupted
        if is_interrupted and not item["output_ids"]:
            group.samples[index] = interrupted_sample(self._version_of(group))
            return ""
        if finish["type"] not in ("stop", "length") and not is_interrupted:
            return f"{finish['type']}: {finish.get('message', '')}"
        self._require_version(str(meta.get("weight_version")))
        if group.image_urls:
            _require_prompt(item, group)
        scoring = group.request.scoring
        if scoring is not None:
            token_ids = group.request.token_ids[scoring.begin :]
            group.samples[index] = read_scores(meta, token_ids, scoring, self._version_of(group))
            return ""
        model = replace(self._model, version=self._version_of(group))
        params = group.request.params
        sample = read_sample(item, model, has_masks=params.sampling_masks)
        if is_interrupted:  # SGLang says so even if the last token ended it
            ended_by: FinishReason = "interrupted"
            if int(sample.token_ids[-1]) in params.stop_token_ids:
                ended_by = "stop"
            elif len(sample.token_ids) == self._num_tokens(group):
                ended_by = "length"
            sample = replace(sample, finish_reason=ended_by)
        group.samples[index] = sample
        self._num_cached_tokens += int(meta.get("cached_tokens") or 0)
        self._drafts += Mean(
            float(meta.get("spec_num_correct_drafts", 0)),
            float(meta.get("spec_num_proposed_drafts", 0)),
        )
        return ""

    def _num_tokens(self, group: Group) -> int:
        if group.request.scoring is not None:
            return 0
        room = self.max_context_tokens - len(group.request.token_ids)
        return min(group.request.params.max_new_tokens, room)

    async def _prefill(self, group: Group) -> None:
        """Cache the context once, if several responses to it are missing: SGLang would not.

        Tasks that ask for the same context in the same turn of the event loop share the request.
        """
        if not self._endpoint.caches_contexts:
            return
        context = self._version_of(group), group.context
        prefill = self._prefills.setdefault(context, SharedPrefill())
        prefill.num_tasks += 1
        prefill.num_responses += len(group.missing)
        try:
            await asyncio.sleep(0)
            if prefill.num_responses > 1:
                prefill.task = prefill.task or asyncio.ensure_future(
                    self._ask(self.prefill_body(group))
                )
                await asyncio.shield(prefill.task)  # another task may wait for it, too
        finally:
            prefill.num_tasks -= 1
            if not prefill.num_tasks:
                del self._prefills[context]

    async def _ask(self, body: Body) -> list[Body]:
        names: Sequence[str] = body.get("rid", [])
        self._open.update(names)
        try:
            name = f"SGLang at {self._endpoint.base_url}"
            async with while_it_works(self._progress, timeout_s=self._timeout_s, name=name):
                answer: list[Body] = await self._endpoint.request(
                    "/generate", body, timeout_s=None, session=self._session
                )
        except asyncio.CancelledError:
            # Not if the program was aborted: then the drain aborts all requests at once.
            if self._session is not None and not self._call.is_aborted:
                task = asyncio.ensure_future(self._free_slots(names))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._open.difference_update(names)
        return answer

    async def _progress(self) -> object:
        """Return the loads, which any token changes; a scheduler writes them again without one."""
        loads = await self._endpoint.loads(self._session)
        return [{**load, "timestamp": None} for load in loads]

    async def _free_slots(self, names: Sequence[str]) -> None:
        """Free the slots of cancelled responses now: SGLang looks for lost clients every 4 s."""
        for error in await self._ask_aborts(names):
            log.warning("a cancelled request may keep its slot for 4 s: %s", error)

    async def _ask_aborts(self, names: Collection[str]) -> list[BaseException]:
        """Abort responses; return the errors of requests that failed."""
        ask = partial(
            self._endpoint.request,
            "/abort_request",
            timeout_s=_ABORT_TIMEOUT_S,
            session=self._session,
        )
        aborts = [ask({"rid": name}) for name in names]
        answers = await asyncio.gather(*aborts, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, BaseException)]

    def prefill_body(self, group: Group) -> Body:
        """Request no token: this caches the context's keys and values once per group."""
        no_tokens = _parameters(group, group.missing[0], num_tokens=0)
        body = {"input_ids": group.token_ids, "sampling_params": no_tokens, **self._fields(group)}
        return body | ({"image_data": group.image_urls} if group.image_urls else {})

    def group_body(self, group: Group) -> Body:
        """Request all missing responses of a group at once."""
        num_tokens, missing = self._num_tokens(group), group.missing
        body: Body = {
            "input_ids": [group.token_ids] * len(missing),
            "sampling_params": [_parameters(group, n, num_tokens=num_tokens) for n in missing],
            "return_logprob": True,
            "rid": [uuid.uuid4().hex for _ in missing],
            **self._fields(group),
        }
        if group.request.params.sampling_masks:
            body["return_sampling_mask"] = True
        if group.request.scoring is not None:  # SGLang's log-probs begin one token later
            begin, num_likeliest = group.request.scoring
            body |= {"logprob_start_len": begin - 1, "top_logprobs_num": num_likeliest}
        if group.image_urls:
            body |= {"image_data": [group.image_urls] * len(missing)}
            body["return_prompt_token_ids"] = True
        return body

    def _fields(self, group: Group) -> Body:
        fields: Body = {}
        if self._model.names_adapter:  # a server refuses one that it does not have
            fields["lora_path"] = adapter_name(self._version_of(group))
        if self._model.expert_shape is not None:
            fields["return_routed_experts"] = True
        return fields

    def _version_of(self, group: Group) -> int:
        version = group.request.version if self._model.names_adapter else None
        return self._model.version if version is None else version

    def _require_version(self, version: str) -> None:
        number = str(self._model.version)
        expected = self._model.weight_version or number
        if version != expected:
            known = f"the policy is at {number}"
            if expected != number:
                known = f"this run expects {expected}"
            raise DriftError(
                f"a response was sampled by weights of version {version}, and {known}; "
                f"somebody else updates this server ({self._endpoint.base_url})"
            )


def single_bodies(body: Body) -> list[Body]:
    """Take a request for several responses apart, for receivers that answer them one by one."""
    if "rid" not in body:  # one, without a token: it fills the cache
        return [body]
    names = [name for name in _OF_EACH if name in body]
    each = zip(*(body[name] for name in names), strict=True)
    return [body | dict(zip(names, values, strict=True)) for values in each]


def _require_prompt(item: Mapping[str, Any], group: Group) -> None:
    """Raise an EngineError if a server expanded the placeholders of images otherwise."""
    prompt = item.get("prompt_token_ids")
    token_ids = group.request.token_ids.tolist()
    if prompt != token_ids:
        what = "none" if prompt is None else f"{len(prompt)}"
        raise EngineError(
            f"a prompt with {len(group.image_urls)} images has {len(token_ids)} "
            f"tokens, and the server made {what} of it (prompt_token_ids): it cuts images "
            "otherwise than the trainer; let both read the same preprocessor_config.json, and set "
            "no rollout.engine_args.mm_process_config"
        )


def _parameters(group: Group, index: int, *, num_tokens: int) -> Body:
    """Return the sampling parameters of one response of at most ``num_tokens``."""
    params = group.request.params
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": num_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        # Else the model's own end of text would end responses that ask for no stop token.
        "ignore_eos": not params.stop_token_ids,
        "sampling_seed": group.request.keys[index] & _SEED_BITS,  # in [0, 2**31)
    }
