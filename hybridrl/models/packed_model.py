"""Policy and critic on a Hugging Face model, and what is changed in its body.

Attention takes packed rows, routers take given experts, and other layers may have fused kernels.

Legend: T packed tokens, N heads, D size of a head, E experts of a layer, J layers, K experts that a
token goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from hybridrl.errors import ModelError
from hybridrl.models.divergence import Comparison, TeacherTokens
from hybridrl.models.logprobs import VocabShard, token_logprobs, top_logprobs
from hybridrl.models.onednn import use_onednn
from hybridrl.models.packed_attention import PackLayout
from hybridrl.models.recurrent import run_on_rows
from hybridrl.models.seeing import SeenImages, seen_inputs
from hybridrl.sampler import SamplingMasks

PACKED_ATTENTION = "hybridrl_packed"
"""Name in transformers' registry. It builds no mask for registered functions, and the caller of the
model passes the layout of the rows as the keyword ``pack_layout``."""


def _packed_attention(  # noqa: PLR0913 - transformers chooses these
    module: nn.Module,
    query_1NTD: Tensor,
    key_1NTD: Tensor,
    value_1NTD: Tensor,
    attention_mask: Tensor | None,
    *,
    pack_layout: PackLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,  # dropout among them: a policy gradient is taken at the sampled policy
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ModelError(
            f"packed attention got a mask of shape {tuple(attention_mask.shape)}; call the model "
            "with attention_mask=None, because the layout separates rows"
        )
    is_cut = sliding_window is not None and pack_layout.longest_row > sliding_window
    output_TND = pack_layout.attend(
        query_1NTD[0].transpose(0, 1),
        key_1NTD[0].transpose(0, 1),
        value_1NTD[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window if is_cut else None,
        sink_N=s_aux,
    )
    return output_TND[None], None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)


def keep_attention_eager() -> None:
    """Exclude attention from ``torch.compile``, in this process."""
    # Not a decorator: it imports torch._dynamo, which takes a second.
    eager = torch.compiler.disable(_packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED_ATTENTION, eager)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Rows laid end to end, and the S <= T tokens to score."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, position within the row, from 0; [3, T] in models that see
    layout: PackLayout
    scored_S: Tensor  # int64, packed tokens whose successor is scored
    targets_S: Tensor  # int64, those successors
    num_padding: int = 0  # padding tokens at the end
    num_row_tokens: int = 0  # without padding, on all ranks that share the micro-batch
    experts_TJK: Tensor | None = None  # int16, on the host: experts of each token; -1: padding
    seen: SeenImages | None = None  # None: the model has no tower
    masks: SamplingMasks | None = None  # of the S targets; None: they are scored among all tokens
    teacher: TeacherTokens | None = None  # at the scored tokens, on the host; None: not compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Says what the head of a policy computes."""

    needs_entropy_gradient: bool = False
    beta: float = 0.0  # of the divergence from a teacher, if the tokens have its
    num_likeliest: int = 0  # above 0: instead so many tokens, as columns of ``TeacherTokens``


SCORES = Asked()
"""Log-probs, and entropies without a gradient."""


class PackedModel(nn.Module):
    """The base of policy and critic.

    Subclasses apply their head in the forward pass of this module. FSDP2 gathers the weights of the
    outermost module only there, so a caller could not.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        use_onednn(hf)
        run_on_rows(hf, "pack_layout")

    def hidden_before_scored(self, tokens: PackedTokens) -> Tensor:
        """Return the last hidden state just before each scored token, float [S, H]."""
        routed = {}
        if tokens.experts_TJK is not None:  # to the device once, for all layers
            routed["experts_TJK"] = tokens.experts_TJK.to(tokens.token_ids_T.device)
        inputs = {"input_ids": tokens.token_ids_T[None]}
        if tokens.seen is not None:
            inputs = seen_inputs(self.hf, tokens.token_ids_T, tokens.seen)
        hidden_1TH: Tensor = self.hf.model(
            **inputs,
            position_ids=tokens.positions_T[..., None, :],
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
        self, tokens: PackedTokens, temperature: float, asked: Asked = SCORES
    ) -> Tensor | tuple[Tensor, ...]:
        """Return log-probs and entropies of the scored tokens, both float32 [S] nats.

        With a teacher's tokens also the divergences from it. See ``Asked``.
        """
        head = self.hidden_before_scored(tokens), self.hf.lm_head.weight
        temperature *= self._temperature
        return score_tokens(*head, tokens, temperature, asked, chunk_tokens=self._chunk_tokens)


def score_tokens(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    tokens: PackedTokens,
    temperature: float,
    asked: Asked,
    *,
    chunk_tokens: int,
    shard: VocabShard | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Score as ``PolicyModel``, from hidden states and the rows of the output embedding."""
    if asked.num_likeliest:
        return top_logprobs(
            *(hidden_SH, weight_VH),
            num_tokens=asked.num_likeliest,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            shard=shard,
        ).columns()
    return token_logprobs(
        *(hidden_SH, weight_VH, tokens.targets_S),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        needs_entropy_gradient=asked.needs_entropy_gradient,
        shard=shard,
        masks=tokens.masks,
        comparison=None if tokens.teacher is None else Comparison(tokens.teacher, asked.beta),
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


def replay_routing(model: PreTrainedModel) -> None:
    """Let a pass bring the experts of its tokens, as ``experts_TJK``, an argument of the body.

    All routers of transformers choose by one ``torch.topk`` over the scores of their experts. While
    a router runs, that call is answered with the given experts and their scores: their weights
    follow the family's own formula, and carry a gradient.

    Activations that are computed again go through the same experts, which are freed with the last
    of them. Routers choose where an expert is -1, and in passes that bring none.
    """
    layers = model.model.layers
    routers = [getattr(e.mlp, "gate", None) or getattr(e.mlp, "router", None) for e in layers]
    if not any(routers):  # a dense model is left as it is
        return
    for number, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        replay = _ReplayedLayer(number)
        layer.forward = partial(replay.compute, layer.forward)
        if router is not None:
            router.forward = partial(replay.route, router.forward, router.weight.shape[0])


class _ReplayedLayer:
    """Takes the place of the forward passes of a layer and of its router, if it has one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._experts_TK: Tensor | None = None  # while the layer is computed

    def compute(
        self,
        forward: Callable[..., object],
        *args: object,
        experts_TJK: Tensor | None = None,
        **kwargs: object,
    ) -> object:
        self._experts_TK = None if experts_TJK is None else experts_TJK[:, self._number]
        try:
            return forward(*args, **kwargs)
        finally:
            self._experts_TK = None

    def route(
        self, forward: Callable[..., object], num_experts: int, *args: object, **kwargs: object
    ) -> object:
        if self._experts_TK is None:
            return forward(*args, **kwargs)
        with _Given(self._experts_TK, num_experts):
            return forward(*args, **kwargs)


class _Given(TorchFunctionMode):
    """Answers a choice of K of E experts for each token; a choice of groups has other sizes."""

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_TK = experts_TK
        self._num_experts = num_experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores_TE, (_, chosen_TK) = args[0], result
        is_of_experts = scores_TE.ndim == 2 and scores_TE.shape[1] == self._num_experts
        if not is_of_experts or chosen_TK.shape != self._experts_TK.shape:
            return result
        given_TK = self._experts_TK.long()
        # Padding goes through the router's own choice: experts then see the same batches.
        experts_TK = torch.where(given_TK < 0, chosen_TK, given_TK)
        return torch.return_types.topk((scores_TE.gather(1, experts_TK), experts_TK))


def use_liger_kernels(hf: PreTrainedModel) -> None:
    """Compute norms, rotary embedding and MLP with Liger's kernels (arXiv:2410.10989).

    Liger's loss is not used, because it does not return the log-prob of each token. Liger replaces
    the rotary embedding in the architecture's module, so other models in this process use it, too.
    """
    patches = import_module("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN[hf.config.model_type](
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=hf,
    )
