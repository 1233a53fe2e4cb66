"""The critic of a training engine: from packed tokens to values of states."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from hybridrl.models.packed_model import PackedModel, PackedTokens


class ValueModel(PackedModel):
    """A language model whose output is one number instead of a distribution over tokens.

    Its ``hf`` is a ``...ForTokenClassification`` with a single label, so other programs load an
    export. The head's dropout is not used: it would add noise to advantages.
    """

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Return the value of the state before each scored token, float32 [S] reward units."""
        score = self.hf.score
        hidden_SH = self.hidden_before_scored(tokens).float()
        return linear(hidden_SH, score.weight.float(), score.bias.float())[:, 0]
