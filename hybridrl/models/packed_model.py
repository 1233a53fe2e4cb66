"""Policy and critic on a Hugging Face model whose body computes packed rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hybridrl.models.logprobs import token_logprobs
from hybridrl.models.onednn import use_onednn
from hybridrl.models.packed import PackLayout
from hybridrl.models.routing_replay import replay_routing


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
        routed = {}
        if tokens.experts_TJK is not None:  # to the device once, for all layers
            routed["experts_TJK"] = tokens.experts_TJK.to(tokens.token_ids_T.device)
        hidden_1TH: Tensor = self.hf.model(
            input_ids=tokens.token_ids_T[None],
            position_ids=tokens.positions_T[None],
            use_cache=False,
            pack_layout=tokens.layout,
            **routed,
        ).last_hidden_state
        return hidden_1TH[0].index_select(0, tokens.scored_S)


class PolicyModel(PackedModel):
    """A causal language model whose last layer computes only scored tokens."""

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int) -> None:
        super().__init__(hf)
        self._chunk_tokens = chunk_tokens
        # A factor of the logits is one more temperature: Granite divides, Cohere multiplies.
        settings = hf.config.to_dict()
        replay_routing(hf)
        self._temperature = settings.get("logits_scaling", 1.0) / settings.get("logit_scale", 1.0)

    def forward(
        self, tokens: PackedTokens, temperature: float, *, needs_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the scored tokens, both float32 [S] nats."""
        return token_logprobs(
            self.hidden_before_scored(tokens),
            self.hf.lm_head.weight,
            tokens.targets_S,
            temperature=temperature * self._temperature,
            chunk_tokens=self._chunk_tokens,
            needs_entropy_gradient=needs_entropy_gradient,
        )


class ValueModel(PackedModel):
    """A language model whose output is one number instead of a distribution over tokens.

    Its ``hf`` is a ``...ForTokenClassification`` with a single label, or as a reward model a
    ``...ForSequenceClassification``, so other programs load an export. The head's dropout is not
    used: it would add noise to advantages.
    """

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Return the value of the state before each scored token, float32 [S] reward units."""
        score = self.hf.score
        hidden_SH = self.hidden_before_scored(tokens).float()
        bias = None if score.bias is None else score.bias.float()
        return linear(hidden_SH, score.weight.float(), bias)[:, 0]
