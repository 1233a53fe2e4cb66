"""Handles with which a server opens memory of this process: the only module that imports sglang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from hybridrl.config.rollout import RolloutConfig
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import TensorSpan
from hybridrl.workers.rollout.sglang.transports import DiskTransport, SharedTransport, Transport

try:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
except ImportError as err:
    raise ImportError(
        "rollout=sglang needs SGLang: pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), "
        "or use rollout=hf"
    ) from err


def build_transport(
    rollout: RolloutConfig, *, device: torch.device, is_sender: bool, from_disk: bool
) -> Transport:
    """Make the transport of one rank of an engine; others than the sender only stage."""
    # Handles of host memory are names then, which a server's ranks can open although they are not
    # children of this process: buckets on a CPU, adapters everywhere.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        _name_gpus_by_serial_number()
    num_ranks, dtype = rollout.tensor_parallel_size, DTYPES[rollout.dtype]
    if from_disk:
        return DiskTransport(is_sender=is_sender, dtype=dtype)
    return SharedTransport(device=device, num_ranks=num_ranks, encode=encode, dtype=dtype)


def _name_gpus_by_serial_number() -> None:
    """Let handles of GPU memory do so: a server numbers only its visible GPUs.

    SGLang's patch takes every tensor for one on a GPU, and raises IndexError for an adapter, which
    is sent from the host.
    """
    functions: Any = reductions
    if hasattr(functions, "_reduce_tensor_original"):
        return
    of_host = functions.reduce_tensor
    monkey_patch_torch_reductions()
    of_gpus = functions.reduce_tensor
    functions.reduce_tensor = lambda tensor: (of_gpus if tensor.is_cuda else of_host)(tensor)
    functions.init_reductions()


def encode(flat: Tensor, spans: Sequence[TensorSpan]) -> str:
    """Make the handle with which one rank of a server, and only one, opens a flat buffer, once."""
    metadata = [
        FlattenedTensorMetadata(
            name=span.name,
            shape=torch.Size(span.shape),
            dtype=span.dtype,
            start_idx=span.begin,
            end_idx=span.end,
            numel=span.end - span.begin,
        )
        for span in spans
    ]
    return serialized({"flattened_tensor": flat, "metadata": metadata})


def serialized(payload: object) -> str:
    """Write tensors as handles of their memory."""
    text: str = MultiprocessingSerializer.serialize(payload, output_str=True)
    return text
