"""A Hugging Face model whose body computes packed rows; subclasses add a head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.models.onednn import use_onednn
from hybridrl.models.packed import PackLayout


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Rows laid end to end, and the tokens to score.

    Legend: T packed tokens, S <= T scored tokens, J layers, K experts that a token goes through.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, position within the row, from 0
    layout: PackLayout
    scored_S: Tensor  # int64, packed tokens whose successor is scored
    targets_S: Tensor  # int64, those successors
    num_padding: int = 0  # padding tokens at the end
    num_row_tokens: int = 0  # without padding, on all ranks that share the micro-batch
    experts_TJK: Tensor | None = None  # int16, on the host: experts of each token; -1: padding


class PackedModel(nn.Module):
    """The base of policy and critic.

    Subclasses apply their head in the forward pass of this module. FSDP2 gathers the weights of the
    outermost module only there, so a caller could not.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        use_onednn(hf)

    def hidden_before_scored(self, tokens: PackedTokens) -> Tensor:
        """Return the last hidden state just before each scored token, float [S, H]."""
        hidden_1TH: Tensor = self.hf.model(
            input_ids=tokens.token_ids_T[None],
            position_ids=tokens.positions_T[None],
            use_cache=False,
            pack_layout=tokens.layout,
        ).last_hidden_state
        return hidden_1TH[0].index_select(0, tokens.scored_S)
