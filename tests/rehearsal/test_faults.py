"""Faults in what only a GPU runs: a rehearsal finds each, and says where."""

from __future__ import annotations

import pytest

from tests.rehearsal.checks import assert_sound
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.faults import Fault
from tests.rehearsal.test_cycles import GROUPS
from tests.rehearsal.tiny import tiny_case

LARGE = 2**15
"""Words: their embedding fills a bucket of 1 MiB."""

FAULTS: dict[str, tuple[str, str, str, str]] = {
    "saved tensors are read twice": (
        *("models.varlen", "lse_NT = saved\n", "lse_NT = ctx.saved_tensors\n"),
        "CheckpointError",
    ),
    "offsets stay on the host": (
        *("models.packed_attention", "own_offsets = offsets.to(device, torch.int32)"),
        *("own_offsets = offsets.to(torch.int32)", "device"),
    ),
    "a kernel is chosen that the type does not have": (
        *("workers.train.backend", ' and compute_dtype == "bfloat16"', ""),
        "FlashAttention only support",
    ),
    "state is offloaded to pageable memory": (
        *("workers.train.offload", "is_pinned)\n        self", "False)\n        self"),
        "blocking at workers/train/offload.py",
    ),
    "parameters stay while the KV cache wakes": (
        *("workers.sharding.lifecycle", "self._leave()\n            self._transition(RESUME_CACHE"),
        *("self._transition(RESUME_CACHE", "bytes stay while the KV cache wakes"),
    ),
    "parameters are not offloaded": (
        *("workers.sharding.offloadable_models", "self._offload(TrainState.PARAMETERS)\n"),
        "self._offload(TrainState.GRADIENTS)\n",
        "the KV cache may not wake while training state is on the device",
    ),
    "a bucket is freed before it is opened": (
        *("workers.rollout.sglang.transports", "flat, spans = self._buffers.pack(bucket)\n"),
        "flat, spans = self._buffers.pack(bucket)\n        flat.untyped_storage().resize_(0)\n",
        "was freed before it was opened",
    ),
    "one buffer is filled again and again": (
        *("workers.rollout.buckets", "[None] * count", "[None]"),
        "filled again while the server may still read it",
    ),
    "a handle is made of memory of the host": (
        *("workers.rollout.buckets", "torch.uint8, device=device)", "torch.uint8)"),
        "memory of the host",
    ),
    "a weight is not sent": (
        *(
            "workers.train.fsdp2",
            "if is_adapter_name(name):\n                continue\n            layer",
        ),
        *('if "norm" in name:\n                continue\n            layer', "norm"),
    ),
    "a copy in the stream waits": (
        *(
            "workers.rollout.buckets",
            "tensor.detach(), non_blocking=tensor.is_cuda and flat.is_cuda",
        ),
        *("tensor.detach().cpu()", "blocking at workers/rollout/buckets.py"),
    ),
    "what ranks exchange is a view": (
        *("workers.train.context_parallel", "transpose(0, 1).contiguous()", "transpose(0, 1)"),
        "Tensors must be contiguous",
    ),
    "log-sum-exps behind a prompt are a view": (
        *("models.varlen", "lse_NT[:, own_rows].contiguous()", "lse_NT[:, own_rows]"),
        "takes contiguous log-sum-exps",
    ),
    "a number is read in the stream": (
        *("workers.train.shards", "    return _as_gathered"),
        "    float(local_shard(tensor).reshape(-1)[0])\n    return _as_gathered",
        "item() at workers/train/shards.py",
    ),
}
"""Module, text in it, what is there instead, and what the rehearsal says."""

OVERRIDES = {
    "a kernel is chosen that the type does not have": ("actor.compute_dtype=float32",),
    "one buffer is filled again and again": ("rollout.bucket_mib=1",),
    "what ranks exchange is a view": ("actor.fsdp2.context_parallel_size=2",),
    "log-sum-exps behind a prompt are a view": GROUPS,
}


@pytest.mark.parametrize("name", FAULTS)
def test_rehearsal_finds_a_fault(rehearse: Rehearse, name: str) -> None:
    module, right, wrong, message = FAULTS[name]
    fault = Fault(f"hybridrl.{module}", right, wrong)
    given = OVERRIDES.get(name, ())
    shown = rehearse(tiny_case(*given, fault=fault, vocab_size=LARGE))
    with pytest.raises(AssertionError) as found:
        assert_sound(shown)
    assert message in str(found.value)
