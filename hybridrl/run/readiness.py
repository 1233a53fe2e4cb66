"""Notes of ``mode=check`` on a machine that could not start the run: another one may well be meant.

It looks at files and the environment alone; the run itself refuses in its own words.
"""

from __future__ import annotations

import netrc
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig

_DEVICES = Path("/dev")


def missing_here(config: ExperimentConfig, *, devices: Path = _DEVICES) -> Iterator[str]:
    """Yield a note for each thing that this machine lacks, with what to type.

    Args:
        config: of the run.
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
    if "wandb" in config.tracking.trackers and not _has_login():
        yield (
            "W&B has no key on this machine: type `wandb login`, or set WANDB_API_KEY or "
            "WANDB_MODE=offline in the environment"
        )


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
