"""Training engines whose weights change on their way, as a broken transport would change them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet


def tear(trainer: PolicyEngine, *, word: str, at_pass: int) -> None:
    """Let one pass of the trainer's ``full_weights`` change one number of one tensor.

    Args:
        trainer: the owner of the weights.
        word: the last tensor with this in its name is changed.
        at_pass: 0 for the first time that all weights are asked for.
    """
    whole, passes = trainer.full_weights, count()
    last = [spec.name for spec in trainer.weight_specs() if word in spec.name][-1]

    def full_weights(
        weight_set: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        is_torn = next(passes) == at_pass
        for name, tensor in whole(weight_set, dtype=dtype):
            if is_torn and name == last:
                tensor = tensor.clone()
                tensor.view(-1)[-1] += 1e-3
            yield name, tensor

    trainer.full_weights = full_weights  # type: ignore[method-assign]
