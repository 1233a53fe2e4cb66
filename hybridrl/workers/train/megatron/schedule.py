"""Run micro-batches through the stages of a model, by megatron-core's schedules.

Without pipeline parallelism that is a loop; with it 1F1B, or the interleaved schedule where a rank
has several virtual stages (arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from hybridrl.diagnostics import trace
from hybridrl.workers.train.backend import Compute, Output
from hybridrl.workers.train.megatron.megatron_core import get_forward_backward_func, parallel_state
from hybridrl.workers.train.microbatcher import MicroBatch, MicroBatches

_OF_LAST_TOKENS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")

Taken = TypeVar("Taken")  # the result of each micro-batch, on the last stage


class Schedule:
    """Runs the stages of this rank, together with the ranks of the other stages.

    There is one, or the virtual ones in order; ``max_tokens`` are those of a micro-batch, usually.
    """

    def __init__(self, stages: Sequence[nn.Module], *, max_tokens: int) -> None:
        self.stages = list(stages)
        self._max_tokens = max_tokens

    def run(
        self,
        microbatches: MicroBatches,
        compute: Compute,
        finish: Callable[[MicroBatch, Tensor], tuple[Tensor, Taken]],
        *,
        is_training: bool,
    ) -> list[Taken]:
        """Compute forward and, in training, backward; gradients are *summed*, over ranks too.

        Args:
            microbatches: the same on all ranks that share a model; laid out one by one.
            finish: computes from the last stage's output a scalar and a further result.

        Returns:
            The further results by micro-batch on the last stage; an empty list elsewhere.
        """

        def finish_one(microbatch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Taken]:
            result, taken = finish(microbatch, output)
            # With 0 tokens megatron-core does not divide: weights are shares of the global loss.
            return result, torch.zeros((), dtype=torch.int, device=output.device), taken

        def step(
            remaining: Iterator[MicroBatch], stage: nn.Module
        ) -> tuple[Output, Callable[[Tensor], tuple[Tensor, Tensor, Taken]]]:
            microbatch = next(remaining)
            return compute(stage, microbatch.tokens), partial(finish_one, microbatch)

        traced = iter(trace.each("microbatch", microbatches))
        for stage in self.stages:
            stage.train(is_training)
        try:
            with torch.set_grad_enabled(is_training):
                all_taken: list[Taken] = get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=[traced, *(iter(microbatches) for _ in self.stages[1:])],
                    model=self.stages,
                    num_microbatches=len(microbatches),
                    seq_length=self._max_tokens,
                    micro_batch_size=1,
                    forward_only=not is_training,
                )
        finally:
            for stage in self.stages:
                stage.train()
            self._forget_tokens()
        next(traced, None)  # ends the last one's span
        return all_taken

    def _forget_tokens(self) -> None:
        """Drop what megatron-core keeps of the last micro-batch, beside the KV cache else.

        Sequence-parallel gathers keep their largest result: 136 MiB for 17,406 tokens of Qwen3-8B.
        A dispatcher keeps its layer's routes, and with them the graph behind: 37 MiB for each layer
        of Qwen3-30B-A3B.
        """
        parallel_state.get_global_memory_buffer().buffer.clear()
        modules = (module for stage in self.stages for module in stage.modules())
        for dispatcher in (vars(module).get("token_dispatcher") for module in modules):
            if dispatcher is not None:
                kept = vars(dispatcher)
                kept.update({name: None for name in _OF_LAST_TOKENS if name in kept})
