"""Continuous batching: requests join and leave while their responses decode in slots.

Legend: S slots, N slots in use (always rows 0 .. N-1), V vocabulary, C tokens of a slot, X sets of
stop tokens, D responses that ended in a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice, takewhile

import torch
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.images import position_shift
from hybridrl.sampler import Sample, SampleRequest, SamplingMasks, Scoring, interrupted_sample
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots
from hybridrl.workers.rollout.embedded.model import Forward, LoadedAdapters, require_finite
from hybridrl.workers.rollout.embedded.prefill import KeptPrefixes, Prefilled, plan_pass, prefill
from hybridrl.workers.rollout.embedded.requests import (
    Ended,
    Request,
    RolloutStats,
    Seat,
    draw_uniforms,
)
from hybridrl.workers.rollout.event_loop import Progress
from hybridrl.workers.rollout.sampling import DrawParams, sample, sample_with_masks, score

# Rows of the slot table: one column per slot.
_TOKEN = 0  # newest token, not yet in the cache
_LENGTH = 1  # tokens in the cache, which is the position of the newest token
_CURSOR = 2  # index of the newest token in the flat output [S * C]
_LAST = 3  # index of the last permitted token
_STOPS = 4  # index of the response's set of stop tokens, times V
_SHIFT = 5  # what the context's images add to the positions of words behind them
_NUM_COLUMNS = 6

# Lanes of the output beyond the slots, at most: ended responses wait there for their group, because
# to copy them one by one takes longer.
_NUM_SPARE_LANES = 64

# Rows of a decode step are a multiple of this: oneDNN generates code for each new number of rows,
# which takes longer than some unused rows do.
_ROW_MULTIPLE = 8

# Decode steps that a request waits for others while fewer than so many wait. A prefill pass of some
# tokens takes as long as a decode step, and turns of conversations come one by one.
_MAX_DELAY = 3
_ENOUGH_REQUESTS = 32


class Decoding:
    """Decodes the requests of one program. Used once.

    The host keeps a mirror of the slot table, so that a step waits for the device only once: to
    learn which responses have ended. Requests get slots in the order in which they came.
    """

    def __init__(
        self,
        forward: Forward,
        slots: KVSlots,
        *,
        vocab_size: int,
        version: int,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        device = slots.kv_YSJCD.device
        self.stats = RolloutStats(slots.num_slots)
        self._forward = forward
        self._slots = slots
        self._adapters = adapters
        self.version = version
        self._waiting: deque[Request] = deque()
        self._seats: list[Seat] = []  # of slots 0 .. N-1
        num_lanes = slots.num_slots + min(slots.num_slots, _NUM_SPARE_LANES)
        self._free_lanes = list(reversed(range(num_lanes)))
        self._ended: list[Ended] = []  # not delivered yet
        self._masks: dict[int, list[Tensor]] = {}  # int32, by lane, of each of its tokens
        self._kept = KeptPrefixes(slots.num_slots)
        self._table_S = torch.zeros(_NUM_COLUMNS, slots.num_slots, dtype=torch.int64, device=device)
        out_size = num_lanes * slots.max_tokens
        self._tokens_out = torch.zeros(out_size, dtype=torch.int64, device=device)
        self._logprobs_out = torch.zeros(out_size, dtype=torch.float32, device=device)
        self._uniforms = torch.zeros(out_size, dtype=torch.float64, device=device)
        outputs = (self._tokens_out, self._logprobs_out)
        self._outputs = [out.view(num_lanes, slots.max_tokens) for out in outputs]
        self._is_stop_XV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._row_groups: list[tuple[DrawParams, Tensor | None]] | None = None
        self._step = 0
        self._has_cancelled = self._is_interrupted = False
        self._failure: Exception | None = None

    def _is_kept(self, request: Request) -> bool:
        """Whether a later context may begin with what the slots hold; states cannot be cut."""
        return request.asked.is_turn and not self._slots.states.tensors

    def submit(self, request: Request) -> None:
        """Queue a request; its future gets the result. A DriftError if its adapter is not there."""
        if self._failure is not None:
            raise EngineError(f"the engine samples no more, because it failed: {self._failure}")
        if self._adapters is not None:
            request.adapter = self._adapters.of(request.asked.version)
        request.step = self._step
        request.future.add_done_callback(self._note_cancelled)
        self.stats.num_context_tokens += request.num_tokens * len(request.asked.keys)
        self._waiting.append(request)

    @torch.no_grad()
    def score(self, request: SampleRequest, scoring: Scoring) -> Sample:
        """Score tokens of a context by one pass, for which no slot is needed."""
        tokens_L, (begin, num_likeliest) = request.token_ids, scoring
        if self._adapters is not None:
            self._adapters.use([self._adapters.of(request.version)])
        contexts, at = [(tokens_L, request.images)], torch.arange(begin - 1, len(tokens_L) - 1)
        logits_NV = prefill(self._forward, self._slots, contexts, [None], logits_at=at).logits_RV
        said_JN = score(logits_NV, tokens_L[begin:], request.params.temperature, num_likeliest)
        return Sample(tokens_L[begin:], said_JN[0], "length", self.version, teacher_JL=said_JN)

    def _note_cancelled(self, future: asyncio.Future[list[Sample]]) -> None:
        self._has_cancelled |= future.cancelled()

    def describe(self) -> str:
        """Report what runs and waits; for another thread, while this one samples."""
        return (
            f"{len(self._seats)} responses running, {len(self._waiting)} requests waiting, "
            f"at decode step {self._step}"
        )

    def take_stats(self) -> RolloutStats:
        """Return the counts since the last call; for another thread, so a step may be in neither.

        ``stats`` are those since then.
        """
        stats, self.stats = self.stats, RolloutStats(self._slots.num_slots)
        return stats

    def step(self) -> Progress:
        """Draw one token for each running response, or end all of them."""
        if self._failure is not None or not (self._seats or self._waiting):
            self._is_interrupted = False
            return Progress.NO_WORK
        try:
            if self._is_interrupted:
                self._is_interrupted = False
                self._end_all()
                return Progress.ANSWERED
            with torch.inference_mode():
                is_complete = self._advance()
            num_free = self._slots.num_slots - len(self._seats)
            if is_complete or len(self._free_lanes) < num_free:
                self._deliver()  # not under inference_mode, whose tensors autograd refuses
        except Exception as error:
            self._failure = error
            raise
        return Progress.ANSWERED if is_complete else Progress.WORKED

    def interrupt(self) -> None:
        """Let the next step end all responses at their present token, and sample none."""
        self._is_interrupted = True

    def _advance(self) -> bool:
        """Do the step; return whether a request has all its responses."""
        if self._has_cancelled:
            self._drop_cancelled()
        logits_NV = self._fill_free_slots(self._decode() if self._seats else None)
        if logits_NV is None:
            return False
        self.stats.num_decode_steps += 1
        self.stats.num_slots_used += len(self._seats)
        rows = self._draw(logits_NV).nonzero()[:, 0].tolist()  # the only wait for the device
        seats = [self._seats[row] for row in rows]
        is_complete = is_kept = False
        for seat in seats:
            seat.request.num_ended += 1
            is_complete |= seat.request.num_ended == len(seat.request.asked.keys)
            is_kept |= self._is_kept(seat.request)
        self._ended += [
            Ended(seat, self._step - seat.first_step + 1, row)
            for seat, row in zip(seats, self._free(rows, is_kept=is_kept), strict=True)
        ]
        self._step += 1
        return is_complete

    def _end_all(self) -> None:
        """Free all slots; requests that wait get no tokens for responses without a slot."""
        with torch.inference_mode():
            self._drop_cancelled()
            seats = list(self._seats)
            is_kept = any(self._is_kept(seat.request) for seat in seats)
            rows = self._free(list(range(len(seats))), is_kept=is_kept)
        self._ended += [
            Ended(seat, self._step - seat.first_step, row, is_interrupted=True)
            for seat, row in zip(seats, rows, strict=True)
        ]
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            request.prefilled = None
            unseated = range(request.num_seated, len(request.asked.keys))
            nothing = interrupted_sample(self._version_of(request))
            request.samples.update(dict.fromkeys(unseated, nothing))
        if self._ended:
            self._deliver()
        for request in waiting:
            request.answer_if_complete()

    def _drop_cancelled(self) -> None:
        self._has_cancelled = False
        self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
        rows = [row for row, seat in enumerate(self._seats) if seat.request.future.cancelled()]
        lanes = [self._seats[row].lane for row in rows]
        self._free_lanes += lanes
        for lane in lanes:
            self._masks.pop(lane, None)
        self._free(rows, is_kept=False)

    def _decode(self) -> Tensor:
        """Run the newest token of each running response; return the next logits, [N, V]."""
        num_seated = len(self._seats)
        num_rows = min(-(-num_seated // _ROW_MULTIPLE) * _ROW_MULTIPLE, self._slots.num_slots)
        table_R = self._table_S[:, :num_rows]  # the last rows may be unused: they decode in vain
        if self._adapters is not None:
            self._adapters.use([seat.request.adapter for seat in self._seats])
        shift_R = None if self._slots.images is None else table_R[_SHIFT]
        kv_step = self._slots.decode_step(table_R[_LENGTH], self._longest(), shift_R)
        logits_RV = self._forward(table_R[_TOKEN], kv_step)
        table_R[_LENGTH : _CURSOR + 1, :num_seated] += 1
        return logits_RV[:num_seated]

    def _longest(self) -> int:
        """Return the length, in tokens, of the longest running response with its context."""
        return max([seat.start for seat in self._seats]) + self._step  # a list is faster

    def _fill_free_slots(self, logits_NV: Tensor | None) -> Tensor | None:
        """Give slots to waiting responses, behind the N used ones; None if no response runs.

        Their first token is drawn from the context's last logits, in the same step as the next
        token of the others.
        """
        logits = [] if logits_NV is None else [logits_NV]
        while self._waiting and len(self._seats) < self._slots.num_slots:
            first = self._waiting[0]
            is_late = self._step >= first.step + _MAX_DELAY
            is_enough = len(self._waiting) >= _ENOUGH_REQUESTS or not self._seats
            if first.prefilled is None and not (is_late or is_enough):
                break  # for a pass with later requests
            prefilled = first.prefilled or self._prefill()
            first_row = len(self._seats)
            row_N = self._seat(prefilled)
            self._slots.place(first_row, prefilled.kv_YRJLD, prefilled.states, row_N)
            logits.append(prefilled.logits_RV[row_N])
        return torch.cat(logits) if logits else None

    def _prefill(self) -> Prefilled:
        """Run the contexts of the first waiting requests, of one adapter, in one pass."""
        adapter = self._waiting[0].adapter  # layers that pad rows take all tokens for those of one
        alike = takewhile(lambda each: each.adapter is adapter, self._waiting)
        rows = plan_pass((each.context, each.num_tokens) for each in alike)
        requests = list(islice(self._waiting, len(rows)))
        first = dict(zip(reversed(rows), reversed(requests), strict=True))
        distinct = [first[row] for row in range(len(first))]
        prefixes = [self._kept.find(each.asked.version, each.context) for each in distinct]
        if self._adapters is not None:
            self._adapters.use([adapter])
        prefilled = prefill(
            self._forward,
            self._slots,
            [(each.asked.token_ids, each.asked.images) for each in distinct],
            prefixes,
        )
        for request, row in zip(requests, rows, strict=True):
            request.prefilled, request.row = prefilled, row
        draw_uniforms(requests, max_tokens=self._slots.max_tokens, device=self._table_S.device)
        self.stats.num_prefill_passes += 1
        self.stats.num_prefill_tokens += sum(each.num_tokens for each in distinct)
        self.stats.num_prefill_tokens -= sum(prefix.num_tokens for prefix in prefixes if prefix)
        return prefilled

    def _seat(self, prefilled: Prefilled) -> Tensor:
        """Give free slots to waiting responses of one pass, in order; return their rows in it."""
        rows: list[int] = []
        columns: list[tuple[int, ...]] = []
        uniforms: list[Tensor] = []
        first_row, num_free = len(self._seats), self._slots.num_slots - len(self._seats)
        while self._waiting and self._waiting[0].prefilled is prefilled and len(rows) < num_free:
            request = self._waiting[0]
            count = min(num_free - len(rows), len(request.asked.keys) - request.num_seated)
            begin = request.num_seated
            uniforms.append(request.uniforms_GM[begin : begin + count])
            columns += [self._take_slot(request) for _ in range(count)]
            rows += [request.row] * count
            if request.num_seated == len(request.asked.keys):
                self._waiting.popleft().prefilled = None
        device = self._table_S.device
        if moves := self._kept.give_up(first_row, len(self._seats)):
            from_N, to_N, length_N = torch.tensor(moves).T
            from_N, to_N = from_N.to(device), to_N.to(device)
            self._slots.move(from_N, to_N, int(length_N.max()))
            # With the length: a step that decodes an unused row writes behind it.
            self._table_S[:, to_N] = self._table_S[:, from_N]
        table_N = self._table_S[:, first_row : len(self._seats)]
        table_N[:] = torch.tensor(columns, device=device).T
        uniform_NM = torch.cat(uniforms)
        lane_N = table_N[_CURSOR] // self._slots.max_tokens
        lanes = self._uniforms.view(-1, self._slots.max_tokens)
        lanes[lane_N, : uniform_NM.shape[1]] = uniform_NM
        self._row_groups = None
        return torch.tensor(rows, device=device)

    def _take_slot(self, request: Request) -> tuple[int, ...]:
        params, length, number = request.asked.params, request.num_tokens, request.num_seated
        lane = self._free_lanes.pop()
        self._seats.append(Seat(request, number, lane, self._step, length - self._step))
        request.num_seated += 1
        cursor = lane * self._slots.max_tokens
        last = cursor + min(params.max_new_tokens, self._slots.max_tokens - length) - 1
        vocab_size = self._is_stop_XV.shape[1]
        stop_set = self._stop_sets.setdefault(params.stop_token_ids, len(self._stop_sets))
        if stop_set == len(self._is_stop_XV):  # a new one
            is_stop_1V = self._is_stop_XV.new_zeros(1, vocab_size)
            is_stop_1V[0, list(params.stop_token_ids)] = True
            self._is_stop_XV = torch.cat([self._is_stop_XV, is_stop_1V])
        shift = position_shift(request.asked.images)
        return 0, length, cursor, last, stop_set * vocab_size, shift

    def _draw(self, logits_NV: Tensor) -> Tensor:
        """Draw and store one token for each running response; return which ended, bool [N]."""
        table_N = self._table_S[:, : len(self._seats)]
        cursor_N = table_N[_CURSOR]
        token_N, logprob_N = self._sample(logits_NV, self._uniforms[cursor_N])
        table_N[_TOKEN] = token_N
        self._tokens_out[cursor_N] = token_N
        self._logprobs_out[cursor_N] = logprob_N
        is_last_N = cursor_N == table_N[_LAST]
        if len(self._is_stop_XV) == 1:
            return is_last_N.logical_or_(self._is_stop_XV[0, token_N])
        return is_last_N.logical_or_(self._is_stop_XV.view(-1)[table_N[_STOPS] + token_N])

    def _sample(self, logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
        """Draw with each response's own parameters; return tokens and log-probs, [N]."""
        if self._row_groups is None:
            self._row_groups = self._group_rows()
        params, row_M = self._row_groups[0]
        if row_M is None and not params.returns_masks:
            return sample(logits_NV, uniform_N, params)
        token_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        logprob_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
        for params, row_M in self._row_groups:
            at_M = slice(None) if row_M is None else row_M
            given = logits_NV[at_M], uniform_N[at_M], params
            if params.returns_masks:
                token_N[at_M], logprob_N[at_M], masks = sample_with_masks(*given)
                rows = range(len(token_N)) if row_M is None else row_M.tolist()
                ids_of_rows = torch.split(masks.ids_M, masks.counts_n.tolist())
                for row, ids in zip(rows, ids_of_rows, strict=True):
                    self._masks.setdefault(self._seats[row].lane, []).append(ids)
            else:
                token_N[at_M], logprob_N[at_M] = sample(*given)
        return token_N, logprob_N

    def _group_rows(self) -> list[tuple[DrawParams, Tensor | None]]:
        """Return the rows that draw with equal parameters, int64 [M]; None: all rows do."""
        distinct = {seat.request.draw_params for seat in self._seats}
        if len(distinct) == 1:
            return [(params, None) for params in distinct]
        groups: dict[DrawParams, list[int]] = {}
        for row, seat in enumerate(self._seats):
            groups.setdefault(seat.request.draw_params, []).append(row)
        device = self._table_S.device
        return [(params, torch.tensor(rows, device=device)) for params, rows in groups.items()]

    def _free(self, rows: list[int], *, is_kept: bool) -> list[int]:
        """Free slots, in rising order; the last ones move up, so that 0 .. N-1 are in use.

        Return where the keys and values of each freed row lie now, if they are kept.
        """
        if not rows:
            return []
        num_left = len(self._seats) - len(rows)
        holes = [row for row in rows if row < num_left]
        movers = sorted(set(range(num_left, len(self._seats))) - set(rows))
        if holes:
            device = self._table_S.device
            to_N = torch.tensor(holes, device=device)
            from_N = torch.tensor(movers, device=device)
            if is_kept:  # they change places
                from_N, to_N = torch.cat([from_N, to_N]), torch.cat([to_N, from_N])
            self._slots.move(from_N, to_N, self._longest())
            self._table_S[:, to_N] = self._table_S[:, from_N]
        for hole, mover in zip(holes, movers, strict=True):
            self._seats[hole] = self._seats[mover]
        del self._seats[num_left:]
        self._row_groups = None
        moved = dict(zip(holes, movers, strict=True))
        return [moved.get(row, row) for row in rows]

    def _deliver(self) -> None:
        """Copy ended responses to the host, and give complete requests their samples."""
        ended, self._ended = self._ended, []
        device = self._table_S.device
        lane_D = torch.tensor([each.seat.lane for each in ended], device=device)
        longest = max(each.num_tokens for each in ended)
        tokens_DM, logprobs_DM = (
            out_SC[:, :longest].index_select(0, lane_D).cpu() for out_SC in self._outputs
        )
        require_finite(logprobs_DM)
        for (seat, num_tokens, row, is_cut), token_M, logprob_M in zip(
            ended, tokens_DM.unbind(), logprobs_DM.unbind(), strict=True
        ):
            request, token_ids = seat.request, token_M[:num_tokens]
            is_stop = int(token_ids[-1]) in request.asked.params.stop_token_ids
            masks = None
            if request.draw_params.returns_masks:
                ids = self._masks.pop(seat.lane)
                counts_n = torch.tensor([len(i) for i in ids], dtype=torch.int32)
                masks = SamplingMasks(torch.cat(ids), counts_n)
            request.samples[seat.number] = Sample(
                token_ids=token_ids,
                logprobs=logprob_M[:num_tokens],
                finish_reason="interrupted" if is_cut else "stop" if is_stop else "length",
                weight_version=self._version_of(request),
                masks=masks,
            )
            if self._is_kept(request):
                known = request.context + token_ids[:-1].numpy().tobytes()
                self._kept.keep(row, request.asked.version, known)
            request.answer_if_complete()
            self._free_lanes.append(seat.lane)

    def _version_of(self, request: Request) -> int:
        version = None if self._adapters is None else request.asked.version
        return self.version if version is None else version
