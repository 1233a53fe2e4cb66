"""What a pack is, on its way through megatron-core to the layers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.models.packed import PackLayout
from hybridrl.workers.train.megatron.megatron_core import PackedSeqParams
from hybridrl.workers.train.megatron.routing import PackRouting


@dataclass
class PackedRows(PackedSeqParams):
    """What a pack is, on its way through megatron-core to the layers.

    Its ``qkv_format`` stays None: the pack is one sequence to all that is not of ours.
    """

    layout: PackLayout | None = None
    """Where rows begin and end, for the attention."""

    routing: PackRouting | None = None
    """For routers; None in a dense model."""
