"""Rows whose tokens lie on several ranks, as context parallelism divides them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms.token_rows import TokenRows


def shared_rows(rows: TokenRows, own_U: Tensor) -> TokenRows:
    """Keep some tokens on this rank; the other ranks of the world have the others."""
    from hybridrl.workers.train.megatron.megatron_core import gather_from_sequence_parallel_region

    gather = partial(gather_from_sequence_parallel_region, group=dist.group.WORLD)
    return replace(rows, row_T=rows.row_T[own_U], gather=gather)
