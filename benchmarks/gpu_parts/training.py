"""Training: model FLOPs utilisation with packs of 8k tokens, and what leaves the device."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.bench import GIB, MIB, Bench
from benchmarks.gpu_parts.rank import Setup, read_setup, small
from benchmarks.gpu_parts.transfers import pinned_bandwidth, seconds_on, synchronize
from benchmarks.sides.one_rank import stand_alone
from hybridrl.batch import TrainBatch, jagged_from, spread_over_tokens
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.planning.split import count_parameters
from hybridrl.workers.build import build_policy_loss, build_train_engine
from hybridrl.workers.checkpointed import start_process_group
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState

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
        return f"{engine}{self.shape}_{self.masters}_{way}{kind}".translate({46: "_", 45: "_"})


def both(
    shape: str, masters: str, *, engine: str = "fsdp2", has_adapter: bool = False
) -> tuple[Variant, ...]:
    """Return a way that keeps activations, and one that computes them again.

    Full fine-tuning of 8B by megatron-core takes 18 bytes a parameter on one rank: more than such a
    device has.
    """
    return tuple(
        Variant(shape, masters, recomputes, engine, has_adapter) for recomputes in (False, True)
    )


class Trained:
    """The training engine of a variant, and rows that fill its packs."""

    def __init__(self, bench: Bench, variant: Variant) -> None:
        setup = Setup(
            shape=variant.shape,
            masters=variant.masters,
            checkpointing=variant.checkpointing,
            lora_base="resend" if variant.has_adapter else None,
            extra=(f"actor.engine={variant.engine}",),
        )
        if variant.engine == "megatron" and not bench.on_cuda:  # it asks for CUDA everywhere
            import_module("tests.megatron.stand_ins").install()
            bench.record.not_exercised("megatron-core on CUDA: it ran on a CPU, behind stand-ins")
        config = read_setup(bench, small(setup) if bench.is_dry else setup)
        folder = bench.model(variant.shape)
        stand_alone()
        self.model = read_architecture(folder)
        self.device = start_process_group(device=bench.device.type, local_rank=0, timeout_s=600.0)
        self.engine: PolicyEngine = build_train_engine(config, folder, self.device)
        self.batch = rows_of_packs(bench, vocab_size=self.model.vocab_size)
        self.update = partial(
            self.engine.update,
            self.batch,
            loss=build_policy_loss(config),
            aggregation=TOKEN_MEAN,
            temperature=1.0,
            max_response_tokens=_ROW_TOKENS,
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
        if bench.on_cuda:
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
    trained = Trained(bench, variant)
    trained.update()
    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_on(bench.device, trained.update, repeats=bench.size(3, dry=1), num_warmup=0)
    num_tokens = int(trained.batch.response_mask_BL.values().sum())
    per_parameter = 4 if variant.has_adapter else 6  # frozen weights have no gradient
    flops = per_parameter * num_product_parameters(trained.model) * num_tokens
    mfu = flops / seconds / _PEAK_FLOPS
    bench.record.figure(f"{variant.name}_tokens_per_s", num_tokens / seconds, "tokens/s")
    bench.record.figure(f"{variant.name}_update_s", seconds, "s")
    bench.record.figure(f"{variant.name}_mfu", mfu, "1")
    if bench.on_cuda:
        peak = torch.cuda.max_memory_allocated() / GIB
        bench.record.figure(f"{variant.name}_peak_gib", peak, "GiB")
    _name_kernels(bench, trained.update)
    return mfu


def num_product_parameters(model: Architecture) -> int:
    """Return N: parameters that a token is multiplied with; an input embedding is looked up."""
    looked_up = 0 if model.is_tied else model.vocab_size * model.hidden_size
    return count_parameters(model) - looked_up


def _name_kernels(bench: Bench, update: Callable[[], object]) -> None:
    if not bench.on_cuda:
        bench.record.not_exercised("naming kernels: there are none on a CPU")
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        update()
        synchronize(bench.device)
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


def run_offload(bench: Bench) -> None:
    """Let megatron-core learn, leave the device, come back, and learn again."""
    record = bench.record
    to_host, to_device = pinned_bandwidth(bench)
    trained = Trained(
        bench, Variant("qwen2.5-3b", "float32", checkpointing=True, engine="megatron")
    )
    engine = trained.engine
    trained.update()
    away, back = [], []
    for _ in range(bench.size(4, dry=2)):
        num_bytes = sum(engine.resident_bytes(part) for part in TrainState)
        away.append(_seconds_of_all(bench, engine.offload))
        _look(bench, engine, trained.device)
        back.append(_seconds_of_all(bench, engine.restore))
        trained.update()
    # The first time pins the host's memory.
    away_s, back_s = statistics.median(away[1:]), statistics.median(back[1:])
    record.figure("offloaded_bytes", num_bytes, "bytes")
    record.figures({"first_offload_s": away[0], "offload_s": away_s, "restore_s": back_s}, "s")
    record.figure("offload_share", num_bytes / 1e9 / away_s / to_host, "1")
    record.figure("restore_share", num_bytes / 1e9 / back_s / to_device, "1")


def _seconds_of_all(bench: Bench, move: Callable[[TrainState], object]) -> float:
    return seconds_on(
        bench.device, lambda: [move(part) for part in TrainState], repeats=1, num_warmup=0
    )


def _look(bench: Bench, engine: PolicyEngine, device: torch.device) -> None:
    """Record what stays while all is away; nothing of the engine may."""
    left = sum(engine.resident_bytes(part) for part in TrainState)
    bench.record.figure("left_bytes", left, "bytes")
    DeviceMemory(device).empty_cache()
    residue = DeviceMemory(device).residue_bytes()
    if residue is None:
        bench.record.not_exercised("what stays on the device: a CPU has no context and no NCCL")
        return
    bench.record.figure("residue_mib", residue / MIB, "MiB")
    bench.record.figure("reserved_mib", torch.cuda.memory_reserved(device) / MIB, "MiB")
