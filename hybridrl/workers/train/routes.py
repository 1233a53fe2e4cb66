"""The experts that tokens of a batch must go through (``actor.replay_routing``)."""

from __future__ import annotations

from torch import Tensor

from hybridrl.batch import RolloutBatch, TrainBatch, routed_experts_of, row_offsets
from hybridrl.config.actor import ActorConfig, CriticConfig
from hybridrl.errors import DataError
from hybridrl.models.architecture import Architecture
from hybridrl.workers.train.microbatcher import Rows


def replays_routes(
    config: ActorConfig | CriticConfig, *, learns: bool, is_reward_model: bool
) -> bool:
    """Whether tokens go through the rollout's experts: those of the policy that learns, alone."""
    if not isinstance(config, ActorConfig):
        return False
    return config.replay_routing and learns and not is_reward_model


def routes_of(rows: Rows, architecture: Architecture) -> Tensor:
    """Return the experts of all tokens but the last of each row, int16, jagged.

    Raises:
        DataError: rows without experts, or with those of another model.
    """
    experts = routed_experts_of(rows) if isinstance(rows, RolloutBatch | TrainBatch) else None
    return require_routes(experts, architecture)


def require_routes(experts_BLJK: Tensor | None, architecture: Architecture) -> Tensor:
    """Check that rows name experts of this model, and return them.

    Args:
        experts_BLJK: jagged integers, the experts of all tokens but the last of each row.

    Raises:
        DataError: rows without experts, or with those of another model.
    """
    remedy = "set rollout.routed_experts=true, or actor.replay_routing=false"
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
