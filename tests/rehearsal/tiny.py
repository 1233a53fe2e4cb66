"""Small models on eight ranks that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.rehearsal.cases import Case
from tests.rehearsal.faults import Fault
from tests.tiny_models import Family, tiny_config

_TINY = (
    *("model=hf_folder", "model.path=FOLDER/model", "data=files", "data.train_files=[rows.jsonl]"),
    *("cluster=one_gpu", "cluster.num_ranks_per_node=8", "rollout=sglang", "rollout.sleep=true"),
    *("rollout.max_response_tokens=16", "rollout.num_responses_per_prompt=8"),
    *("data.max_prompt_tokens=16", "actor.max_tokens_per_microbatch=64"),
    *("trainer.num_prompts_per_step=16", "actor.gradient_checkpointing=true"),
)


def tiny_case(
    *overrides: str,
    family: Family = "qwen3",
    num_layers: int = 1,
    num_steps: int = 1,
    rank: int = 0,
    vocab_size: int = 64,
    fault: Fault | None = None,
    kind: str = "planned",
) -> Case:
    """Return a case of a tiny model; ``other`` is a second folder of the same."""
    settings = _settings(family, vocab_size)
    return Case(
        (*_TINY, *overrides),
        {"model": settings, "other": settings},
        num_layers,
        rank=rank,
        num_steps=num_steps,
        fault=fault,
        kind=kind,
    )


LATENT = ("deepseek_v3", "glm4_moe_lite")
"""Families of which a head has two parts; FlashAttention takes sizes in steps of 8."""


@cache
def _settings(family: Family, vocab_size: int) -> Mapping[str, object]:
    heads_of_16: dict[str, Any] = {"qk_nope_head_dim": 12} if family in LATENT else {}
    settings: Mapping[str, object] = tiny_config(
        family, num_layers=4, max_position_embeddings=64, vocab_size=vocab_size, **heads_of_16
    ).to_dict()
    return settings
