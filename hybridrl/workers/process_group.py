"""Start and end of ``torch.distributed`` in a worker."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl import env
from hybridrl.errors import ResourceError
from hybridrl.network import bind

_STORE_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"


def start_process_group(*, device: str, local_rank: int, timeout_s: float) -> torch.device:
    """Join the group that RANK, WORLD_SIZE and MASTER_ADDR describe, and take this rank's device.

    A group that exists already, of a program that embeds a worker, is used unchanged.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (nccl, with gloo for CPU tensors).
        local_rank: index of the device on its node.
        timeout_s: seconds one collective may take (``cluster.collective_timeout_s``).
    """
    timeout = timedelta(seconds=timeout_s)
    if device == "cpu":
        if not dist.is_initialized():
            _join("gloo", timeout)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            "cluster.device=cuda, but torch finds no CUDA device on this worker; "
            "set cluster.device=cpu, or install a CUDA build of torch"
        )
    torch.cuda.set_device(local_rank)
    chosen = torch.device("cuda", local_rank)
    if not dist.is_initialized():
        _join("cpu:gloo,cuda:nccl", timeout, device=chosen)
    return chosen


def _join(backend: str, timeout: timedelta, device: torch.device | None = None) -> None:
    """Start the group over a store that listens at MASTER_ADDR alone.

    torch's own store listens at all addresses of the machine, and any process that reaches it may
    write to it. A group that is bound to ``device`` connects NCCL now, before the rollout engine
    sizes itself. But it has torch split NCCL's communicator for each further group, and a split
    waits for all ranks: see ``ControlGroup.subgroup`` and ``WeightGroup``.
    """
    address, port = env.get("MASTER_ADDR"), int(env.get("MASTER_PORT", "0"))
    if not address or env.get(_STORE_OF_TORCHRUN):
        dist.init_process_group(backend, timeout=timeout, device_id=device)
        return
    rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    listening = None
    if rank == 0:
        bound = bind(address, port)
        bound.listen(world_size)
        listening = bound.detach()  # the store closes it
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )


def end_process_group() -> None:
    """Leave the group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
