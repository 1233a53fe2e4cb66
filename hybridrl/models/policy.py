"""The policy of a training engine: from packed tokens to log-probs of given tokens."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.models.logprobs import token_logprobs
from hybridrl.models.packed_model import PackedModel, PackedTokens


class PolicyModel(PackedModel):
    """A causal language model whose last layer computes only scored tokens."""

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int) -> None:
        super().__init__(hf)
        self._chunk_tokens = chunk_tokens

    def forward(
        self, tokens: PackedTokens, temperature: float, *, needs_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the scored tokens, both float32 [S] nats."""
        return token_logprobs(
            self.hidden_before_scored(tokens),
            self.hf.lm_head.weight,
            tokens.targets_S,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            needs_entropy_gradient=needs_entropy_gradient,
        )
