"""Packs through the stages of a model, by megatron-core's schedules.

Without pipeline parallelism that is a loop; with it 1F1B, or the interleaved schedule where a rank
has several stretches of layers (arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from hybridrl.diagnostics import trace
from hybridrl.workers.train.mcore.megatron_core import get_forward_backward_func
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.packs import Packs

Found = TypeVar("Found")
Forward = Callable[[nn.Module, Pack], Tensor]
"""Computes a pack on one stage: hidden states, or on the last what is to be made of them."""


class Schedule:
    """Runs the stages that this rank has, in step with the ranks that have the others.

    Args:
        stages: one, or the virtual ones in order.
        max_tokens: of a pack, usually.
    """

    def __init__(self, stages: Sequence[nn.Module], *, max_tokens: int) -> None:
        self.stages = list(stages)
        self._max_tokens = max_tokens

    def train(
        self,
        packs: Packs,
        forward: Forward,
        loss_share: Callable[[Pack, Tensor], tuple[Tensor, Found]],
    ) -> list[Found]:
        """Compute all packs forward and backward; gradients are *summed*, over ranks too.

        Args:
            packs: the same on all ranks that share a model; laid out as they are needed.
            forward: computes a stage.
            loss_share: makes of the last stage's output a scalar, and what else it found.

        Returns:
            What ``loss_share`` found, pack by pack, on the last stage; elsewhere nothing.
        """
        return self._run(packs, forward, loss_share, is_training=True)

    @torch.no_grad()
    def score(
        self, packs: Packs, forward: Forward, take: Callable[[Pack, Tensor], Found]
    ) -> list[Found]:
        """Compute all packs forward; returns what ``take`` makes of the last stage's outputs."""

        def keep(pack: Pack, output: Tensor) -> tuple[Tensor, Found]:
            return output, take(pack, output)

        for stage in self.stages:
            stage.eval()
        try:
            return self._run(packs, forward, keep, is_training=False)
        finally:
            for stage in self.stages:
                stage.train()

    def _run(
        self,
        packs: Packs,
        forward: Forward,
        finish: Callable[[Pack, Tensor], tuple[Tensor, Found]],
        *,
        is_training: bool,
    ) -> list[Found]:
        def finish_pack(pack: Pack, output: Tensor) -> tuple[Tensor, Tensor, Found]:
            result, found = finish(pack, output)
            # By 0 tokens megatron-core divides nothing: weights are shares of the global loss.
            return result, torch.zeros((), dtype=torch.int, device=output.device), found

        def step(
            left: Iterator[Pack], stage: nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Found]]]:
            pack = next(left)
            return forward(stage, pack), partial(finish_pack, pack)

        traced = iter(trace.each("microbatch", packs))
        found: list[Found] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[traced, *(iter(packs) for _ in self.stages[1:])],
            model=self.stages,
            num_microbatches=len(packs),
            seq_length=self._max_tokens,
            micro_batch_size=1,
            forward_only=not is_training,
        )
        next(traced, None)  # ends the last one's span
        return found
