"""All parts, in the order in which they run: cheap proofs first."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_parts import commands, cycle, rollout, training, transfers
from benchmarks.gpu_parts.bench import Needs, Part
from benchmarks.gpu_parts.training import both

_TEN = "ten cycles of full fine-tuning"
_LORA = "ten cycles of LoRA rank 32, 7B, base"
_PACKS = "packs of 8k tokens"
_SMALL, _LARGE = Needs(75, 40, 16, "sglang"), Needs(75, 60, 16, "sglang")

PARTS = (
    Part(
        "start_up", "versions, memory, disk, rate of a matrix product", transfers.run_start_up, 30
    ),
    Part(
        "transfers",
        "pinned bandwidth both ways, device copies, offload and restore of odd tensors",
        transfers.run,
        40,
        Needs(40, 40),
    ),
    Part("checks", "`pytest -m gpu`", commands.run_checks, 280),
    Part(
        "cycle_0_5b",
        f"{_TEN}, 0.5B",
        partial(cycle.run, shape="qwen2.5-0.5b", memory_fraction=0.5),
        100,
        Needs(40, 24, 2, "sglang"),
    ),
    Part(
        "learn",
        "a GRPO run from the command line learns the default task",
        commands.run_learn,
        180,
        Needs(20, 24, 0, "sglang"),
    ),
    Part(
        "sync_8b", "full sync of 8B in bfloat16", cycle.run_sync, 140, Needs(75, 48, 17, "sglang")
    ),
    Part(
        "cycle_7b",
        f"{_TEN}, 7B with float32 masters",
        partial(cycle.run, shape="qwen2.5-7b", memory_fraction=0.85),
        240,
        Needs(130, 110, 16, "sglang"),
    ),
    Part(
        "lora_backup",
        f"{_LORA} kept on the host",
        partial(cycle.run_lora, base="backup"),
        120,
        _LARGE,
    ),
    Part(
        "lora_resident", f"{_LORA} resident", partial(cycle.run_lora, base="resident"), 110, _SMALL
    ),
    Part("lora_resend", f"{_LORA} sent again", partial(cycle.run_lora, base="resend"), 110, _SMALL),
    Part(
        "lora_garbage",
        "LoRA without a copy and without the ledger's guard, once, on purpose",
        cycle.run_garbage,
        120,
        _LARGE,
    ),
    Part("wake", "staged wake-up against a single stage, 7B", cycle.run_wake, 230, _LARGE),
    *(
        Part(
            f"fraction_{percent}",
            f"ten GRPO steps of 7B at memory fraction {percent / 100}",
            partial(cycle.run_steps, memory_fraction=percent / 100),
            270,
            _LARGE,
        )
        for percent in (90, 95)
    ),
    Part("rollout", "rollout tokens/s beside SGLang alone, 7B", rollout.run, 230, _SMALL),
    Part(
        "mfu_8b",
        f"training MFU, 8B shape in bfloat16, {_PACKS}",
        partial(training.run, variants=both("qwen3-8b", "bfloat16")),
        150,
        Needs(75, 40, 17),
    ),
    Part(
        "mfu_3b",
        f"training MFU, 3B shape with float32 masters, {_PACKS}",
        partial(training.run, variants=both("qwen2.5-3b", "float32")),
        100,
        Needs(75, 40, 7),
    ),
    Part(
        "megatron_mfu_3b",
        f"megatron-core: training MFU, 3B shape with float32 masters, {_PACKS}",
        partial(training.run, variants=both("qwen2.5-3b", "float32", engine="megatron")),
        120,
        Needs(75, 40, 7, "megatron-core"),
    ),
    Part(
        "megatron_mfu_8b_lora",
        f"megatron-core: training MFU, 8B shape, LoRA of rank 32, {_PACKS}",
        partial(
            training.run, variants=both("qwen3-8b", "bfloat16", engine="megatron", has_adapter=True)
        ),
        150,
        Needs(75, 40, 17, "megatron-core"),
    ),
    Part(
        "megatron_offload",
        "megatron-core: 3B leaves the device and comes back; what stays on it",
        training.run_offload,
        120,
        Needs(75, 80, 7, "megatron-core"),
    ),
)
"""What each needs is added up from 16 bytes a parameter that learns, 2 of a copy, and the engine's
share of the device; a part may still say in its notes that it took another way."""
