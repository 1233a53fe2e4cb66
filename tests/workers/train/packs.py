"""A small policy, and what it learns from rows in given micro-batches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridrl.models.packed_attention import AttentionKernel
from hybridrl.models.packed_model import PolicyModel
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.microbatcher import BatchRows, lay_out
from hybridrl.workers.train.shards import build_model
from tests.models import flash_on_cpu
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL, make_batcher


def tiny_policy(folder: Path, family: Family) -> PolicyModel:
    policy = build_model(
        make_tiny_model(folder, family),
        config=ACTOR,
        model_config=MODEL,
        ranks=Ranks(CPU),
        is_trainable=True,
    )
    assert isinstance(policy, PolicyModel)
    return policy


def learn(
    policy: PolicyModel, rows: BatchRows, groups: list[list[int]], kernel: AttentionKernel
) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Return tokens computed, log-probs of all tokens, and gradients of a weighted sum."""
    flash_on_cpu.install()
    size = len(rows.token_ids_N)
    weights = torch.randn(size, generator=torch.Generator().manual_seed(1))
    logprobs, num_tokens = torch.zeros(size), 0
    policy.zero_grad()
    for numbers in groups:
        microbatch = lay_out(rows, numbers, make_batcher(kernel))
        scored_S, _ = policy(microbatch.tokens, 1.0)
        (scored_S * weights[microbatch.token_index_S]).sum().backward()
        logprobs[microbatch.token_index_S] = scored_S.detach()
        num_tokens += microbatch.num_tokens
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return num_tokens, logprobs, grads
