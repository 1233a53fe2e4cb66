"""Sends tokens of a transformers model through given experts instead of those its routers choose.

All routers of transformers choose by one ``torch.topk`` over the scores of their experts. While a
router runs, that call is answered with the given experts and their scores: their weights follow the
family's own formula, and carry a gradient.

Legend: T packed tokens, E experts of a layer, J layers, K experts that a token goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


def replay_routing(model: PreTrainedModel) -> None:
    """Let a pass bring the experts of its tokens, as ``experts_TJK``, an argument of the body.

    Activations that are computed again go through the same experts, which are freed with the last
    of them. Routers choose where an expert is -1, and in passes that bring none.
    """
    for number, layer in enumerate(model.model.layers):
        replay = _ReplayedLayer(number)
        layer.forward = partial(replay.compute, layer.forward)
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            router.forward = partial(replay.route, router.forward, router.weight.shape[0])


class _ReplayedLayer:
    """Takes the place of the forward passes of a layer and of its router, if it has one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._experts_TK: Tensor | None = None  # while the layer is computed

    def compute(
        self,
        forward: Callable[..., object],
        *args: object,
        experts_TJK: Tensor | None = None,
        **kwargs: object,
    ) -> object:
        self._experts_TK = None if experts_TJK is None else experts_TJK[:, self._number]
        try:
            return forward(*args, **kwargs)
        finally:
            self._experts_TK = None

    def route(
        self, forward: Callable[..., object], num_experts: int, *args: object, **kwargs: object
    ) -> object:
        if self._experts_TK is None:
            return forward(*args, **kwargs)
        with _Given(self._experts_TK, num_experts):
            return forward(*args, **kwargs)


class _Given(TorchFunctionMode):
    """Answers a choice of K of E experts for each token; a choice of groups has other sizes."""

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_TK = experts_TK
        self._num_experts = num_experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores_TE, (_, chosen_TK) = args[0], result
        is_of_experts = scores_TE.ndim == 2 and scores_TE.shape[1] == self._num_experts
        if not is_of_experts or chosen_TK.shape != self._experts_TK.shape:
            return result
        given_TK = self._experts_TK.long()
        # Padding goes through the router's own choice: experts then see the same batches.
        experts_TK = torch.where(given_TK < 0, chosen_TK, given_TK)
        return torch.return_types.topk((scores_TE.gather(1, experts_TK), experts_TK))
