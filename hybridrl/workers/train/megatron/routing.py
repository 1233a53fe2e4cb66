"""Which experts tokens go through: routers of megatron-core that balance, and that replay.

Megatron-core has a replay of its own, which keeps the experts of packs in a queue for backward
passes, and a load-balance loss that it divides by tokens after a step, as we divide nothing. Here
a layer tells its router of the pack before it calls it: so it is told the same when activations are
computed again, whatever packs the schedule has in between.

Legend: T packed tokens of this rank (with sequence parallelism a part of the pack's), E experts,
J layers, K experts that a token goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import row_offsets
from hybridrl.config.architecture import Architecture
from hybridrl.errors import DataError
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.megatron.balance import LoadBalance
from hybridrl.workers.train.megatron.megatron_core import (
    ProcessGroupCollection,
    TopKRouter,
    TransformerConfig,
)
from hybridrl.workers.train.megatron.parallel import GroupRank


@dataclass(frozen=True, slots=True)
class PackRouting:
    """What the routers of a stage need to know of a pack."""

    is_real_T: Tensor
    """bool, False for tokens that belong to no row."""

    num_tokens: int
    """Tokens of the pack that belong to a row, on all ranks that share it."""

    experts_TJK: Tensor | None
    """Integers, the experts to go through in the layers of the stage; the router chooses where they
    are -1, and everywhere if this is None."""

    first_layer: int
    """Number, from 0, of the stage's first layer in the whole model."""

    balance: LoadBalance | None
    """Of the optimizer step that the pack belongs to."""


def route(
    tokens: PackedTokens,
    *,
    layers: range,
    shares: GroupRank | None,
    balance: LoadBalance | None,
    device: torch.device,
) -> PackRouting:
    """Say to the routers of a stage what they need to know of a pack.

    Args:
        tokens: the pack.
        layers: of the stage, by their numbers in the whole model.
        shares: this rank among those that each have an equal stretch of the tokens; None: all have
            all.
        balance: of the optimizer step; None where nothing learns.
        device: where the model computes.
    """
    num_all = len(tokens.token_ids_T)
    begin, end = 0, num_all
    if shares is not None:
        begin, end = (place * num_all // shares.size for place in (shares.rank, shares.rank + 1))
    experts_TJK = tokens.experts_TJK
    if experts_TJK is not None:
        experts_TJK = experts_TJK[begin:end, layers.start : layers.stop].to(device)
    return PackRouting(
        is_real_T=torch.arange(begin, end, device=device) < num_all - tokens.num_padding,
        num_tokens=tokens.num_pack_tokens,
        experts_TJK=experts_TJK,
        first_layer=layers.start,
        balance=balance,
    )


class PackRouter(TopKRouter):
    """A router that chooses the experts of a pack's tokens, or takes those that it is told.

    In either case their weights come of its own logits, and carry a gradient.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = _Given()
        self.pack: PackRouting | None = None

    def routing(
        self, logits_T1E: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return weights, 0 for experts that are not gone through, and which are: both [T, E]."""
        pack, layer = self.pack, self.layer_number - 1
        if pack is None:
            raise TypeError("a router was called outside of its RoutedLayer")
        if pack.experts_TJK is not None:
            self.router_replay.experts_TK = pack.experts_TJK[:, layer - pack.first_layer].long()
        weights_TE, is_used_TE = super().routing(logits_T1E, padding_mask)
        self.router_replay.experts_TK = None
        # Once a pack: of activations that are computed again only the second time.
        if pack.balance is None or not (self.training and torch.is_grad_enabled()):
            return weights_TE, is_used_TE
        weights_TE = pack.balance.add(
            weights_TE,
            scores_TE=logits_T1E[:, 0].float().softmax(dim=-1) * pack.is_real_T[:, None],
            is_used_TE=is_used_TE & pack.is_real_T[:, None],
            layer=layer,
            num_tokens=pack.num_tokens,
            group=self.tp_cp_group,
        )
        return weights_TE, is_used_TE


class _Given:
    """Stands where megatron-core's RouterReplay does: asked for a token's experts, and scores."""

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
        # What belongs to no row goes where it always goes: experts then see the same batches.
        experts_TK = torch.where(self.experts_TK < 0, experts_TK, self.experts_TK)
        return scores_TE.gather(1, experts_TK), experts_TK


def require_routes(experts_BLJK: Tensor | None, architecture: Architecture) -> Tensor:
    """Return the experts to replay, once they are known to be there and to be the model's.

    Args:
        experts_BLJK: jagged integers, the experts of all tokens but the last of each row.
        architecture: of the model that is to send tokens through them.

    Raises:
        DataError: rows without experts, or with those of another model.
    """
    remedy = "see that rollout.routed_experts=true, or set megatron.replay_routing=false"
    if experts_BLJK is None:
        raise DataError(f"the rows say of no token which experts it went through; {remedy}")
    experts = architecture.experts
    num_experts, num_per_token = (
        (0, 0) if experts is None else (experts.num_experts, experts.num_per_token)
    )
    shape, expected = experts_BLJK.values().shape[1:], (architecture.num_layers, num_per_token)
    if shape != expected:
        raise DataError(
            f"the rows hold the experts of {shape[0]} layers with {shape[1]} a token, and the "
            f"model has {expected[0]} with {expected[1]}; {remedy}"
        )
    ends_B = row_offsets(experts_BLJK)[1:]
    sparse = [] if experts is None else list(experts.sparse_layers)
    used = experts_BLJK.values()[:, sparse]
    is_wrong_T = ((used < 0) | (used >= num_experts)).flatten(1).any(dim=1)
    is_wrong_T[ends_B - 1] = False  # the last token predicts nothing, and was no input
    if is_wrong_T.any():
        place = int(is_wrong_T.nonzero()[0])
        row = int((ends_B <= place).sum())
        raise DataError(
            f"row {row} has a token without experts among the {num_experts} of each layer, at "
            f"{place - int(row_offsets(experts_BLJK)[row])}; {remedy}"
        )
    return experts_BLJK
