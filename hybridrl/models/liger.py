"""Liger's fused kernels in a Hugging Face model. The only module that imports liger_kernel."""

from __future__ import annotations

from importlib import import_module

from transformers import PreTrainedModel


def use_liger_kernels(hf: PreTrainedModel) -> None:
    """Compute norms, rotary embedding and MLP with Liger's kernels (arXiv:2410.10989).

    The loss stays ours: Liger's would not give the log-prob of each token. Liger puts its rotary
    embedding into the module of the architecture, so other models of it in this process get it too.

    Args:
        hf: of an architecture that Liger knows, built; it need not have memory yet.
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
