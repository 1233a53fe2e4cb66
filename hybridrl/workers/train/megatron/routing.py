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
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.metrics import Max, Metrics
from hybridrl.models.architecture import MoEConfig
from hybridrl.models.packed_attention import PackLayout
from hybridrl.workers.train.megatron.megatron_core import (
    MoEAuxLossAutoScaler,
    PackedSeqParams,
    ProcessGroupCollection,
    TopKRouter,
    TransformerConfig,
)


class LoadBalance:
    """The load-balance loss of one step (arXiv:2006.16668, 2.2; arXiv:2101.03961, 2.2).

    For a micro-batch and a layer it is ``E sum_e f_e P_e``: f is the fraction of routes to expert
    e, P its mean probability over the tokens. It is 1 if both are the same for all experts. The
    step's loss is the mean over micro-batches of all data-parallel ranks, weighted by their tokens,
    summed over layers. Unlike the policy's loss it depends a little on the division into
    micro-batches, and so on actor.max_tokens_per_microbatch. Padding does not count. Experts have
    no capacity, so they drop no tokens.

    ``coefficient`` 0 only measures; ``num_tokens`` are those of all data-parallel ranks.
    """

    def __init__(
        self, experts: MoEConfig, *, coefficient: float, num_tokens: int, device: torch.device
    ) -> None:
        self._layers = experts.sparse_layers
        self._num_experts = experts.num_experts
        self._coefficient = coefficient
        self._num_tokens = num_tokens
        # For each layer the loss, then the routes to each expert, of this rank.
        self._sums_JF = torch.zeros(
            len(self._layers), 1 + experts.num_experts, dtype=torch.float64, device=device
        )

    def add(
        self,
        weights_TE: Tensor,
        *,
        scores_TE: Tensor,
        is_used_TE: Tensor,
        layer: int,
        num_tokens: int,
        group: ProcessGroup,
    ) -> Tensor:
        """Count a micro-batch's routes in a layer; return the weights, with the loss's gradient.

        Scores and uses of padding are 0. ``num_tokens`` are those of the micro-batch without
        padding, on all ranks of ``group``, which share them.
        """
        if not num_tokens:  # a dummy micro-batch
            return weights_TE
        own_E = is_used_TE.sum(dim=0)
        routes_E = own_E.clone()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(routes_E, group=group)
        # Each rank has the probabilities of its own tokens: the losses of the ranks are summed.
        loss = (scores_TE.sum(dim=0) * routes_E / routes_E.sum()).sum()
        loss = loss * (self._num_experts / self._num_tokens)
        sums_F = self._sums_JF[self._layers.index(layer)]
        sums_F[0] += loss.detach()
        sums_F[1:] += own_E
        if not self._coefficient:
            return weights_TE
        attached_TE: Tensor = MoEAuxLossAutoScaler.apply(weights_TE, loss * self._coefficient)
        return attached_TE

    def metrics(self) -> Metrics:
        """Return the step's metrics, the same on all ranks, empty without tokens; a collective."""
        if not self._num_tokens:
            return {}
        sums_JF = self._sums_JF.clone()
        dist.all_reduce(sums_JF)
        loads_JE = sums_JF[:, 1:] / sums_JF[:, 1:].mean(dim=1, keepdim=True)
        return {
            "moe/load_balance_loss": Max(float(sums_JF[:, 0].mean())),
            "moe/max_expert_load": Max(float(loads_JE.max())),
        }


@dataclass(frozen=True, slots=True)
class Routing:
    """A micro-batch as the routers of a stage see it."""

    is_real_T: Tensor  # bool, False for padding
    num_tokens: int  # without padding, on all ranks that share the micro-batch
    experts_TJK: Tensor | None
    """Integers, the experts of each token in the layers of the stage; the router chooses where they
    are -1, and everywhere if this is None."""

    first_layer: int  # of the stage, from 0, in the full model
    balance: LoadBalance | None


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """A micro-batch on its way through megatron-core to the layers.

    Its ``qkv_format`` stays None, so megatron-core's own code sees one sequence.
    """

    layout: PackLayout  # where rows begin and end, for the attention
    routing: Routing | None = None  # None in a dense model


class Router(TopKRouter):
    """A router that chooses or replays experts; their weights are of its own logits."""

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
