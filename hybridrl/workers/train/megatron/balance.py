"""The load of experts in one optimizer step, and the loss that balances it.

Legend: T packed tokens of this rank, E experts, J layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.metrics import Max, Metrics
from hybridrl.models.architecture import MoEConfig
from hybridrl.workers.train.megatron.megatron_core import MoEAuxLossAutoScaler


class LoadBalance:
    """The load-balance loss of one step (arXiv:2006.16668, 2.2; arXiv:2101.03961, 2.2).

    For a micro-batch and a layer it is ``E sum_e f_e P_e``: f is the fraction of routes to expert
    e, P its mean probability over the tokens. It is 1 if both are the same for all experts. The
    step's loss is the mean over micro-batches of all data-parallel ranks, weighted by their tokens,
    summed over layers. Unlike the policy's loss it depends a little on the division into
    micro-batches, and so on actor.max_tokens_per_microbatch.

    Padding does not count. Experts have no capacity, so they drop no tokens.

    Args:
        coefficient: weight of the loss; 0 only measures.
        num_tokens: of the step over all data-parallel ranks.
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
        """Count a micro-batch's routes in a layer, and attach the loss to the experts' weights.

        Args:
            weights_TE: float, with gradient.
            scores_TE: float32, probabilities of all experts, 0 for padding.
            is_used_TE: bool, False for padding.
            layer: its number, from 0, in the full model.
            num_tokens: tokens of the micro-batch without padding, on all ranks of ``group``.
            group: the ranks that share the micro-batch's tokens.

        Returns:
            The weights, unchanged; their gradient includes that of the loss.
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
