"""Continuous batching: requests join and leave while their responses decode in slots.

Legend: S slots, N slots in use (always rows 0 .. N-1), V vocabulary, C tokens of a slot, X sets of
stop tokens, D responses that ended in a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots
from hybridrl.workers.rollout.embedded.model import Forward, require_finite
from hybridrl.workers.rollout.embedded.prefill import CachedPrefix, Prefilled, plan_pass, prefill
from hybridrl.workers.rollout.sampler import RequestParams, Sample
from hybridrl.workers.rollout.sampling import DrawParams, sample, uniforms

# Rows of the slot table: one column per slot.
_TOKEN = 0  # newest token, not yet in the cache
_LENGTH = 1  # tokens in the cache, which is the position of the newest token
_CURSOR = 2  # index of the newest token in the flat output [S * C]
_LAST = 3  # index of the last permitted token
_KEY = 4  # of the response's random stream
_STOPS = 5  # index of the response's set of stop tokens, times V
_NUM_COLUMNS = 6

# Rows of a decode step are a multiple of this: oneDNN generates code for each new number of rows,
# which takes longer than some unused rows do.
_ROW_MULTIPLE = 8


@dataclass(slots=True)
class RolloutStats:
    """Counts of one program."""

    num_slots: int

    num_context_tokens: int = 0
    """Context tokens of all responses."""

    num_prefill_tokens: int = 0
    """Those of them that ran through the model: a group shares its context."""

    num_prefill_passes: int = 0
    """Forward passes over contexts."""

    num_decode_steps: int = 0
    """Steps, each of which draws one token per slot in use."""

    num_generated_tokens: int = 0
    """Response tokens over all responses."""

    num_slots_used: int = 0
    """Slots in use, sum over decode steps."""

    @property
    def mean_slot_occupancy(self) -> float:
        """Slots in use over all slots, in [0, 1], mean over decode steps."""
        return self.num_slots_used / (max(self.num_decode_steps, 1) * self.num_slots)

    def metrics(self) -> Metrics:
        """Describe the program under declared names."""
        num_steps, num_context = float(self.num_decode_steps), float(self.num_context_tokens)
        num_cached = num_context - self.num_prefill_tokens
        return {
            "rollout/decode_steps": Sum(num_steps),
            "rollout/slot_occupancy": Mean(self.num_slots_used / self.num_slots, num_steps),
            "rollout/prefix_cache_hit_fraction": Mean(num_cached, num_context),
        }


@dataclass(slots=True, eq=False)
class Request:
    """Responses to one context."""

    token_ids: Tensor
    """int64 [L] on the host, the context."""

    params: RequestParams

    keys: Sequence[int]
    """Of the responses' random streams."""

    is_continued: bool
    """Whether a later context is likely to begin with this one and its response."""

    future: asyncio.Future[list[Sample]]
    """Gets the samples; a cancelled one frees their slots."""

    context: bytes = field(init=False)
    """The token ids, to compare."""

    draw_params: DrawParams = field(init=False)

    samples: dict[int, Sample] = field(default_factory=dict)
    """Ended responses by their index."""

    num_seated: int = 0
    """Responses that got slots."""

    prefilled: Prefilled | None = None
    row: int = 0
    """Of ``prefilled``."""

    def __post_init__(self) -> None:
        self.context = self.token_ids.numpy().tobytes()
        params = self.params
        self.draw_params = DrawParams(params.temperature, params.top_p, params.top_k)


class _Seat(NamedTuple):
    """The response in a slot."""

    request: Request
    index: int  # among the request's responses
    lane: int  # row of the output
    first_step: int  # which drew its first token

    def num_cached(self, step: int) -> int:
        """Return the tokens in the cache when ``step`` draws."""
        return len(self.request.token_ids) + step - self.first_step


class _Ended(NamedTuple):
    """A response that ended in this step."""

    seat: _Seat
    num_tokens: int
    row: int  # of the cache, where its keys and values lie now


class Decoding:
    """Decodes the requests of one program. Used once.

    The host keeps a mirror of the slot table, so that a step waits for the device only once: to
    learn which responses have ended. Requests get slots in the order in which they came.
    """

    def __init__(self, forward: Forward, slots: KVSlots, *, vocab_size: int, version: int) -> None:
        """Prepare.

        Args:
            forward: runs the model.
            slots: its keys and values.
            vocab_size: V of the logits.
            version: policy version of the weights.
        """
        device = slots.kv_YSJCD.device
        self.stats = RolloutStats(slots.num_slots)
        self._forward = forward
        self._slots = slots
        self._version = version
        self._waiting: deque[Request] = deque()
        self._seats: list[_Seat] = []  # of slots 0 .. N-1
        self._free_lanes = list(reversed(range(slots.num_slots)))
        self._kept: dict[int, bytes] = {}  # tokens whose keys and values lie in free slots
        self._table_S = torch.zeros(_NUM_COLUMNS, slots.num_slots, dtype=torch.int64, device=device)
        out_size = slots.num_slots * slots.max_tokens
        self._tokens_out = torch.zeros(out_size, dtype=torch.int64, device=device)
        self._logprobs_out = torch.zeros(out_size, dtype=torch.float32, device=device)
        self._is_stop_XV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._row_groups: list[tuple[DrawParams, Tensor | None]] | None = None
        self._step = 0
        self._has_cancelled = False
        self._failure: Exception | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; its future gets the result.

        Raises:
            EngineError: a step has failed.
        """
        if self._failure is not None:
            raise EngineError(f"the engine samples no more, because it failed: {self._failure}")
        request.future.add_done_callback(self._note_cancelled)
        self.stats.num_context_tokens += len(request.token_ids) * len(request.keys)
        self._waiting.append(request)

    def _note_cancelled(self, future: asyncio.Future[list[Sample]]) -> None:
        self._has_cancelled |= future.cancelled()

    def describe(self) -> str:
        """Report what runs and waits; for another thread, while this one samples."""
        return (
            f"{len(self._seats)} responses running, {len(self._waiting)} requests waiting, "
            f"at decode step {self._step}"
        )

    def step(self) -> bool:
        """Draw one token for each running response; False if there is none.

        Raises:
            EngineError: a logit is not finite.
        """
        if self._failure is not None or not (self._seats or self._waiting):
            return False
        try:
            with torch.inference_mode():
                ended = self._advance()
            self._deliver(ended)  # not under inference_mode, whose tensors autograd refuses
        except Exception as error:
            self._failure = error
            raise
        return True

    def _advance(self) -> list[_Ended]:
        """Do the step; return the responses that ended."""
        if self._has_cancelled:
            self._drop_cancelled()
        logits_NV = self._fill_free_slots(self._decode() if self._seats else None)
        if logits_NV is None:
            return []
        self.stats.num_decode_steps += 1
        self.stats.num_slots_used += len(self._seats)
        rows = self._draw(logits_NV).nonzero()[:, 0].tolist()  # the only wait for the device
        seats = [self._seats[row] for row in rows]
        is_kept = any(seat.request.is_continued for seat in seats)
        ended = [
            _Ended(seat, self._step - seat.first_step + 1, row)
            for seat, row in zip(seats, self._free(rows, is_kept=is_kept), strict=True)
        ]
        self._step += 1
        return ended

    def _drop_cancelled(self) -> None:
        self._has_cancelled = False
        self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
        rows = [row for row, seat in enumerate(self._seats) if seat.request.future.cancelled()]
        self._free_lanes += [self._seats[row].lane for row in rows]
        self._free(rows, is_kept=False)

    def _decode(self) -> Tensor:
        """Run the newest token of each running response; return the next logits, [N, V]."""
        num_seated = len(self._seats)
        num_rows = min(-(-num_seated // _ROW_MULTIPLE) * _ROW_MULTIPLE, self._slots.num_slots)
        table_R = self._table_S[:, :num_rows]  # the last rows may be unused: they decode in vain
        kv_step = self._slots.decode_step(table_R[_LENGTH], self._longest())
        logits_RV = self._forward(table_R[_TOKEN], kv_step)
        table_R[_LENGTH : _CURSOR + 1, :num_seated] += 1
        return logits_RV[:num_seated]

    def _longest(self) -> int:
        """Return the length, in tokens, of the longest running response with its context."""
        return max(seat.num_cached(self._step) for seat in self._seats)

    def _fill_free_slots(self, logits_NV: Tensor | None) -> Tensor | None:
        """Give slots to waiting responses, behind the N used ones; None if no response runs.

        Their first token is drawn from the context's last logits, in the same step as the next
        token of the others: a slot is never idle while a response waits.
        """
        logits = [] if logits_NV is None else [logits_NV]
        while self._waiting and len(self._seats) < self._slots.num_slots:
            prefilled = self._waiting[0].prefilled or self._prefill()
            first_row = len(self._seats)
            row_N = self._seat(prefilled)
            self._slots.place(first_row, prefilled.kv_YRJLD, row_N)
            logits.append(prefilled.logits_RV[row_N])
        return torch.cat(logits) if logits else None

    def _prefill(self) -> Prefilled:
        """Run the contexts of the first waiting requests in one pass."""
        rows = plan_pass((each.context, len(each.token_ids)) for each in self._waiting)
        requests = list(islice(self._waiting, len(rows)))
        first = dict(zip(reversed(rows), reversed(requests), strict=True))
        distinct = [first[row] for row in range(len(first))]
        prefixes = [self._longest_prefix(each.context) for each in distinct]
        prefilled = prefill(
            self._forward, self._slots, [each.token_ids for each in distinct], prefixes
        )
        for request, row in zip(requests, rows, strict=True):
            request.prefilled, request.row = prefilled, row
        self.stats.num_prefill_passes += 1
        self.stats.num_prefill_tokens += sum(len(each.token_ids) for each in distinct)
        self.stats.num_prefill_tokens -= sum(prefix.num_tokens for prefix in prefixes if prefix)
        return prefilled

    def _longest_prefix(self, context: bytes) -> CachedPrefix | None:
        """Find the free slot that holds most of a context: an earlier turn of its conversation."""
        lengths = [
            (len(kept), slot)
            for slot, kept in self._kept.items()
            if len(kept) < len(context) and context.startswith(kept)
        ]
        if not lengths:
            return None
        num_bytes, slot = max(lengths)
        return CachedPrefix(slot, num_bytes // torch.int64.itemsize)

    def _seat(self, prefilled: Prefilled) -> Tensor:
        """Give free slots to waiting responses of one pass, in order; return their rows in it."""
        rows: list[int] = []
        columns: list[tuple[int, ...]] = []
        first_row, num_free = len(self._seats), self._slots.num_slots - len(self._seats)
        while self._waiting and self._waiting[0].prefilled is prefilled and len(rows) < num_free:
            request = self._waiting[0]
            count = min(num_free - len(rows), len(request.keys) - request.num_seated)
            columns += [self._take_slot(request) for _ in range(count)]
            rows += [request.row] * count
            if request.num_seated == len(request.keys):
                self._waiting.popleft().prefilled = None
        device = self._table_S.device
        self._table_S[:, first_row : len(self._seats)] = torch.tensor(columns, device=device).T
        self._row_groups = None
        return torch.tensor(rows, device=device)

    def _take_slot(self, request: Request) -> tuple[int, ...]:
        """Seat the request's next response; return its first column of the slot table."""
        params, length, index = request.params, len(request.token_ids), request.num_seated
        lane = self._free_lanes.pop()
        self._kept.pop(len(self._seats), None)
        self._seats.append(_Seat(request, index, lane, self._step))
        request.num_seated += 1
        cursor = lane * self._slots.max_tokens
        last = cursor + min(params.max_new_tokens, self._slots.max_tokens - length) - 1
        stops = self._stop_set(params.stop_token_ids) * self._is_stop_XV.shape[1]
        return 0, length, cursor, last, request.keys[index], stops

    def _stop_set(self, stop_token_ids: tuple[int, ...]) -> int:
        """Return the row of a set of stop tokens, which is added if it is new."""
        index = self._stop_sets.setdefault(stop_token_ids, len(self._stop_sets))
        if index == len(self._is_stop_XV):
            is_stop_1V = self._is_stop_XV.new_zeros(1, self._is_stop_XV.shape[1])
            is_stop_1V[0, list(stop_token_ids)] = True
            self._is_stop_XV = torch.cat([self._is_stop_XV, is_stop_1V])
        return index

    def _draw(self, logits_NV: Tensor) -> Tensor:
        """Draw and store one token for each running response; return which ended, bool [N]."""
        table_N = self._table_S[:, : len(self._seats)]
        cursor_N = table_N[_CURSOR]
        token_N, logprob_N = self._sample(logits_NV, uniforms(table_N[_KEY], table_N[_LENGTH]))
        table_N[_TOKEN] = token_N
        self._tokens_out[cursor_N] = token_N
        self._logprobs_out[cursor_N] = logprob_N
        is_stop_N = self._is_stop_XV.view(-1)[table_N[_STOPS] + token_N]
        return is_stop_N | (cursor_N == table_N[_LAST])

    def _sample(self, logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
        """Draw with each response's own parameters; return tokens and log-probs, [N]."""
        if self._row_groups is None:
            self._row_groups = self._group_rows()
        params, row_M = self._row_groups[0]
        if row_M is None:
            return sample(logits_NV, uniform_N, params)
        token_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        logprob_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
        for params, row_M in self._row_groups:
            token_N[row_M], logprob_N[row_M] = sample(logits_NV[row_M], uniform_N[row_M], params)
        return token_N, logprob_N

    def _group_rows(self) -> list[tuple[DrawParams, Tensor | None]]:
        """Return the rows that draw with equal parameters, int64 [M]; None: all rows do."""
        groups: dict[DrawParams, list[int]] = {}
        for row, seat in enumerate(self._seats):
            groups.setdefault(seat.request.draw_params, []).append(row)
        if len(groups) == 1:
            return [(params, None) for params in groups]
        device = self._table_S.device
        return [(params, torch.tensor(rows, device=device)) for params, rows in groups.items()]

    def _free(self, rows: list[int], *, is_kept: bool) -> list[int]:
        """Free slots; the last ones move up, so that 0 .. N-1 are in use.

        Args:
            rows: in rising order.
            is_kept: whether the keys and values of the freed slots stay.

        Returns:
            Where those of each row lie now, if they are kept.
        """
        if not rows:
            return []
        num_left = len(self._seats) - len(rows)
        holes = [row for row in rows if row < num_left]
        movers = sorted(set(range(num_left, len(self._seats))) - set(rows))
        if holes:
            device = self._table_S.device
            hole_N, mover_N = (
                torch.tensor(holes, device=device),
                torch.tensor(movers, device=device),
            )
            from_N, to_N = (
                (torch.cat([mover_N, hole_N]), torch.cat([hole_N, mover_N]))
                if is_kept
                else (mover_N, hole_N)
            )
            self._slots.move(from_N, to_N, self._longest())
            self._table_S[:, to_N] = self._table_S[:, from_N]
        for hole, mover in zip(holes, movers, strict=True):
            self._seats[hole] = self._seats[mover]
        del self._seats[num_left:]
        self._row_groups = None
        moved = dict(zip(holes, movers, strict=True))
        return [moved.get(row, row) for row in rows]

    def _deliver(self, ended: list[_Ended]) -> None:
        """Copy ended responses to the host, and give complete requests their samples."""
        if not ended:
            return
        device = self._table_S.device
        lane_D = torch.tensor([each.seat.lane for each in ended], device=device)
        longest = max(each.num_tokens for each in ended)
        tokens_DM, logprobs_DM = (
            out.view(self._slots.num_slots, -1)[lane_D, :longest].cpu()
            for out in (self._tokens_out, self._logprobs_out)
        )
        require_finite(logprobs_DM)
        for (seat, num_tokens, row), token_M, logprob_M in zip(
            ended, tokens_DM, logprobs_DM, strict=True
        ):
            request, token_ids = seat.request, token_M[:num_tokens]
            is_stop = int(token_ids[-1]) in request.params.stop_token_ids
            request.samples[seat.index] = Sample(
                token_ids=token_ids,
                logprobs=logprob_M[:num_tokens],
                finish_reason="stop" if is_stop else "length",
                weight_version=self._version,
            )
            if request.is_continued:
                self._kept[row] = request.context + token_ids[:-1].numpy().tobytes()
            if len(request.samples) == len(request.keys) and not request.future.done():
                request.future.set_result([request.samples[i] for i in range(len(request.keys))])
            self.stats.num_generated_tokens += num_tokens
            self._free_lanes.append(seat.lane)
