"""The critic as the training engine sees it: packed tokens in, values of states out."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from hybridrl.models.packed_model import PackedModel, PackedTokens


class ValueModel(PackedModel):
    """A language model with one number in place of the next token's distribution.

    Its ``hf`` is a ``...ForTokenClassification`` with a single label, so an export loads elsewhere.
    The head's dropout is left out: advantages would get its noise.
    """

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Return the value of the state before each scored token, float32 [S] reward units."""
        score = self.hf.score
        hidden_SH = self.hidden_before_scored(tokens).float()
        return linear(hidden_SH, score.weight.float(), score.bias.float())[:, 0]
