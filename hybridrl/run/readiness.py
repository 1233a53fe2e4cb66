"""Notes of ``mode=check``: limits that a run may meet, and resources that this machine lacks.

Another machine may well be meant. It looks at files and the environment alone; the run itself
refuses in its own words.
"""

from __future__ import annotations

import math
import netrc
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.summary import note_of_cut_sampling
from hybridrl.config.topology import Attached, Colocated, Own
from hybridrl.models.architecture import find_architecture
from hybridrl.planning.rollout import BYTES
from hybridrl.planning.split import count_parameters

_DEVICES = Path("/dev")
_SAMPLES = ("regular", "decode")

_TOKENS_PER_S = 20.0
"""Of one response on a GPU, at the least: one of 32,768 tokens had 50 on an H100."""


def missing_here(config: ExperimentConfig, *, devices: Path = _DEVICES) -> Iterator[str]:
    """Yield a note for each thing that a run may lack on this machine, with what to type.

    Args:
        devices: the folder of device files; a GPU of NVIDIA is ``nvidia0``, ``nvidia1`` and so on.
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
    if "wandb" in config.tracking.trackers and not _has_login():
        yield (
            "W&B has no key on this machine: type `wandb login`, or set WANDB_API_KEY or "
            "WANDB_MODE=offline in the environment"
        )


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
    match config.topology:
        case Own() | Attached() | Colocated(has_others=True):
            has_others = True
        case _:
            has_others = False
    is_written |= has_others and config.serving.weights == "files"
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


def _has_login() -> bool:
    """Return whether W&B needs no key, or has one: in the environment, or from its login."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for file in (env.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if file and netrc.netrc(Path(file).expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
