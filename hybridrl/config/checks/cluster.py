"""Rules about machines, the Ray cluster, and what a run writes: its folder and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.algorithm import check_part
from hybridrl.config.checks.messages import error
from hybridrl.config.cluster import hook_error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.config.functions.paths import flaw_of_folder, flaw_of_new_folder, is_there
from hybridrl.config.trainer import TRACKER_MODULES
from hybridrl.errors import ConfigError


def check_ray(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The address has a form that Ray understands; a Ray started here has one node and its size."""
    cluster, address = config.cluster, config.cluster.ray_address
    if cluster.num_nodes > 1 and cluster.address is None:
        key, rule = "cluster.num_nodes", "cluster.ray_address=null starts Ray on this machine alone"
        yield error(config, key, rule, "cluster.ray_address=auto", f"{key}=1")
    if address is not None and not re.fullmatch(r"auto|(ray://)?[^/:\s]+:\d+", address):
        key, rule = "cluster.ray_address", "must be auto, HOST:PORT or ray://HOST:PORT"
        yield error(config, key, rule, f"{key}=auto")


def check_worker_setup_hook(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The module of the hook can be found from here; the workers import it."""
    path = config.cluster.worker_setup_hook
    if path is None:
        return
    module = path.rpartition(".")[0]
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        rule = "must be package.module.function, with dots between names"
        yield hook_error(path, rule, "correct the name")
        return
    try:
        spec, reason = find_spec(module), ""
    except (Exception, SystemExit) as err:  # what is above is no package, or does not load
        spec, reason = None, f" ({err})"
    if spec is None:
        fix = "correct it, put its folder on PYTHONPATH"
        yield hook_error(path, f"there is no module {module}{reason}", fix)


_RUN_FILES = ("config.yaml", "metrics.jsonl")  # written by run/run_folder.py


def check_run_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The run folder is new and can be created, or holds a run."""
    key, folder = "trainer.run_dir", Path(config.trainer.run_dir)
    if flaw_of_folder(folder) or all(path.name == ".lock" for path in folder.iterdir()):
        if flaw := flaw_of_new_folder(folder):
            yield error(config, key, flaw, fix=f"set {key} to a folder that you may create")
        return
    if not all(is_there(folder / name) for name in _RUN_FILES):
        rule = f"holds files, but not {' and '.join(_RUN_FILES)}: it is not a run folder"
        yield error(config, key, rule, fix=f"set {key} to a new folder")


def check_tracker_packages(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The package of each tracker is installed."""
    key, trackers = "tracking.trackers", config.tracking.trackers
    if missing := [name for name in trackers if find_spec(TRACKER_MODULES[name]) is None]:
        usable = f"{key}=[{','.join(name for name in trackers if name not in missing)}]"
        fix = f"pip install 'hybridrl[{','.join(missing)}]', or set {usable}"
        yield error(config, key, f"not installed: {', '.join(missing)}", usable, fix=fix)


def check_prometheus_address(config: ExperimentConfig) -> Iterator[ConfigError]:
    """It has a host and a port; whether a driver can listen there, its own machine says."""
    key, address = "tracking.prometheus_address", config.tracking.prometheus_address
    if "prometheus" in config.tracking.trackers and not re.fullmatch(r"\S+:\d{1,5}", address):
        yield error(config, key, "must be HOST:PORT", f"{key}=127.0.0.1:0")


def check_functions(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The functions of metrics and of checkpoints can be called."""
    for kind, spelled in (
        (parts.METRICS_FUNCTION, config.tracking.function),
        (parts.CHECKPOINT_FUNCTION, config.checkpoint.function),
    ):
        if spelled is not None:
            yield from check_part(config, kind, spelled, {})
