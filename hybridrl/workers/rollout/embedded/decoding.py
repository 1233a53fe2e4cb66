"""One generate call: prompts are prefilled once, and responses decode in slots that never idle.

Legend: P prompts, G responses per prompt, B = P * G, S slots, N slots in use (always rows 0 ..
N-1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, row_offsets
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots
from hybridrl.workers.rollout.embedded.model import Forward, require_finite
from hybridrl.workers.rollout.embedded.prefill import PromptQueue
from hybridrl.workers.rollout.protocol import Response, SamplingParams
from hybridrl.workers.rollout.sampling import response_keys, sample, uniforms

# Rows of the slot table: one column per slot.
_TOKEN = 0  # newest token, not yet in the cache
_LENGTH = 1  # tokens in the cache, which is the position of the newest token
_CURSOR = 2  # index of the newest token in the flat output [B * max_response_tokens]
_LAST = 3  # index of the last permitted token

# Rows of a decode step are a multiple of this: oneDNN generates code for each new number of rows,
# which takes longer than some unused rows do.
_ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts of one generate call."""

    num_prefill_tokens: int
    """Prompt tokens run through the model; a group shares its prompt."""

    num_prefill_passes: int
    """Forward passes over prompts."""

    num_decode_steps: int
    """Steps, each of which draws one token per slot in use."""

    num_generated_tokens: int
    """Response tokens over all responses."""

    mean_slot_occupancy: float
    """Slots in use over all slots, in (0, 1], mean over decode steps."""

    def metrics(self) -> Metrics:
        """Describe the call under declared names."""
        num_steps = float(self.num_decode_steps)
        return {
            "rollout/decode_steps": Sum(num_steps),
            "rollout/slot_occupancy": Mean(self.mean_slot_occupancy * num_steps, num_steps),
        }


class Decoding:
    """Samples all responses to a batch of prompts. Used once.

    The host keeps a mirror of the slot table (response and first step of each slot), so that a step
    waits for the device only once: to learn which responses have ended.
    """

    def __init__(
        self,
        forward: Forward,
        slots: KVSlots,
        *,
        vocab_size: int,
        prompts: PromptBatch,
        sampling: SamplingParams,
        on_step: Callable[[int], None],
    ) -> None:
        """Prepare.

        Args:
            forward: runs the model.
            slots: its keys and values.
            vocab_size: V of the logits.
            prompts: at least one.
            sampling: how to draw, and when to stop.
            on_step: gets the number of unfinished responses before each step.
        """
        device = slots.kv_YSJCD.device
        group_size = sampling.num_responses_per_prompt
        offsets: list[int] = row_offsets(prompts.token_ids_PL).tolist()
        token_T = prompts.token_ids_PL.values().to(device)
        lengths = [end - begin for begin, end in pairwise(offsets)]
        num_responses = len(lengths) * group_size

        self._forward = forward
        self._slots = slots
        self._sampling = sampling
        self._on_step = on_step
        self._queue = PromptQueue(forward, slots, token_T=token_T, offsets=offsets)
        self._is_stop_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._is_stop_V[list(sampling.stop_token_ids)] = True
        length_B = torch.tensor(lengths, device=device).repeat_interleave(group_size)
        self._columns_4B = self._starting_columns(length_B)
        self._uniforms = self._draw_uniforms(length_B, prompts.seed_P.to(device))
        self._table_4S = torch.zeros(4, slots.num_slots, dtype=torch.int64, device=device)
        out_size = num_responses * sampling.max_response_tokens
        self._tokens_out = torch.zeros(out_size, dtype=torch.int64, device=device)
        self._logprobs_out = torch.zeros(out_size, dtype=torch.float32, device=device)

        self._step = 0
        self._seated: list[int] = []  # responses of slots 0 .. N-1
        self._next_response = 0
        self._prompt_lengths = [length for length in lengths for _ in range(group_size)]
        self._first_steps = [0] * num_responses  # when each response's first token was drawn
        self._num_tokens = [0] * num_responses

    def _starting_columns(self, length_B: Tensor) -> Tensor:
        """Return the slot table's column with which each response starts, int64 [4, B]."""
        max_tokens = self._sampling.max_response_tokens
        cursor_B = torch.arange(len(length_B), device=length_B.device) * max_tokens
        room_B = (self._slots.max_tokens - length_B).clamp_(max=max_tokens)
        no_token_B = torch.zeros_like(length_B)
        return torch.stack([no_token_B, length_B, cursor_B, cursor_B + room_B - 1])

    def _draw_uniforms(self, length_B: Tensor, seed_P: Tensor) -> Tensor:
        """Return the random number of each index of the flat output: all at once costs least."""
        group_size = self._sampling.num_responses_per_prompt
        sibling_B = torch.arange(len(length_B), device=length_B.device) % group_size
        key_B = response_keys(seed_P.repeat_interleave(group_size), sibling_B)
        token_M = torch.arange(self._sampling.max_response_tokens, device=length_B.device)
        return uniforms(key_B[:, None], length_B[:, None] + token_M).flatten()

    @torch.inference_mode()
    def run(self) -> RolloutStats:
        """Sample until every response has ended.

        Raises:
            EngineError: a logit is not finite, or ``on_step`` raises.
        """
        logits_NV, num_slots_used = None, 0
        while (logits_NV := self._fill_free_slots(logits_NV)) is not None:
            self._on_step(len(self._num_tokens) - self._next_response + len(self._seated))
            num_slots_used += len(self._seated)
            self._retire(self._draw(logits_NV))
            logits_NV = self._decode() if self._seated else None
            self._step += 1
        require_finite(self._logprobs_out)
        return RolloutStats(
            num_prefill_tokens=sum(self._prompt_lengths) // self._sampling.num_responses_per_prompt,
            num_prefill_passes=self._queue.num_passes,
            num_decode_steps=self._step,
            num_generated_tokens=sum(self._num_tokens),
            mean_slot_occupancy=num_slots_used / (self._step * self._slots.num_slots),
        )

    def describe_queue(self) -> str:
        """Report how many responses run and wait; for another thread, while this one samples."""
        num_waiting = len(self._num_tokens) - self._next_response
        return (
            f"{len(self._seated)} responses running, {num_waiting} waiting, "
            f"of {len(self._num_tokens)}, at decode step {self._step}"
        )

    def responses(self) -> list[Response]:
        """Return the responses, on the CPU: views of two tensors without another writer.

        Not under ``inference_mode``, whose tensors autograd refuses.
        """
        tokens_out, logprobs_out = self._tokens_out.cpu(), self._logprobs_out.cpu()
        stop_token_ids = frozenset(self._sampling.stop_token_ids)
        responses = []
        for response, num_tokens in enumerate(self._num_tokens):
            begin = response * self._sampling.max_response_tokens
            token_ids = tokens_out[begin : begin + num_tokens]
            logprobs = logprobs_out[begin : begin + num_tokens]
            is_truncated = int(token_ids[-1]) not in stop_token_ids
            responses.append(Response(token_ids, logprobs, is_truncated))
        return responses

    def _fill_free_slots(self, logits_NV: Tensor | None) -> Tensor | None:
        """Give slots to waiting responses, behind the N used ones; None if no response is left.

        Their first token is drawn from the prompt's last logits, in the same step as the next token
        of the others: a slot is never idle.
        """
        group_size = self._sampling.num_responses_per_prompt
        logits = [] if logits_NV is None else [logits_NV]
        num_free = self._slots.num_slots - len(self._seated)
        while num_free > 0 and self._next_response < len(self._num_tokens):
            prefilled = self._queue.pass_with(self._next_response // group_size)
            num_ready = prefilled.end * group_size - self._next_response
            prompt_N = self._seat(min(num_free, num_ready))
            row_N = prompt_N - prefilled.begin
            self._slots.place(len(self._seated) - len(row_N), prefilled.kv_YRJLD, row_N)
            logits.append(prefilled.logits_RV[row_N])
            num_free -= len(row_N)
        return torch.cat(logits) if logits else None

    def _seat(self, num_new: int) -> Tensor:
        """Give the next responses the next free slots; return their prompts, int64 [num_new]."""
        begin, end, first_row = (
            self._next_response,
            self._next_response + num_new,
            len(self._seated),
        )
        self._table_4S[:, first_row : first_row + num_new] = self._columns_4B[:, begin:end]
        self._seated.extend(range(begin, end))
        self._first_steps[begin:end] = [self._step] * num_new
        self._next_response = end
        response_N = torch.arange(begin, end, device=self._table_4S.device)
        return response_N // self._sampling.num_responses_per_prompt

    def _draw(self, logits_NV: Tensor) -> Tensor:
        """Draw and store one token for each running response; return which ended, bool [N]."""
        table_4N = self._table_4S[:, : len(self._seated)]
        cursor_N = table_4N[_CURSOR]
        token_N, logprob_N = sample(logits_NV, self._uniforms[cursor_N], self._sampling)
        table_4N[_TOKEN] = token_N
        self._tokens_out[cursor_N] = token_N
        self._logprobs_out[cursor_N] = logprob_N
        return self._is_stop_V[token_N] | (cursor_N == table_4N[_LAST])

    def _retire(self, is_done_N: Tensor) -> None:
        """Free the slots of ended responses; the last ones move up, so that 0 .. N-1 are in use."""
        done = is_done_N.nonzero()[:, 0].tolist()  # the step's only wait for the device
        if not done:
            return
        for row in done:
            response = self._seated[row]
            self._num_tokens[response] = self._step - self._first_steps[response] + 1
        num_left = len(self._seated) - len(done)
        holes = [row for row in done if row < num_left]
        movers = sorted(set(range(num_left, len(self._seated))) - set(done))
        if holes:
            from_N = torch.tensor(movers, device=is_done_N.device)
            to_N = torch.tensor(holes, device=is_done_N.device)
            self._slots.move(from_N, to_N, self._longest())
            self._table_4S[:, to_N] = self._table_4S[:, from_N]
        for hole, mover in zip(holes, movers, strict=True):
            self._seated[hole] = self._seated[mover]
        del self._seated[num_left:]

    def _decode(self) -> Tensor:
        """Run the newest token of each running response; return the next logits, [N, V]."""
        num_seated = len(self._seated)
        num_rows = min(-(-num_seated // _ROW_MULTIPLE) * _ROW_MULTIPLE, self._slots.num_slots)
        table_4R = self._table_4S[:, :num_rows]  # the last rows may be unused: they decode in vain
        kv_step = self._slots.decode_step(table_4R[_LENGTH], self._longest())
        logits_RV = self._forward(table_4R[_TOKEN], kv_step)
        table_4R[_LENGTH : _CURSOR + 1, :num_seated] += 1
        return logits_RV[:num_seated]

    def _longest(self) -> int:
        """Return the length, in tokens, of the longest running response with its prompt."""
        starts = [self._prompt_lengths[r] - self._first_steps[r] for r in self._seated]
        return max(starts) + self._step + 1
