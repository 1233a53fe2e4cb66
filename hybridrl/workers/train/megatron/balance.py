"""How evenly tokens fall on experts in one optimizer step, and the loss that evens it out.

Legend: T packed tokens of this rank, E experts, J layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.config.architecture import MoEConfig
from hybridrl.metrics import Max, Metrics
from hybridrl.workers.train.megatron.megatron_core import MoEAuxLossAutoScaler


class LoadBalance:
    """The load-balance loss of one step (arXiv:2006.16668, 2.2; arXiv:2101.03961, 2.2).

    Of a pack and a layer it is ``E sum_e f_e P_e``, where f is the share of the pack's routes that
    lead to expert e, and P the mean probability of e over its tokens: 1 where all experts have
    the same of both. Packs weigh by their tokens in all of the step's, over data-parallel ranks;
    layers are added up. What a pack is follows from actor.max_tokens_per_microbatch, so this loss,
    unlike that of the policy, depends a little on how rows are cut into packs.

    Tokens that belong to no row count for nothing. No token is ever dropped: experts have no
    capacity.

    Args:
        experts: of the model.
        coefficient: weight of the loss; 0 only measures.
        num_tokens: of the step's packs over all data-parallel ranks.
        device: where the model computes.
    """

    def __init__(
        self, experts: MoEConfig, *, coefficient: float, num_tokens: int, device: torch.device
    ) -> None:
        self._layers = experts.sparse_layers
        self._num_experts = experts.num_experts
        self._coefficient = coefficient
        self._num_tokens = num_tokens
        # Of each layer the loss, then the routes that lead to each expert; this rank's part.
        self._found_JF = torch.zeros(
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
        """Count a pack's routes in a layer, and attach the loss to the weights of its experts.

        Args:
            weights_TE: float, with gradient.
            scores_TE: float32, probabilities of all experts, 0 for tokens of no row.
            is_used_TE: bool, False for tokens of no row.
            layer: its number, from 0, in the whole model.
            num_tokens: tokens of the pack that belong to a row, on all ranks of ``group``.
            group: the ranks that each have a part of the pack's tokens.

        Returns:
            The weights, unchanged; whoever takes their gradient takes the loss's too.
        """
        if not num_tokens:  # a dummy micro-batch
            return weights_TE
        own_E = is_used_TE.sum(dim=0)
        routes_E = own_E.clone()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(routes_E, group=group)
        # Each rank has the probabilities of its own tokens: their losses add up to the pack's.
        loss = (scores_TE.sum(dim=0) * routes_E / routes_E.sum()).sum()
        loss = loss * (self._num_experts / self._num_tokens)
        found_F = self._found_JF[self._layers.index(layer)]
        found_F[0] += loss.detach()
        found_F[1:] += own_E
        if not self._coefficient:
            return weights_TE
        attached_TE: Tensor = MoEAuxLossAutoScaler.apply(weights_TE, loss * self._coefficient)
        return attached_TE

    def metrics(self) -> Metrics:
        """Return what the step found, the same on all ranks; a collective call.

        Nothing, if it had no tokens.
        """
        if not self._num_tokens:
            return {}
        found_JF = self._found_JF.clone()
        dist.all_reduce(found_JF)
        loads_JE = found_JF[:, 1:] / found_JF[:, 1:].mean(dim=1, keepdim=True)
        return {
            "moe/load_balance_loss": Max(float(found_JF[:, 0].mean())),
            "moe/max_expert_load": Max(float(loads_JE.max())),
        }
