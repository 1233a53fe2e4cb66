"""Routers of megatron-core that balance the load of experts, and that replay the sampler's choice.

Megatron-core's own replay keeps experts in a queue for backward passes. Its own load-balance loss
is divided by tokens after a step, and here gradients are never divided. So a layer hands the
routing of the micro-batch to its router before each call. The router gets the same one when
activations are recomputed, whatever micro-batches the schedule has in between.

Legend: T packed tokens of this rank (with sequence parallelism a part of the micro-batch), E
experts, J layers, K experts that a token goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import row_offsets
from hybridrl.errors import DataError
from hybridrl.models.architecture import Architecture
from hybridrl.models.packed import PackLayout
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.megatron.balance import LoadBalance
from hybridrl.workers.train.megatron.megatron_core import (
    PackedSeqParams,
    ProcessGroupCollection,
    TopKRouter,
    TransformerConfig,
)
from hybridrl.workers.train.megatron.parallel import GroupRank


@dataclass(frozen=True, slots=True)
class Routing:
    """A micro-batch as the routers of a stage see it."""

    is_real_T: Tensor
    """bool, False for padding."""

    num_tokens: int
    """Tokens of the micro-batch without padding, on all ranks that share it."""

    experts_TJK: Tensor | None
    """Integers, the experts of each token in the layers of the stage; the router chooses where they
    are -1, and everywhere if this is None."""

    first_layer: int
    """Number, from 0, of the stage's first layer in the full model."""

    balance: LoadBalance | None
    """Of the current optimizer step."""


@dataclass
class PackedRows(PackedSeqParams):
    """A micro-batch on its way through megatron-core to the layers.

    Its ``qkv_format`` stays None, so megatron-core's own code sees one sequence.
    """

    layout: PackLayout | None = None
    """Where rows begin and end, for the attention."""

    routing: Routing | None = None
    """For routers; None in a dense model."""


def route(
    tokens: PackedTokens,
    *,
    layers: range,
    shares: GroupRank | None,
    balance: LoadBalance | None,
    device: torch.device,
) -> Routing:
    """Describe a micro-batch to the routers of a stage.

    Args:
        layers: of the stage, by their numbers in the full model.
        shares: this rank among those that each have an equal part of the tokens; None if all have
            all of them.
        balance: of the optimizer step; None if the model does not learn.
    """
    num_all = len(tokens.token_ids_T)
    begin, end = 0, num_all
    if shares is not None:
        begin, end = (edge * num_all // shares.size for edge in (shares.rank, shares.rank + 1))
    experts_TJK = tokens.experts_TJK
    if experts_TJK is not None:
        experts_TJK = experts_TJK[begin:end, layers.start : layers.stop].to(device)
    return Routing(
        is_real_T=torch.arange(begin, end, device=device) < num_all - tokens.num_padding,
        num_tokens=tokens.num_row_tokens,
        experts_TJK=experts_TJK,
        first_layer=layers.start,
        balance=balance,
    )


class Router(TopKRouter):
    """A router that chooses the experts of tokens, or replays given ones.

    In either case their weights come from its own logits, and carry a gradient.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: object,  # of newer versions
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.router_replay = _Replay()
        self.current: Routing | None = None

    def routing(
        self, logits_T1E: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of experts, 0 for unused ones, and a mask of used ones: [T, E]."""
        current, layer = self.current, self.layer_number - 1
        if current is None:
            raise TypeError("a router was called outside of its RoutedLayer")
        if current.experts_TJK is not None:
            self.router_replay.experts_TK = current.experts_TJK[
                :, layer - current.first_layer
            ].long()
        weights_TE, is_used_TE = super().routing(logits_T1E, padding_mask)
        self.router_replay.experts_TK = None
        # Once per micro-batch: of recomputed activations only the second time.
        if current.balance is None or not (self.training and torch.is_grad_enabled()):
            return weights_TE, is_used_TE
        weights_TE = current.balance.add(
            weights_TE,
            scores_TE=logits_T1E[:, 0].float().softmax(dim=-1) * current.is_real_T[:, None],
            is_used_TE=is_used_TE & current.is_real_T[:, None],
            layer=layer,
            num_tokens=current.num_tokens,
            group=self.tp_cp_group,
        )
        return weights_TE, is_used_TE


class _Replay:
    """Replaces megatron-core's RouterReplay: returns scores and experts of each token."""

    def __init__(self) -> None:
        self.experts_TK: Tensor | None = None

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        num_experts: int,
        num_groups: int | None,
        num_groups_per_token: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the experts of each token, both [T, K]."""
        best_TK, experts_TK = choose(scores_TE, num_experts, num_groups, num_groups_per_token)
        if self.experts_TK is None:
            return best_TK, experts_TK
        # Padding goes through the router's own choice: experts then see the same batches.
        experts_TK = torch.where(self.experts_TK < 0, experts_TK, self.experts_TK)
        return scores_TE.gather(1, experts_TK), experts_TK


def require_routes(experts_BLJK: Tensor | None, architecture: Architecture) -> Tensor:
    """Check that rows name experts of this model, and return them.

    Args:
        experts_BLJK: jagged integers, the experts of all tokens but the last of each row.

    Raises:
        DataError: rows without experts, or with those of another model.
    """
    remedy = "set rollout.routed_experts=true, or megatron.replay_routing=false"
    if experts_BLJK is None:
        raise DataError(f"the rows do not contain the experts of their tokens; {remedy}")
    experts = architecture.experts
    num_experts, num_per_token = (
        (0, 0) if experts is None else (experts.num_experts, experts.num_per_token)
    )
    shape, expected = experts_BLJK.values().shape[1:], (architecture.num_layers, num_per_token)
    if shape != expected:
        raise DataError(
            f"the rows contain experts of {shape[0]} layers, {shape[1]} per token, and the model "
            f"has {expected[0]} layers, {expected[1]} per token; {remedy}"
        )
    ends_B = row_offsets(experts_BLJK)[1:]
    sparse = [] if experts is None else list(experts.sparse_layers)
    used = experts_BLJK.values()[:, sparse]
    is_wrong_T = ((used < 0) | (used >= num_experts)).flatten(1).any(dim=1)
    is_wrong_T[ends_B - 1] = False  # the last token was not an input
    if is_wrong_T.any():
        index = int(is_wrong_T.nonzero()[0])
        row = int((ends_B <= index).sum())
        raise DataError(
            f"token {index - int(row_offsets(experts_BLJK)[row])} of row {row} names an expert "
            f"outside of the {num_experts} of each layer; {remedy}"
        )
    return experts_BLJK
