"""The embedded engine's model: built without weights, its KV cache, its adapter, one forward pass.

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hybridrl.config.model import LoraConfig
from hybridrl.errors import DriftError, EngineError, ModelError
from hybridrl.models.adapter_names import is_in_tower, matrix_names
from hybridrl.models.architecture import read_architecture
from hybridrl.models.image_settings import read_image_settings
from hybridrl.models.load import build_by_config, load_model_config, read_model_type, tie_head
from hybridrl.models.seeing import seen_inputs
from hybridrl.workers.rollout.adapter_fit import no_adapter_loaded, require_fit
from hybridrl.workers.rollout.embedded.kv_slots import ATTENTION_NAME, KVSlots, KVStep, Sight
from hybridrl.workers.rollout.embedded.row_states import RowStates


def load_config(folder: Path, *, max_context_tokens: int) -> PretrainedConfig:
    """Read and check config.json; a ModelError, too, if its context is shorter than this."""
    read_model_type(folder)  # names the errors that transformers would raise without a cause
    config = load_model_config(folder)
    context = read_architecture(folder).max_positions
    if max_context_tokens > context:
        raise ModelError(
            f"prompt + response may take {max_context_tokens} tokens, the model in {folder} takes "
            f"{context}; lower data.max_prompt_tokens, or max_response_tokens of rollout or eval"
        )
    return config


def build_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build on the device with empty parameters and the right buffers."""
    with no_init_weights(), device:
        model = build_by_config(config, dtype=dtype, attention=ATTENTION_NAME)
    tie_head(model)
    return model.to(device).eval().requires_grad_(requires_grad=False)


def make_slots(
    model: PreTrainedModel, folder: Path, num_slots: int, max_context_tokens: int
) -> KVSlots:
    """Return slots of zeros, of ``max_context_tokens`` each, for the model of a folder."""
    architecture = read_architecture(folder)
    kv_YSJCD = torch.zeros(
        architecture.num_attention_layers,
        2,
        num_slots,
        architecture.num_key_value_heads,
        max_context_tokens,
        architecture.head_size,
        dtype=model.dtype,
        device=model.device,
    )
    return KVSlots(kv_YSJCD, RowStates(model, num_slots), read_image_settings(folder))


class Forward(Protocol):
    """Runs T tokens through a model, which reads and writes keys and values through ``kv_step``."""

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass over int64 [T]; return the logits [N, V] in the model's type.

        ``logits_at`` are the tokens, int64 [N], whose next-token logits are wanted; None: all.
        """


def transformers_forward(
    model: PreTrainedModel, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
) -> Tensor:
    """The ``Forward`` of any model, its own, built with ``kv_slots.ATTENTION_NAME``."""
    output = model(
        input_ids=token_T[None],
        position_ids=kv_step.position_T[None],
        use_cache=False,
        kv_step=kv_step,
        logits_to_keep=0 if logits_at is None else logits_at,
    )
    logits_NV: Tensor = output.logits[0]
    return logits_NV


def seeing_forward(
    model: PreTrainedModel, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
) -> Tensor:
    """That of a model of ``models/seeing.py``, whose tower runs where a context has new images."""
    sight = kv_step.sight or Sight(kv_step.position_T, None)
    inputs = {"input_ids": token_T[None]}
    if sight.seen is not None:
        inputs = seen_inputs(model, token_T, sight.seen)
    hidden_1TH = model.model(
        **inputs, position_ids=sight.position_T[..., None, :], use_cache=False, kv_step=kv_step
    ).last_hidden_state
    hidden_NH = hidden_1TH[0] if logits_at is None else hidden_1TH[0].index_select(0, logits_at)
    logits_NV: Tensor = model.lm_head(hidden_NH)
    return logits_NV


def require_finite(values: Tensor) -> None:
    """Raise EngineError if a logit or log-prob, of any shape, is infinite or NaN."""
    if not bool(values.isfinite().all()):
        raise EngineError(
            "the rollout model's logits are not finite: its weights were never sent, were lost in "
            "a release, or have diverged; sync weights before generate, and lower "
            "actor.optimizer.lr if they were synced"
        )


Adapter = Mapping[str, Tensor]
"""A and B of every adapted layer, by their names in the adapter's file."""


class AdaptedLinear(nn.Module):
    """W x + b + scaling B A x, with A and B of the adapter that each token uses."""

    def __init__(
        self, layer: nn.Linear, names: tuple[str, str], adapters: LoadedAdapters, *, scaling: float
    ) -> None:
        super().__init__()
        self.base = layer
        self._names = names
        self._adapters = adapters
        self._scaling = scaling

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer and the adapter: float [..., I] to [..., O]."""
        outputs: Tensor = self.base(inputs)
        self.add_adapter(inputs.flatten(0, -2), outputs.flatten(0, -2))
        return outputs

    def add_adapter(self, inputs_TI: Tensor, outputs_TO: Tensor) -> None:
        """Add the adapters' results for the inputs to the outputs, in place."""
        for tensors, at_N in self._adapters.in_use:
            a_RI, b_OR = (tensors[name] for name in self._names)
            if at_N is None:
                outputs_TO.addmm_(inputs_TI @ a_RI.T, b_OR.T, alpha=self._scaling)
            else:
                added_NO = (inputs_TI[at_N] @ a_RI.T) @ b_OR.T
                outputs_TO.index_add_(0, at_N, added_NO, alpha=self._scaling)


class LoadedAdapters:
    """Memory for adapters beside the frozen layers of a model, which apply them at every step.

    Not merged into a copy of the weights. The copy would double the memory of the adapted layers,
    and in bfloat16 its rounding would drop small updates: log-probs would differ from the
    trainer's. A merge would save 10% of the sampling time at rank 8, 15% at rank 32 (1.7 M
    parameters, 1 thread).
    """

    tensors: dict[str, Tensor]
    """A and B of every adapted layer, by their names in the adapter's file; no values before
    ``load``. Adapters beside another one have memory of their own, until they are unloaded."""

    in_use: Sequence[tuple[Adapter, Tensor | None]] = ()
    """Adapters of the next pass, each with the tokens that use it, int64 [N]; None: all do."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self.tensors = {}
        self._loaded: dict[int, dict[str, Tensor]] = {}  # by policy version, the newest last
        for name, module in list(model.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if leaf in config.modules and isinstance(module, nn.Linear) and not is_in_tower(name):
                names, weight_OI = matrix_names(name), module.weight
                a_RI = weight_OI.new_empty(config.rank, module.in_features)
                b_OR = weight_OI.new_empty(module.out_features, config.rank)
                self.tensors.update(zip(names, (a_RI, b_OR), strict=True))
                adapted = AdaptedLinear(module, names, self, scaling=config.scaling)
                setattr(model.get_submodule(parent), leaf, adapted)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Copy all values in, cast from any float type. All or nothing. See ``require_fit``."""
        require_fit(tensors, {name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        memory = self._loaded.get(version)
        if memory is None:
            is_alone = not self._loaded
            memory = {n: t if is_alone else torch.empty_like(t) for n, t in self.tensors.items()}
        for name, tensor in tensors.items():
            memory[name].copy_(tensor)
        self._loaded = self._loaded | {version: memory}  # another thread may read it

    def unload(self, *, kept: Collection[int] = ()) -> None:
        """Forget all adapters but these: they must not be used for generation any more."""
        self._loaded = {v: memory for v, memory in self._loaded.items() if v in kept}

    def lose_all_but(self, backup: Collection[str]) -> None:
        """The memory was released; ``backup`` survives."""
        if not self.tensors.keys() <= set(backup):
            self._loaded = {}

    def of(self, version: int | None) -> Adapter:
        """Return the adapter of a version, or the newest, for as long as somebody holds it.

        An EngineError if there is none, a DriftError if there is not that of ``version``.
        """
        if not self._loaded:
            raise no_adapter_loaded()
        if version is None:
            return next(reversed(self._loaded.values()))
        if version not in self._loaded:
            raise DriftError(
                f"a request asked for the adapter of version {version}, and this engine has those "
                f"of {sorted(self._loaded)}"
            )
        return self._loaded[version]

    def use(self, adapters: Sequence[Adapter]) -> None:
        """Choose the adapters of the next pass: of each of its tokens, or one of all."""
        tokens: dict[int, list[int]] = {}
        for token, adapter in enumerate(adapters):
            tokens.setdefault(id(adapter), []).append(token)
        if len(tokens) == 1:
            self.in_use = [(adapters[0], None)]
            return
        device = next(iter(self.tensors.values())).device
        self.in_use = [(adapters[at[0]], torch.tensor(at, device=device)) for at in tokens.values()]
