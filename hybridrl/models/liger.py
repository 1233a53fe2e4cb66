"""Liger's fused kernels in a Hugging Face model. The only module that imports liger_kernel."""

from __future__ import annotations

from importlib import import_module

from transformers import PreTrainedModel


def use_liger_kernels(hf: PreTrainedModel) -> None:
    """Compute norms, rotary embedding and MLP with Liger's kernels (arXiv:2410.10989).

    Liger's loss is not used, because it does not return the log-prob of each token. Liger replaces
    the rotary embedding in the architecture's module, so other models in this process use it, too.

    Args:
        hf: of an architecture that Liger supports, with or without memory.
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
