"""The ``lora`` section: low-rank adapters beside frozen weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import NotNegative, Width

ALL_LINEAR = "all-linear"
ATTENTION_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_MODULES = (*ATTENTION_LINEAR, *("gate_proj", "up_proj", "down_proj"))
"""Linear layers of every block of every supported architecture but Phi-3. The output embedding is
not among them: it is applied to scored tokens only, without any adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): W x + scaling B A x, where only A and B learn."""

    enabled: bool
    """Train adapters and freeze the model. False ignores all other keys of the section."""

    rank: Width
    """Rows of A and columns of B; at most the smaller side of each adapted layer."""

    alpha: Annotated[
        float, Field(gt=0.0, le=1e6, examples=[16.0], description="float32 keeps seven digits")
    ]
    """Scaling of the adapter is alpha / rank, or alpha / sqrt(rank) with ``use_rslora``."""

    use_rslora: bool
    """Scale by alpha / sqrt(rank) (arXiv:2312.03732), so that high ranks learn as fast."""

    dropout: NotNegative
    """Only 0: with dropout the trained policy is not the one that sampled, and its probability
    ratios would be noise."""

    target_modules: tuple[str, ...]
    """Adapted layers by the last word of their name, as q_proj; [all-linear] is all seven. Those of
    Phi-3 are qkv_proj, o_proj, gate_up_proj and down_proj. Only ``actor.engine=megatron`` adapts
    experts: for FSDP2 name q_proj, k_proj, v_proj and o_proj."""

    sync: Literal["adapter", "merged"]
    """Weights sent to rollout engines. ``adapter``: the frozen weights once, then A and B alone.
    ``merged``: W + scaling B A under W's name, every time."""

    base: Literal["auto", "resident", "backup", "resend"]
    """Frozen weights of a sleeping engine under ``sync=adapter``: ``resident`` keeps them on the
    device, ``backup`` on the host, ``resend`` drops them and sends them again. ``auto`` takes
    ``resident`` if the memory plan fits, else the faster other one as measured, and logs why."""

    init_from: str | None
    """A peft adapter folder to start from; null draws A from the seed and sets B to 0. A KL penalty
    compares with the model without any adapter."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted layers, with ``all-linear`` expanded, each once."""
        spelled = [
            name
            for entry in self.target_modules
            for name in (LINEAR_MODULES if entry == ALL_LINEAR else (entry,))
        ]
        return tuple(dict.fromkeys(spelled))

    @property
    def scaling(self) -> float:
        """Factor on B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def sends_adapters(self) -> bool:
        """Whether rollout engines apply adapters themselves."""
        return self.enabled and self.sync == "adapter"
