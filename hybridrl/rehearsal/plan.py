"""The memory plan of a run: its own code, executed on fake devices in processes of their own.

Memory of a phase grows by the same bytes with each layer. So two small numbers of layers are
executed, and give the full model. Kinds of fullest moments are told apart, since with more layers
another one may be the fullest of all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from hybridrl.config.architecture import Architecture, architecture_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase, capacity_bytes

_GIB = 2**30
_MIB = 2**20

_PHASES = (
    *("build", "offload_optimizer", "sync", "generate", "reward", "values", "logprobs"),
    *("critic_update", "update", "export"),
)
"""In the order of a run, by the names of a rank's meter."""

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_SERVER = 1300 * _MIB
"""Host memory of SGLang before any weights, not shared; measured with SGLang 0.5.21."""

_UNKNOWN_DEVICE = 80 * _GIB
_LONGEST_PERIOD = 8

_FEWEST = 3
"""Layers of which one is first, one last and one between: from here on memory grows evenly."""

_OUTSIDE_TORCH = (
    *("CUDA, NCCL, fragments", "SGLang itself", "rollout weights", "KV cache"),
    "SGLang's graphs",
)

Moments = dict[str, dict[str, int]]
"""Fullest moments of a phase: bytes by use, one for each kind of memory that was taken last."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What the cycle of a rank showed."""

    device: dict[str, Moments] = field(default_factory=dict)
    """Of the GPU, by phase."""

    host: dict[str, Moments] = field(default_factory=dict)
    """Of this rank on the host."""

    events: dict[str, int] = field(default_factory=dict)
    """Copies and synchronisations of the last step, with the product's lines."""


def plan_by_execution(config: ExperimentConfig) -> MemoryPlan:
    """Execute a rank's cycle and return the memory of its phases, on the fullest pipeline stage.

    Phases that only build and move weights are executed with all layers.

    Args:
        config: has passed its checks.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
        Exception: whatever the cycle raises: the run would raise it, too.
    """
    num_layers, stages = architecture_of(config.model).num_layers, _stages(config)
    sizes = layers_to_execute(config, architecture_of(config.model))
    whole = (0, num_layers, sizes == (num_layers,))
    cases = {whole, *((stage, size, True) for stage in stages for size in sizes)}
    context = get_context("spawn")  # a rehearsal changes its process for good
    num_processes = min(len(cases), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_processes, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {case: pool.submit(execute, config, *case) for case in sorted(cases)}
        executed = {case: future.result() for case, future in futures.items()}
    plans = []
    for stage in stages:
        computing = [executed[stage, size, True] for size in sizes]
        phases = _phases(config, executed[whole], computing, sizes=sizes)
        shown = stage if len(stages) > 1 else None
        plans.append(MemoryPlan(config.cluster.device, tuple(phases), shown))
    return max(plans, key=lambda plan: sorted(map(plan.peak_bytes, plan.phases), reverse=True))


def layers_to_execute(config: ExperimentConfig, model: Architecture) -> tuple[int, ...]:
    """Return two numbers of layers that stand for the full model; or its own, if it is small."""
    megatron = config.megatron
    is_even = megatron.num_layers_in_first_stage is megatron.num_layers_in_last_stage is None
    num_parts = 1
    if config.megatron_worlds:
        num_parts = megatron.pipeline_parallel_size * megatron.num_virtual_stages
    kinds = [model.is_sparse(layer) for layer in range(model.num_layers)]
    block = num_parts * (_period(kinds) or model.num_layers)
    if not is_even or _FEWEST * block + block >= model.num_layers:
        return (model.num_layers,)
    return _FEWEST * block, (_FEWEST + 1) * block


def _period(kinds: Sequence[object]) -> int | None:
    """Return after how many layers their kinds repeat; None: not soon."""
    for period in range(1, _LONGEST_PERIOD + 1):
        if all(kind == kinds[number % period] for number, kind in enumerate(kinds)):
            return period
    return None


def _stages(config: ExperimentConfig) -> list[int]:
    """Return the pipeline stages that differ: those between have neither embedding nor head."""
    num_stages = config.megatron.pipeline_parallel_size if config.megatron_worlds else 1
    return sorted({0, num_stages - 1})


def execute(
    config: ExperimentConfig,
    stage: int,
    num_layers: int,
    computes: bool = True,  # noqa: FBT001, FBT002 - through a pool of processes
) -> Executed:
    """Execute the cycle of a rank, in a process of its own.

    Args:
        config: of the run.
        stage: pipeline stage of the rank.
        num_layers: of its models, at most.
        computes: whether it scores and updates, too.
    """
    # By name: only here may torch be imported, and it must be changed before anything uses it.
    gpu = import_module("hybridrl.rehearsal.gpu").FakeGpu(
        num_bytes=capacity_bytes(config.cluster) or _UNKNOWN_DEVICE,
        num_devices=config.cluster.num_ranks_per_node,
    )
    with tempfile.TemporaryDirectory(prefix="hybridrl-rehearsal-") as folder, gpu:
        hollow = import_module("hybridrl.rehearsal.model_folder")
        with_folders = hollow.with_hollow_models(config, Path(folder), num_layers=num_layers)
        num_stages = config.megatron.pipeline_parallel_size if config.megatron_worlds else 1
        rank = stage * (config.cluster.num_ranks // num_stages)
        if not computes:  # only the first sync writes files, and on one rank of a machine
            no_files = replace(with_folders.rollout, verify_weights="never")
            with_folders = replace(with_folders, rollout=no_files)
        import_module("hybridrl.rehearsal.server").stand_in_for_package()
        cycle = import_module("hybridrl.rehearsal.cycle").Cycle(with_folders, gpu, rank=rank)
        executed: Executed = cycle.run() if computes else cycle.run_without_computing()
        return executed


def _phases(
    config: ExperimentConfig,
    whole: Executed,
    computing: Sequence[Executed],
    *,
    sizes: Sequence[int],
) -> Iterator[Phase]:
    num_layers = architecture_of(config.model).num_layers
    for name in _PHASES:
        found, layers = ([whole], [num_layers]) if name in whole.device else (computing, sizes)
        if name not in found[0].device:
            continue
        device = _fullest([each.device[name] for each in found], layers, num_layers)
        host = _fullest([each.host[name] for each in found], layers, num_layers)
        items = [
            *(
                MemoryItem(use, num_bytes, is_measured=use not in _OUTSIDE_TORCH)
                for use, num_bytes in device.items()
            ),
            *(MemoryItem(use, num_bytes, MemoryKind.HOST) for use, num_bytes in host.items()),
            *_processes(config),
        ]
        yield Phase(name, tuple(item for item in items if item.num_bytes >= _MIB))


def _processes(config: ExperimentConfig) -> Iterator[MemoryItem]:
    yield MemoryItem("Python, torch, Ray", _PROCESS, MemoryKind.HOST, is_measured=False)
    if config.rollout.engine == "sglang" and (config.has_fused_engines or not config.has_servers):
        yield MemoryItem("SGLang's processes", _SERVER, MemoryKind.HOST, is_measured=False)


def _fullest(
    moments: Sequence[Moments], sizes: Sequence[int], num_layers: int
) -> Mapping[str, int]:
    """Return who has memory at the fullest moment of a phase in the full model."""
    kinds = dict.fromkeys(kind for each in moments for kind in each)
    at_full_size = [
        _extrapolated([each.get(kind, {}) for each in moments], sizes, num_layers) for kind in kinds
    ]
    return max(at_full_size, key=lambda uses: sum(uses.values()), default={})


def _extrapolated(
    uses: Sequence[Mapping[str, int]], sizes: Sequence[int], num_layers: int
) -> dict[str, int]:
    if len(uses) == 1:
        return dict(uses[0])
    (small, large), (fewer, more) = sizes, uses
    return {
        use: _line(fewer.get(use, 0), more.get(use, 0), (num_layers - small) / (large - small))
        for use in {**fewer, **more}
    }


def _line(at_small: int, at_large: int, distance: float) -> int:
    return max(0, round(at_small + (at_large - at_small) * distance))
