"""``mode=check``: all that a run would refuse, and what it would do; it starts nothing."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from tempfile import gettempdir

from packaging.requirements import Requirement

from hybridrl.config.experiment import OFFLINE_MODES, ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.load import load_config, read_config
from hybridrl.config.serving import PlacedGroup
from hybridrl.config.summary import note_of_cut_sampling, sentence, summarize
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.models.architecture import find_architecture
from hybridrl.planning.fit import find_fits, find_misfits, memory_lines, plan_page
from hybridrl.planning.rollout import BYTES
from hybridrl.planning.split import count_parameters
from hybridrl.rehearsal.plan import plan_by_execution, plan_critic_pool
from hybridrl.rewards.runner import find_reward_flaws
from hybridrl.run.checkpoints import finished_message, newest_step, should_resume
from hybridrl.serving.plan import engines_of
from hybridrl.workers.engine_settings import engine_config, group_arguments, led_config
from hybridrl.workers.rollout.sglang.rehearsal import rehearse_server

_REHEARSED_PORT = 20_000
_DOCTOR = "hybridrl.run.modes.doctor"  # it imports torch, which takes seconds


def load_or_refuse(values: Mapping[str, object]) -> ExperimentConfig:
    """Load a configuration; where it is refused, ``mode=check`` names bad rows as well."""
    try:
        return load_config(values)
    except ConfigErrors as errors:
        config, _ = read_config(values)
        if config is None or config.mode != "check" or not any(config.files_by_key.values()):
            raise
        rows = import_module(_DOCTOR).find_bad_rows(config, refused=errors.violations)
        raise ConfigErrors([*errors.violations, *rows]) from errors


def check(config: ExperimentConfig) -> None:
    """Load reward functions and rows as a run would, then print the page of ``mode=check``.

    Raises:
        ConfigErrors: what a run would refuse.
        HybridRLError: the run in the folder cannot continue so.
    """
    resumed = _resumed(config)
    refused = find_reward_flaws(config.reward)
    if config.model.path is not None:  # only then: torch takes seconds
        refused += import_module(_DOCTOR).find_bad_weights(Path(config.model.path))
    if any(config.files_by_key.values()):
        refused += import_module(_DOCTOR).find_bad_rows(config)
    memory, misfits = _memory_of(config)
    if refused or misfits:
        raise ConfigErrors([*refused, *misfits])
    sys.stdout.write(f"{summarize(config)}\n")
    for line in resumed:
        sys.stdout.write(f"{'resume':<17} {line}\n")
    for line in memory:
        sys.stdout.write(f"{'memory':<17} {line}\n")
    sys.stdout.flush()
    for line in _rehearse(config):
        sys.stdout.write(f"{'rehearsal':<17} {line}\n")
    for note in missing_here(config):
        sys.stdout.write(f"{'note':<17} {note}\n")
    sys.stdout.write(f"\nA run would {sentence(config)}.\n")


def _resumed(config: ExperimentConfig) -> list[str]:
    """Return where a run in a folder that has one begins; raises what it would refuse."""
    former = Path(config.trainer.run_dir) / "config.yaml"
    if not former.is_file():
        return []
    begun = read_yaml(former.read_text(encoding="utf-8")).get("mode")
    config = replace(config, mode=next((mode for mode in OFFLINE_MODES if mode == begun), "train"))
    if not should_resume(config):
        return []
    return [finished_message(config) or f"from the checkpoint of step {newest_step(config)}"]


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

    Returns lines for the user: the checked arguments, the unchecked ones, megatron-core's answer.
    """
    if not config.megatron_worlds:
        return []
    try:  # it takes 5 s, and may not be installed
        rehearsal = import_module("hybridrl.workers.train.megatron.rehearsal")
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


def rehearsed_configs(config: ExperimentConfig) -> Iterator[tuple[PlacedGroup, ExperimentConfig]]:
    """Yield each group with engines, and the configuration of one with ports that nobody opens."""
    led = config.topology.engines
    first_of = {each.group.key: each for each in reversed(led) if each.group is not None}
    for placed in config.serving.placed_groups:
        if not placed.config.num_engines:
            continue
        port = _REHEARSED_PORT if placed.config.worker_type == "prefill" else None
        if placed.key in first_of:
            yield placed, led_config(config, first_of[placed.key], bootstrap_port=port)
            continue
        has_encoders = "encoder" in {p.config.worker_type for p in config.serving.placed_groups}
        encoders = [f"http://127.0.0.1:{_REHEARSED_PORT}"] if has_encoders else []
        args = group_arguments(placed.config, bootstrap_port=port, encoders=encoders)
        per_node = config.serving.num_devices_per_node
        num_nodes = len(engines_of(placed, per_node=per_node)[0].nodes)
        if num_nodes > 1:
            args |= {
                "nnodes": num_nodes,
                "node_rank": 0,
                "dist_init_addr": f"127.0.0.1:{_REHEARSED_PORT}",
                "nccl_port": _REHEARSED_PORT,
            }
        yield placed, engine_config(config, args, num_devices=placed.config.devices_per_engine)


_DEVICES = Path("/dev")
_SAMPLES = ("regular", "decode")

_TOKENS_PER_S = 20.0
"""Of one response on a GPU, at the least: one of 32,768 tokens had 50 on an H100."""


def missing_here(config: ExperimentConfig, *, devices: Path = _DEVICES) -> Iterator[str]:
    """Yield a note for each limit that a run may meet, and thing that this machine lacks for it.

    Another machine may well be meant. It looks at files and the environment alone; the run itself
    refuses in its own words.
    """
    cluster = config.cluster
    num_gpus = len(list(devices.glob("nvidia[0-9]*")))
    num_needed = cluster.num_ranks_per_node + config.num_own_server_devices
    num_needed += config.num_critic_ranks if config.has_critic_pool else 0
    if cluster.device == "cuda" and cluster.address is None and num_gpus < num_needed:
        yield (
            f"this machine has {num_gpus or 'no'} GPU{'s' * (num_gpus > 1)}, and the run needs "
            f"{num_needed}: start it where they are, or set cluster.ray_address=HOST:PORT of a Ray "
            "cluster, or cluster=cpu"
        )
    yield from _long_sampling(config)
    if config.samples and (note := note_of_cut_sampling(config)):
        yield note
    yield from _full_disk(config)
    yield from _untested_versions(config)


def _long_sampling(config: ExperimentConfig) -> Iterator[str]:
    """Compare the longest rollout phase on slow GPUs with the limit of its call."""
    rollout, serving, limit_s = config.rollout, config.serving, config.cluster.call_timeout_s
    num_engines = config.cluster.num_ranks // rollout.tensor_parallel_size
    if served := serving.models.get(serving.policy):
        groups = (each for each in served.groups.values() if each.worker_type in _SAMPLES)
        num_engines = len(served.urls) or sum(group.num_engines for group in groups)
    num_waves = math.ceil(config.num_rows_per_step / max(1, num_engines) / rollout.num_slots)
    seconds = num_waves * rollout.max_response_tokens / _TOKENS_PER_S
    if config.samples and config.cluster.device == "cuda" and seconds > limit_s:
        yield (
            f"sampling may take {seconds:.0f} s, more than cluster.call_timeout_s={limit_s:g}: "
            f"{num_waves} times rollout.max_response_tokens={rollout.max_response_tokens} at "
            f"{_TOKENS_PER_S:g} a second, with rollout.num_slots={rollout.num_slots} and "
            f"{num_engines} engines; set cluster.call_timeout_s={math.ceil(seconds)}"
        )


def _full_disk(config: ExperimentConfig) -> Iterator[str]:
    """Compare the weights with the room where files of them are written for engines to load."""
    rollout, model = config.rollout, find_architecture(config.model)
    is_written = rollout.verify_weights != "never" or rollout.transport == "disk"
    is_written |= config.topology.has_others and config.serving.weights == "files"
    if model is None or not config.samples or not is_written:
        return
    needed = count_parameters(model) * BYTES[rollout.dtype]
    free = shutil.disk_usage(gettempdir()).free
    if free < needed:
        yield (
            f"{gettempdir()} has {free / 2**30:,.1f} GiB free, and files of weights there need "
            f"{needed / 2**30:,.1f} GiB: set TMPDIR to a larger disk"
        )


def _untested_versions(config: ExperimentConfig) -> Iterator[str]:
    """Compare installed packages with the ranges of setup.py, as pip has written them down."""
    try:
        lines = metadata.requires("hybridrl") or []
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return
    extras = ["", *(["sglang"] if config.rollout.engine == "sglang" else [])]
    extras += ["megatron"] if config.megatron_worlds else []
    for package in map(Requirement, lines):
        marker = package.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            installed = metadata.version(package.name)
        except metadata.PackageNotFoundError:  # rules say what a run cannot do without
            continue
        # A user chooses a pre-release on purpose.
        if not package.specifier.contains(installed, prereleases=True):
            tested = f"{package.name}{package.specifier}"
            yield f"{package.name} {installed} was not tested: pip install '{tested}'"
