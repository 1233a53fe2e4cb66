"""Rules about groups of servers on the trainer's devices; silent without ``serving.colocated``."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import HALVES, PlacedGroup
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

_OWN = ("serving.colocated=false", "rollout.sleep=false")
_OF_OWN_ENGINES = ("kill", "stop", "cut")


def check_shared_devices_are_given_back(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Groups on devices of the trainer sleep while it computes; others never do."""
    serving, sleeps = config.serving, config.rollout.sleep
    if not serving.models:
        return
    if serving.colocated and not sleeps:
        names = ", ".join(f"{group.model}.{group.name}" for group in _fused(config))
        yield ConfigError(
            "serving.colocated",
            got=True,
            rule=f"groups {names} and the trainer want the same devices, and rollout.sleep=false "
            "gives none back",
            remedies=[("rollout.sleep=true",), ("serving.colocated=false",)],
        )
    if not serving.colocated and sleeps:
        yield ConfigError(
            "rollout.sleep",
            got=True,
            rule="would be ignored: servers have devices of their own (serving.colocated=false)",
            remedies=[("rollout.sleep=false",)],
        )


def check_servers_have_the_trainers_devices(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Colocated servers have at least the devices of the trainer: each rank has an engine."""
    serving, cluster = config.serving, config.cluster
    if not serving.models or serving.num_devices_per_node >= config.num_shared_per_node:
        return
    yield ConfigError(
        "serving.num_devices_per_node",
        serving.num_devices_per_node,
        f"with serving.colocated=true all {cluster.num_ranks_per_node} devices of the trainer on a "
        "node are devices of the servers, too",
        fix=f"add groups for {cluster.num_ranks_per_node} devices on each node, or make "
        f"cluster.num_ranks_per_node={serving.num_devices_per_node}, or give the servers own "
        f"devices: {' '.join(_OWN)}",
        remedies=[_OWN],
    )


def check_groups_are_fused_or_own(config: ExperimentConfig) -> Iterator[ConfigError]:
    """No group has devices of the trainer and others."""
    per_node = max(1, config.serving.num_devices_per_node)  # 0 is refused with groups
    num_shared = config.num_shared_per_node
    for group in config.serving.placed_groups:
        first, num_devices = group.first_device, group.config.num_devices
        shared = [device % per_node < num_shared for device in range(first, first + num_devices)]
        if len(set(shared)) > 1:
            yield ConfigError(
                f"{group.key}.num_devices",
                num_devices,
                f"{sum(shared)} of these devices are the trainer's and the others are not; its "
                "engines would sleep and not sleep",
                fix=f"make two groups of it, one for each kind, or {instruction(_OWN)}",
                remedies=[_OWN],
            )


def check_fused_groups_are_engines_of_ranks(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks lead regular engines of the policy, all with the settings of ``rollout``."""
    for group in _fused(config):
        section = group.config
        if config.serving.models[group.model].path is not None:
            yield ConfigError(
                f"serving.models.{group.model}.path",
                config.serving.models[group.model].path,
                f"group {group.name} is on devices of the trainer, whose ranks lead engines of the "
                "policy alone",
                fix=f"list {group.model} behind the policy, whose groups take these devices",
            )
        if section.worker_type != "regular":
            key = f"{group.key}.worker_type"
            rule = "the ranks lead regular engines alone, one for each group of their devices"
            remedies = [(f"{key}=regular",)]
            yield ConfigError(key, section.worker_type, rule, remedies=remedies)
        if section.engine_args:
            key = f"{group.key}.engine_args"
            reset = resetting(key, section.engine_args, {})
            rule = "would be ignored: the engines of ranks take those of rollout.engine_args"
            yield ConfigError(
                key, dict(section.engine_args), rule, instruction(reset), remedies=[reset]
            )


def check_fused_engines_have_one_size(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks share engines as ``rollout.tensor_parallel_size`` says, in all groups alike."""
    size = config.rollout.tensor_parallel_size
    for group in _fused(config):
        if group.config.devices_per_engine != size:
            key = f"{group.key}.devices_per_engine"
            yield ConfigError(
                key,
                group.config.devices_per_engine,
                f"its engines are those of the ranks, with rollout.tensor_parallel_size={size}",
                remedies=[(f"{key}={size}",)],
            )


def check_fused_engines_are_reached(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Halves of a request find each other only among engines of one kind."""
    if not config.serving.models or not config.serving.colocated:
        return
    groups = [g for g in config.serving.placed_groups if not config.is_fused(g)]
    if halves := [g.name for g in groups if g.config.worker_type in HALVES]:
        yield ConfigError(
            "serving.colocated",
            got=True,
            rule="halves of a request are not built beside engines of the ranks (groups "
            f"{', '.join(halves)})",
            remedies=[_OWN],
        )


def check_faults_reach_their_engines(config: ExperimentConfig) -> Iterator[ConfigError]:
    """No signal of the manager reaches an engine of a rank."""
    for name, fault in config.serving.faults.items():
        if fault.kind in _OF_OWN_ENGINES and config.serving.colocated and _fused(config):
            key = f"serving.faults.{name}.kind"
            rule = "the manager ends and cuts no engines of ranks (serving.colocated=true)"
            yield ConfigError(key, fault.kind, rule, remedies=[(f"{key}=error",)])


def _fused(config: ExperimentConfig) -> list[PlacedGroup]:
    return [group for group in config.serving.placed_groups if config.is_fused(group)]


RULES = (
    check_shared_devices_are_given_back,
    check_servers_have_the_trainers_devices,
    check_groups_are_fused_or_own,
    check_fused_groups_are_engines_of_ranks,
    check_fused_engines_have_one_size,
    check_fused_engines_are_reached,
    check_faults_reach_their_engines,
)
