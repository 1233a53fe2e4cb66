"""Rules about machines and the Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.python_files import ANYTHING, flaw_of_function, names_at_top_level
from hybridrl.config.setup_hook import hook_error
from hybridrl.errors import ConfigError, suggest_name


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
    """The module of the hook can be found from here, and its file defines the function.

    The file is parsed, not run, unless it stands for a package: its code is meant for the workers.
    """
    path = config.cluster.worker_setup_hook
    if path is None:
        return
    module, _, name = path.rpartition(".")
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
    elif spec.origin is not None and spec.origin.endswith(".py"):
        yield from _check_function(path, name, Path(spec.origin))


def _check_function(path: str, name: str, file: Path) -> Iterator[ConfigError]:
    try:
        known = names_at_top_level(file)
    except SyntaxError as err:
        yield hook_error(path, f"{file} is not a Python file: {err}")
        return
    if name not in known and ANYTHING not in known:
        rule = f"{file} defines no {name!r} at its top level"
        yield hook_error(path, rule, f"{suggest_name(name, list(known))} Correct it")
    elif name in known and (flaw := flaw_of_function(known[name], keywords=())):
        yield hook_error(path, f"it {flaw}")


RULES = (check_ray, check_worker_setup_hook)
