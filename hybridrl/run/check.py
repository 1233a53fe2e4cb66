"""``mode=check``: all that a run would refuse, and what it would do; it starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config, read_config
from hybridrl.config.serving import PlacedGroup
from hybridrl.config.summary import sentence, summarize
from hybridrl.config.topology import Colocated
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.planning.advice import find_misfits
from hybridrl.planning.fit import find_fits
from hybridrl.planning.page import memory_lines, plan_page
from hybridrl.rehearsal.plan import plan_by_execution, plan_critic_pool
from hybridrl.rewards.runner import find_reward_flaws
from hybridrl.run.readiness import missing_here
from hybridrl.serving.plan import plan_servers
from hybridrl.workers.engine_settings import engine_config, group_arguments, led_config
from hybridrl.workers.rollout.sglang.rehearsal import rehearse_server

_MEGATRON_REHEARSAL = "hybridrl.workers.train.megatron.rehearsal"  # 5 s, and may not be installed
_REHEARSED_PORT = 20_000
_ROWS_CHECK = "hybridrl.run.rows_check"  # it imports torch, to tokenize as a run does
_WEIGHTS_CHECK = "hybridrl.run.weights_check"  # and so does this, for the model without memory


def load_or_refuse(values: Mapping[str, object]) -> ExperimentConfig:
    """Load a configuration as `load_config`; ``mode=check`` names bad rows beside its violations.

    Raises:
        ConfigErrors: it is not valid.
    """
    try:
        return load_config(values)
    except ConfigErrors as errors:
        config, _ = read_config(values)
        if config is None or config.mode != "check" or not any(config.files_by_key.values()):
            raise
        rows = import_module(_ROWS_CHECK).find_bad_rows(config, refused=errors.violations)
        raise ConfigErrors([*errors.violations, *rows]) from errors


def check(config: ExperimentConfig) -> None:
    """Load reward functions and rows as a run would, then print the page of ``mode=check``.

    Raises:
        ConfigErrors: a function cannot be loaded, a memory is too small, weights or rows are bad.
        HybridRLError: a rank of the run would fail so, as its cycle on fake devices does.
    """
    refused = find_reward_flaws(config.reward)
    if config.model.path is not None:  # only then: torch takes seconds
        refused += import_module(_WEIGHTS_CHECK).find_bad_weights(Path(config.model.path))
    if any(config.files_by_key.values()):
        refused += import_module(_ROWS_CHECK).find_bad_rows(config)
    memory, misfits = _memory_of(config)
    if refused or misfits:
        raise ConfigErrors([*refused, *misfits])
    sys.stdout.write(f"{summarize(config)}\n")
    for line in memory:
        sys.stdout.write(f"{'memory':<17} {line}\n")
    sys.stdout.flush()
    for line in _rehearse(config):
        sys.stdout.write(f"{'rehearsal':<17} {line}\n")
    for note in missing_here(config):
        sys.stdout.write(f"{'note':<17} {note}\n")
    sys.stdout.write(f"\nA run would {sentence(config)}.\n")


def plan(config: ExperimentConfig) -> None:
    """Print the page of ``mode=plan``.

    Raises:
        ConfigErrors: a memory is too small; the page is printed before.
        HybridRLError: a rank of the run would fail so, as its cycle on fake devices does.
    """
    memory = plan_by_execution(config, report=_report)
    fits = list(find_fits(config, memory, plan_critic_pool(config, report=_report)))
    sys.stdout.write(plan_page(config, memory, fits))
    if misfits := find_misfits(config, fits):
        raise ConfigErrors(misfits)


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _memory_of(config: ExperimentConfig) -> tuple[list[str], list[ConfigError]]:
    """Return lines about memory, and what does not fit. A run on a CPU is sooner tried."""
    if config.cluster.device == "cpu":
        return ["mode=plan executes a step without values, and shows the memory of each phase"], []
    memory = plan_by_execution(config, is_quick=True, report=_report)
    fits = list(find_fits(config, memory))
    return memory_lines(fits), find_misfits(config, fits)


def rehearse_megatron(config: ExperimentConfig) -> list[str]:
    """Let megatron-core check the run's arguments, where it can be imported on this machine.

    Returns:
        Lines for the user: the checked arguments, the unchecked ones, and megatron-core's answer.

    Raises:
        ConfigErrors: arguments that megatron-core would refuse when the run starts.
        ModelError: it cannot compute the model.
    """
    if not config.megatron_worlds:
        return []
    try:
        rehearsal = import_module(_MEGATRON_REHEARSAL)
    except ImportError as err:
        return [
            f"not checked: what megatron-core takes, for it cannot be imported here ({err}); "
            "pip install 'hybridrl[megatron]'"
        ]
    lines: list[str] = rehearsal.rehearse(config)
    return lines


def _rehearse(config: ExperimentConfig) -> Iterator[str]:
    """Let the packages of a run check its configuration; yields lines for the user."""
    yield from rehearse_megatron(config)
    groups = list(rehearsed_configs(config)) if config.has_servers else []
    if config.rollout.engine == "sglang" and (groups or not config.has_servers):
        sys.stderr.write("asking SGLang about its arguments, some 10 s ...\n")
        if not config.has_servers:
            yield f"SGLang: {rehearse_server(config)}"
            return
        for group, of_engine in groups:
            keys = {name: f"{group.key}.engine_args.{name}" for name in group.config.engine_args}
            yield f"SGLang, {group.key}: {rehearse_server(of_engine, keys=keys)}"


_REHEARSED_PORT = 20_000


def rehearsed_configs(
    config: ExperimentConfig,
) -> Iterator[tuple[PlacedGroup, ExperimentConfig]]:
    """Yield each group with engines, and the configuration of one with ports that nobody opens."""
    topology = config.topology
    led = topology.engines if isinstance(topology, Colocated) else ()
    first_of = {each.group.key: each for each in reversed(led) if each.group is not None}
    plans = {
        (plan.model, group.name): group for plan in plan_servers(config) for group in plan.groups
    }
    for placed in config.serving.placed_groups:
        if not placed.config.num_engines:
            continue
        port = _REHEARSED_PORT if placed.config.worker_type == "prefill" else None
        if placed.key in first_of:
            yield placed, led_config(config, first_of[placed.key], bootstrap_port=port)
            continue
        args = group_arguments(placed.config, bootstrap_port=port)
        num_nodes = plans[placed.model, placed.name].num_nodes_per_engine
        if num_nodes > 1:
            args |= {
                "nnodes": num_nodes,
                "node_rank": 0,
                "dist_init_addr": f"127.0.0.1:{_REHEARSED_PORT}",
                "nccl_port": _REHEARSED_PORT,
            }
        yield placed, engine_config(config, args, num_devices=placed.config.devices_per_engine)
