"""The policy as the training engine sees it: packed tokens in, log-probs of chosen tokens out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.models.logprobs import token_logprobs
from hybridrl.models.packed import PackLayout


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Rows laid end to end, and which of their successors to score.

    Legend: T packed tokens, S <= T scored tokens.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, place within the row, from 0
    layout: PackLayout
    scored_S: Tensor  # int64, packed tokens whose successor is scored
    targets_S: Tensor  # int64, those successors


class PolicyModel(nn.Module):
    """A causal language model whose last layer computes on scored tokens only.

    The output embedding is used inside this module's forward pass, and not by the caller, because
    FSDP2 gathers the weights of the outermost module exactly there.
    """

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int) -> None:
        super().__init__()
        self.hf = hf
        self._chunk_tokens = chunk_tokens

    def forward(
        self, tokens: PackedTokens, temperature: float, *, needs_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the scored tokens, both float32 [S] nats."""
        hidden_1TH = self.hf.model(
            input_ids=tokens.token_ids_T[None],
            position_ids=tokens.positions_T[None],
            use_cache=False,
            pack_layout=tokens.layout,
        ).last_hidden_state
        return token_logprobs(
            hidden_1TH[0].index_select(0, tokens.scored_S),
            self.hf.lm_head.weight,
            tokens.targets_S,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            needs_entropy_gradient=needs_entropy_gradient,
        )
