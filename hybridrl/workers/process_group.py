"""Start and end of ``torch.distributed`` in a worker."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.errors import ResourceError


def start_process_group(*, device: str, local_rank: int, timeout_s: float) -> torch.device:
    """Join the group that RANK, WORLD_SIZE and MASTER_ADDR describe, and take this rank's device.

    A group that exists already, of a program that embeds a worker, is used as it is.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (nccl, with gloo for CPU tensors).
        local_rank: index of the device on its node.
        timeout_s: seconds one collective may take (``cluster.collective_timeout_s``).

    Raises:
        ResourceError: cuda is asked for and there is none.
    """
    timeout = timedelta(seconds=timeout_s)
    if device == "cpu":
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            "cluster.device=cuda, but torch finds no CUDA device on this worker; "
            "set cluster.device=cpu, or install a CUDA build of torch"
        )
    torch.cuda.set_device(local_rank)
    chosen = torch.device("cuda", local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=chosen)
    return chosen


def end_process_group() -> None:
    """Leave the group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
