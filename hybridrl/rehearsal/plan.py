"""The memory plan of a run: its own code, executed on fake devices in processes of their own.

Memory of a phase grows by the same bytes with each layer. So two small numbers of layers are
executed, and give the full model. Kinds of fullest moments are kept apart, since with more layers
another one may be the fullest of all.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Colocated, Fused
from hybridrl.errors import HybridRLError, RehearsalError
from hybridrl.models.architecture import Architecture, architecture_of
from hybridrl.planning.plan import (
    WITH_ENGINE,
    MemoryItem,
    MemoryKind,
    MemoryPlan,
    Phase,
    capacity_bytes,
)
from hybridrl.planning.rollout import RolloutMemory

_GIB = 2**30
_MIB = 2**20

_PHASES = (
    *("build", "offload_optimizer", "sync", "generate", "reward", "values", "logprobs"),
    *("critic_update", "update"),
)
"""In the order of a run, by the names of a rank's meter."""

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_SERVER = 1300 * _MIB
"""Host memory of SGLang before any weights, not shared; measured with SGLang 0.5.21."""

_UNKNOWN_DEVICE = 80 * _GIB
_LONGEST_PERIOD = 8
_REPORT_EVERY_S = 4.0
_MAPPED = "weights on their way in"

_FEWEST = 3
"""Layers of which one is first, one last and one between: from here on memory grows evenly."""

_AT_FULL_SIZE = "sync"
"""The phase that a few layers do not show: buckets of weights have a size of their own."""

Moments = dict[str, dict[str, int]]
"""Fullest moments of a phase: bytes by use, one for each kind of memory that was taken last."""


Case = tuple[int, int, Literal["steps", "weights", "critic"]]
"""Pipeline stage, number of layers, and what a rank does: its steps, or what these do to weights
alone, or the steps of a critic's own rank."""

Report = Callable[[str], object]
"""Hears how far something is."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Memory and events of one execution."""

    device: dict[str, Moments] = field(default_factory=dict)
    """Of the GPU, by phase."""

    host: dict[str, Moments] = field(default_factory=dict)
    """Of this rank on the host."""

    events: dict[str, int] = field(default_factory=dict)
    """Copies and synchronisations of the last step, with the product's lines."""


def plan_by_execution(
    config: ExperimentConfig, *, is_quick: bool = False, report: Report = lambda _: None
) -> MemoryPlan:
    """Execute a rank's cycle and return the memory of its phases, on the fullest pipeline stage.

    Phases that only build and move weights are executed with all layers. ``is_quick`` leaves out
    the one that a few layers do not show.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
        HybridRLError: the run would raise it, too.
        RehearsalError: another error of the cycle.
    """
    model = architecture_of(config.model)
    num_layers = model.num_layers
    stages = sorted({0, _num_stages(config) - 1})  # those between have neither embedding nor head
    sizes = layers_to_execute(config, model)
    cases: list[Case] = [(stage, size, "steps") for stage in stages for size in sizes]
    full: Case | None = None if is_quick or sizes == (num_layers,) else (0, num_layers, "weights")
    executed = _execute_all(config, cases if full is None else [full, *cases], report)
    plans = []
    for stage in stages:
        of_stage = [executed[stage, size, "steps"] for size in sizes]
        at_full_size = None if full is None else executed[full]
        phases = _phases(config, model, of_stage, sizes, at_full_size, is_quick=is_quick)
        shown = stage if len(stages) > 1 else None
        plans.append(MemoryPlan(config.cluster.device, tuple(phases), shown))
    return max(plans, key=lambda plan: sorted(map(plan.peak_bytes, plan.phases), reverse=True))


def plan_critic_pool(
    config: ExperimentConfig, *, report: Report = lambda _: None
) -> MemoryPlan | None:
    """Execute a step of the critic's own ranks; None if it has none. See ``plan_by_execution``."""
    if not config.has_critic_pool:
        return None
    model = architecture_of(config.model)
    sizes = layers_to_execute(config, model)
    executed = _execute_all(config, [(0, size, "critic") for size in sizes], report)
    of_sizes = [executed[0, size, "critic"] for size in sizes]
    phases = _phases(config, model, of_sizes, sizes, None, is_quick=False)
    return MemoryPlan(config.cluster.device, tuple(phases))


def _execute_all(
    config: ExperimentConfig, cases: Iterable[Case], report: Report
) -> dict[Case, Executed]:
    """Execute cases side by side, each in a process of its own, which it changes for good."""
    cases, begin = sorted(cases, key=lambda case: -case[1]), time.monotonic()
    num_processes = min(len(cases), os.cpu_count() or 1)
    pool = ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), max_tasks_per_child=1
    )
    with pool:
        futures = {case: pool.submit(execute, config, case) for case in cases}
        while len(done := wait(futures.values(), timeout=_REPORT_EVERY_S).done) < len(futures):
            took_s = time.monotonic() - begin
            report(f"{len(done)} of {len(futures)} executions on fake devices, {took_s:.0f} s")
        try:
            return {case: future.result() for case, future in futures.items()}
        except HybridRLError:
            raise
        except Exception as error:
            # The pool's traceback has the lines of the other process, where the product failed.
            lines = [line.strip() for line in str(error.__cause__ or "").splitlines()]
            own = [line for line in lines if line.startswith("File ") and "/hybridrl/" in line]
            raise RehearsalError(
                f"on fake devices a rank fails: {type(error).__name__}: {error}\n"
                f"{own[-1] if own else ''}"
            ) from error


def layers_to_execute(config: ExperimentConfig, model: Architecture) -> tuple[int, ...]:
    """Return two numbers of layers that stand for the full model; or its own, if it is small."""
    megatron = config.megatron
    is_even = megatron.num_layers_in_first_stage is megatron.num_layers_in_last_stage is None
    num_parts = _num_stages(config)
    if config.megatron_worlds:
        num_parts *= megatron.num_virtual_stages
    kinds = [
        (model.is_sparse(layer), model.is_recurrent(layer)) for layer in range(model.num_layers)
    ]
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


def _num_stages(config: ExperimentConfig) -> int:
    return config.megatron.pipeline_parallel_size if config.megatron_worlds else 1


def execute(config: ExperimentConfig, case: Case) -> Executed:
    """Execute the cycle of a rank on hollow models, in a process of its own.

    Modules are imported by name: only here may torch be imported, and it must be changed before
    anything uses it.
    """
    stage, num_layers, work = case
    warnings.simplefilter("ignore")  # of the packages: a run says them once more
    logging.disable(logging.WARNING)
    gpu = import_module("hybridrl.rehearsal.gpu").FakeGpu(
        num_bytes=capacity_bytes(config.cluster) or _UNKNOWN_DEVICE,
        num_devices=config.cluster.num_ranks_per_node,
    )
    import_module("hybridrl.rehearsal.server").stand_in_for_package()
    with tempfile.TemporaryDirectory(prefix="hybridrl-rehearsal-") as folder, gpu:
        models = import_module("hybridrl.rehearsal.model_folder")
        hollow = models.with_hollow_models(config, Path(folder), num_layers=num_layers)
        rank = stage * (config.cluster.num_ranks // _num_stages(config))
        cycles = import_module("hybridrl.rehearsal.cycle")
        executed: Executed
        if work == "critic":
            executed = cycles.CriticCycle(hollow, gpu).run()
        elif work == "steps":
            executed = cycles.Cycle(hollow, gpu, rank=rank).run()
        else:  # only the first sync writes files, and on one rank of a machine
            hollow = replace(hollow, rollout=replace(hollow.rollout, verify_weights="never"))
            executed = cycles.Cycle(hollow, gpu, rank=rank).run_without_computing()
        return executed


def _phases(
    config: ExperimentConfig,
    model: Architecture,
    computing: Sequence[Executed],
    sizes: Sequence[int],
    full: Executed | None,
    *,
    is_quick: bool,
) -> Iterator[Phase]:
    num_layers = model.num_layers
    for name in _PHASES:
        if is_quick and name == _AT_FULL_SIZE and sizes != (num_layers,):
            continue
        executions, layers = computing, sizes
        if full is not None and name in full.device:
            executions, layers = [full], (num_layers,)
        if name not in executions[0].device:
            continue
        device = _fullest([each.device[name] for each in executions], layers, num_layers)
        host = _fullest([each.host[name] for each in executions], layers, num_layers)
        host.pop(_MAPPED, None)  # pages of files, which all ranks of a machine share
        items = [
            *(MemoryItem(use, num_bytes) for use, num_bytes in device.items()),
            *(MemoryItem(use, num_bytes, MemoryKind.HOST) for use, num_bytes in host.items()),
            *_outside(config, model, name),
        ]
        yield Phase(name, tuple(item for item in items if item.num_bytes >= _MIB))


def _outside(config: ExperimentConfig, model: Architecture, phase: str) -> Iterator[MemoryItem]:
    """Yield what a rank and its engine's server hold on the host besides large tensors."""
    yield MemoryItem("Python, torch, Ray", _PROCESS, MemoryKind.HOST)
    if config.rollout.engine != "sglang" or not isinstance(config.topology, Fused | Colocated):
        return
    engine = RolloutMemory(config, model)
    yield MemoryItem("SGLang's processes", _SERVER, MemoryKind.HOST)
    yield MemoryItem("routed experts", engine.server_routes, MemoryKind.HOST)
    keeps_base = config.lora.sends_adapters and config.lora.base == "backup"
    if config.rollout.sleep and phase not in WITH_ENGINE:
        if config.rollout.backup_weights == "always":
            yield MemoryItem("backup of rollout weights", engine.weights, MemoryKind.HOST)
        elif keeps_base:
            yield MemoryItem("backup of rollout weights", engine.base_weights, MemoryKind.HOST)


def _fullest(moments: Sequence[Moments], sizes: Sequence[int], num_layers: int) -> dict[str, int]:
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
    distance = (num_layers - small) / (large - small)
    extrapolated = {}
    for use in {**fewer, **more}:
        at_small, at_large = fewer.get(use, 0), more.get(use, 0)
        extrapolated[use] = max(0, round(at_small + (at_large - at_small) * distance))
    return extrapolated
