"""Training: tokens a second and model FLOPs utilisation with packs of 8k tokens."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from importlib import import_module

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Setup, read_setup, small, stand_alone
from benchmarks.gpu_parts.shapes import shape_in
from benchmarks.gpu_parts.transfers import synchronize
from hybridrl.batch import TrainBatch, jagged_from, spread_over_tokens
from hybridrl.models.architecture import Architecture
from hybridrl.planning.split import count_parameters
from hybridrl.workers.build import build_policy_loss, build_train_engine
from hybridrl.workers.checkpointed import start_process_group
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine

_PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200 (SXM), by the vendor's data sheet."""

_ROW_TOKENS = 2049  # the last one is not computed
_ROWS_IN_PACK = 4
_PROMPT_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train."""

    shape: str
    masters: str
    checkpointing: bool
    engine: str = "fsdp2"
    has_adapter: bool = False

    @property
    def name(self) -> str:
        """For figures."""
        way = "recomputed" if self.checkpointing else "kept"
        kind = "_lora" if self.has_adapter else ""
        engine = "" if self.engine == "fsdp2" else f"{self.engine}_"
        return f"{engine}{self.shape}_{self.masters}_{way}{kind}".replace(".", "_").replace(
            "-", "_"
        )


def run(bench: Bench, *, variants: tuple[Variant, ...]) -> None:
    """Measure each variant that fits; ``mfu`` is the best of them."""
    best = 0.0
    for variant in variants:
        try:
            best = max(best, _measure(bench, variant))
        except torch.OutOfMemoryError as err:
            bench.record.note(f"{variant.name}: does not fit: {str(err)[:200]}")
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    if best == 0.0:
        raise RuntimeError("no variant fits this device; see the notes")
    bench.record.figure("mfu", best, "1")
    bench.record.note(
        "mfu: 6 N D / seconds / 989e12, 4 N D with an adapter; N without the input embedding where "
        "it is not the output's too, D computed tokens; attention's FLOPs and recomputation are "
        "not counted"
    )


def _measure(bench: Bench, variant: Variant) -> float:
    setup = Setup(
        shape=variant.shape,
        masters=variant.masters,
        checkpointing=variant.checkpointing,
        pack_tokens=8192,
        lora_base="resend" if variant.has_adapter else None,
        extra=(f"actor.engine={variant.engine}",),
    )
    if variant.engine == "megatron":
        use_stand_ins(bench)
    config = read_setup(bench, small(setup) if bench.is_dry else setup)
    folder = bench.model(variant.shape)
    stand_alone()
    device = start_process_group(device=bench.device.type, local_rank=0, timeout_s=600.0)
    engine = build_train_engine(config, folder, device)
    batch = rows_of_packs(bench, vocab_size=shape_in(folder).vocab_size)
    num_tokens = int(batch.response_mask_BL.values().sum())

    def update() -> None:
        engine.update(
            batch,
            loss=build_policy_loss(config),
            aggregation=TOKEN_MEAN,
            temperature=1.0,
            max_response_tokens=_ROW_TOKENS,
        )
        synchronize(bench.device)

    update()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(bench.size(3, dry=1)):
        begin = time.perf_counter()
        update()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    name = variant.name
    per_parameter = 4 if variant.has_adapter else 6  # frozen weights have no gradient
    flops = per_parameter * num_product_parameters(shape_in(folder)) * num_tokens
    bench.record.figure(f"{name}_tokens_per_s", num_tokens / seconds, "tokens/s")
    bench.record.figure(f"{name}_update_s", seconds, "s")
    bench.record.figure(f"{name}_mfu", flops / seconds / _PEAK_FLOPS, "1")
    if bench.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        bench.record.figure(f"{name}_peak_gib", peak, "GiB")
    _name_kernels(bench, engine, update)
    return flops / seconds / _PEAK_FLOPS


def use_stand_ins(bench: Bench) -> None:
    """Let megatron-core run on a CPU in a dry run: it asks for CUDA everywhere."""
    if bench.device.type == "cuda":
        return
    import_module("tests.megatron.stand_ins").install()
    bench.record.not_exercised("megatron-core on CUDA: it ran on a CPU, behind stand-ins")


def num_product_parameters(model: Architecture) -> int:
    """Return N: parameters that a token is multiplied with; an input embedding is looked up."""
    looked_up = 0 if model.is_tied else model.vocab_size * model.hidden_size
    return count_parameters(model) - looked_up


def _name_kernels(bench: Bench, engine: PolicyEngine, update: object) -> None:
    """Name the attention kernels and the five kernels that take longest."""
    if bench.device.type != "cuda":
        bench.record.not_exercised("naming kernels: there are none on a CPU")
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        update()  # type: ignore[operator]
    totals: dict[str, float] = {}
    for event in profiler.events():
        totals[event.name] = totals.get(event.name, 0.0) + event.device_time_total
    longest = sorted(totals, key=lambda name: -totals[name])
    attention = [n for n in longest if "flash" in n.lower() or "fmha" in n.lower()]
    whole = sum(totals.values()) or 1.0
    for name in [*longest[:8], *attention[:3]]:
        bench.record.note(f"kernel {totals[name] / whole:.1%} {name[:140]}")


def rows_of_packs(bench: Bench, *, vocab_size: int) -> TrainBatch:
    """Lay down rows that fill packs of 8192 computed tokens exactly."""
    num_rows = bench.size(8 * _ROWS_IN_PACK, dry=4)
    row_tokens = bench.size(_ROW_TOKENS, dry=17)
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.full((num_rows,), row_tokens)
    positions = torch.arange(row_tokens).repeat(num_rows)
    mask_BL = jagged_from(positions >= _PROMPT_TOKENS, lengths_B)
    count = num_rows * row_tokens
    token_ids = torch.randint(0, vocab_size, (count,), generator=generator)
    return TrainBatch(
        token_ids_BL=jagged_from(token_ids, lengths_B),
        response_mask_BL=mask_BL,
        advantages_BL=spread_over_tokens(torch.randn(num_rows, generator=generator), mask_BL),
        sampler_logprobs_BL=jagged_from(torch.full((count,), -11.0), lengths_B),
        batch_size=[num_rows],
    )
