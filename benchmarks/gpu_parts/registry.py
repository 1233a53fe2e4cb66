"""All parts, in the order in which they run: cheap proofs first."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_parts import (
    checks,
    cycle,
    fraction,
    learn,
    lora,
    megatron,
    mfu,
    rollout,
    start_up,
    sync,
    transfers,
    wake,
)
from benchmarks.gpu_parts.bench import Part
from benchmarks.gpu_parts.machine import Needs
from benchmarks.gpu_parts.mfu import Variant

_MFU_8B = (
    Variant("qwen3-8b", "bfloat16", checkpointing=False),
    Variant("qwen3-8b", "bfloat16", checkpointing=True),
)
_MFU_3B = (
    Variant("qwen2.5-3b", "float32", checkpointing=False),
    Variant("qwen2.5-3b", "float32", checkpointing=True),
)
_MFU_MEGATRON = (
    Variant("qwen2.5-3b", "float32", checkpointing=False, engine="megatron"),
    Variant("qwen2.5-3b", "float32", checkpointing=True, engine="megatron"),
)
"""Full fine-tuning of 8B takes 18 bytes a parameter on one rank: more than such a device has."""

_MFU_MEGATRON_LORA = (
    Variant("qwen3-8b", "bfloat16", checkpointing=True, engine="megatron", has_adapter=True),
    Variant("qwen3-8b", "bfloat16", checkpointing=False, engine="megatron", has_adapter=True),
)

PARTS = (
    Part(
        name="start_up",
        title="versions, memory, disk, rate of a matrix product",
        run=start_up.run,
        about_s=30,
    ),
    Part(
        name="transfers",
        title="pinned bandwidth both ways, device copies, offload and restore of odd tensors",
        run=transfers.run,
        needs=Needs(device=40, host=40),
        about_s=40,
    ),
    Part(
        name="checks",
        title="`pytest -m gpu`",
        run=checks.run,
        about_s=280,
    ),
    Part(
        name="cycle_0_5b",
        title="ten cycles of full fine-tuning, 0.5B",
        run=partial(cycle.run, shape="qwen2.5-0.5b", memory_fraction=0.5),
        needs=Needs(device=40, host=24, disk=2, sglang=True),
        about_s=100,
    ),
    Part(
        name="learn",
        title="a GRPO run from the command line learns the default task",
        run=learn.run,
        needs=Needs(device=20, host=24, sglang=True),
        about_s=180,
    ),
    Part(
        name="sync_8b",
        title="full sync of 8B in bfloat16",
        run=sync.run,
        needs=Needs(device=75, host=48, disk=17, sglang=True),
        about_s=140,
    ),
    Part(
        name="cycle_7b",
        title="ten cycles of full fine-tuning, 7B with float32 masters",
        run=partial(cycle.run, shape="qwen2.5-7b", memory_fraction=0.85),
        needs=Needs(device=130, host=110, disk=16, sglang=True),
        about_s=240,
    ),
    Part(
        name="lora_backup",
        title="ten cycles of LoRA rank 32, 7B, base kept on the host",
        run=partial(lora.run, base="backup"),
        needs=Needs(device=75, host=60, disk=16, sglang=True),
        about_s=120,
    ),
    Part(
        name="lora_resident",
        title="ten cycles of LoRA rank 32, 7B, base resident",
        run=partial(lora.run, base="resident"),
        needs=Needs(device=75, host=40, disk=16, sglang=True),
        about_s=110,
    ),
    Part(
        name="lora_resend",
        title="ten cycles of LoRA rank 32, 7B, base sent again",
        run=partial(lora.run, base="resend"),
        needs=Needs(device=75, host=40, disk=16, sglang=True),
        about_s=110,
    ),
    Part(
        name="lora_garbage",
        title="LoRA without a copy and without the ledger's guard, once, on purpose",
        run=lora.run_garbage,
        needs=Needs(device=75, host=60, disk=16, sglang=True),
        about_s=120,
    ),
    Part(
        name="wake",
        title="staged wake-up against a single stage, 7B",
        run=wake.run,
        needs=Needs(device=75, host=60, disk=16, sglang=True),
        about_s=230,
    ),
    Part(
        name="fraction_90",
        title="ten GRPO steps of 7B at memory fraction 0.9",
        run=partial(fraction.run, memory_fraction=0.9),
        needs=Needs(device=75, host=60, disk=16, sglang=True),
        about_s=270,
    ),
    Part(
        name="fraction_95",
        title="ten GRPO steps of 7B at memory fraction 0.95",
        run=partial(fraction.run, memory_fraction=0.95),
        needs=Needs(device=75, host=60, disk=16, sglang=True),
        about_s=270,
    ),
    Part(
        name="rollout",
        title="rollout tokens/s beside SGLang alone, 7B",
        run=rollout.run,
        needs=Needs(device=75, host=40, disk=16, sglang=True),
        about_s=230,
    ),
    Part(
        name="mfu_8b",
        title="training MFU, 8B shape in bfloat16, packs of 8k tokens",
        run=partial(mfu.run, variants=_MFU_8B),
        needs=Needs(device=75, host=40, disk=17),
        about_s=150,
    ),
    Part(
        name="mfu_3b",
        title="training MFU, 3B shape with float32 masters, packs of 8k tokens",
        run=partial(mfu.run, variants=_MFU_3B),
        needs=Needs(device=75, host=40, disk=7),
        about_s=100,
    ),
    Part(
        name="megatron_mfu_3b",
        title="megatron-core: training MFU, 3B shape with float32 masters, packs of 8k tokens",
        run=partial(mfu.run, variants=_MFU_MEGATRON),
        needs=Needs(device=75, host=40, disk=7, megatron=True),
        about_s=120,
    ),
    Part(
        name="megatron_mfu_8b_lora",
        title="megatron-core: training MFU, 8B shape, LoRA of rank 32, packs of 8k tokens",
        run=partial(mfu.run, variants=_MFU_MEGATRON_LORA),
        needs=Needs(device=75, host=40, disk=17, megatron=True),
        about_s=150,
    ),
    Part(
        name="megatron_offload",
        title="megatron-core: 3B leaves the device and comes back; what stays on it",
        run=megatron.run,
        needs=Needs(device=75, host=80, disk=7, megatron=True),
        about_s=120,
    ),
)
"""What each needs is added up from 16 bytes a parameter that learns, 2 of a copy, and the engine's
share of the device; a part may still say in its notes that it took another way."""
