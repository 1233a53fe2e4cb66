"""Rules about machines, the Ray cluster, and what a run writes: its folder and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

from hybridrl.config.checks.algorithm import check_part
from hybridrl.config.checks.messages import error
from hybridrl.config.cluster import hook_error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import flaw_of_folder, flaw_of_new_folder, is_there
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
    if cluster.object_store_mib and cluster.address is not None:
        key = "cluster.object_store_mib"
        rule = "would be ignored: Ray runs already; `ray start --object-store-memory=BYTES` sets it"
        yield error(config, key, rule, f"{key}=0")


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
_LOCK = ".lock"

TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", ">=2.19"),
    "wandb": ("wandb", ">=0.26.1,<0.32"),
    "mlflow": ("mlflow-skinny", ">=3.12,<4"),
}
"""By tracker: the package and the tested versions, as in setup.py. mlflow depends on mlflow-skinny
of its own version."""


def check_run_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The run folder is new, or may be replaced, and can be created."""
    key, folder = "trainer.run_dir", Path(config.trainer.run_dir)
    if flaw_of_folder(folder) or all(path.name == _LOCK for path in folder.iterdir()):
        if flaw := flaw_of_new_folder(folder):
            yield error(config, key, flaw, fix=f"set {key} to a folder that you may create")
        return
    if not all(is_there(folder / name) for name in _RUN_FILES):
        rule = f"holds files, but not {' and '.join(_RUN_FILES)}: it is not a run folder"
        yield error(config, key, rule, fix=f"set {key} to a new folder")
    elif not config.trainer.overwrite and config.checkpoint.resume == "never":
        rule = "holds another run, which is overwritten only on request"
        yield error(config, key, rule, "trainer.overwrite=true", "checkpoint.resume=auto")


def check_tracker_packages(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The package of each tracker is installed, in a tested version."""
    key, trackers = "tracking.trackers", config.tracking.trackers
    flaws = {name: flaw for name in trackers if (flaw := _flaw_of_package(name))}
    if flaws:
        usable = f"{key}=[{','.join(name for name in trackers if name not in flaws)}]"
        fix = f"pip install 'hybridrl[{','.join(flaws)}]', or set {usable}"
        yield error(config, key, "; ".join(flaws.values()), usable, fix=fix)


def _flaw_of_package(tracker: str) -> str:
    package, versions = TRACKER_PACKAGES[tracker]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = ""
    if not installed or find_spec(tracker) is None:
        return f"not installed: {tracker}"
    # A user chooses a pre-release on purpose.
    if SpecifierSet(versions).contains(installed, prereleases=True):
        return ""
    return f"{package} {installed} is installed, and {versions} was tested"


def check_metrics_function(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A function of metrics can be called."""
    for kind, spelled, given in config.tracking.parts:
        yield from check_part(config, kind, spelled, given)


RULES = (check_ray, check_worker_setup_hook)
RUN_FOLDER_RULES = (check_run_folder, check_tracker_packages, check_metrics_function)
