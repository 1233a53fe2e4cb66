"""What a forked process does for a case: build a rank on fake devices, and execute its cycle."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from hybridrl.config.load import read_config
from hybridrl.errors import ConfigErrors
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.plan import capacity_bytes
from hybridrl.rehearsal.gpu import FakeGpu
from hybridrl.rehearsal.model_folder import with_hollow_models
from hybridrl.rehearsal.plan import layers_to_execute
from hybridrl.rehearsal.server import RehearsedServer
from hybridrl.workers.train.offload import resident_bytes
from hybridrl.workers.train.protocol import TrainState
from tests.composing import composed
from tests.planning.models import PREPROCESSOR
from tests.rehearsal.cases import Case, Shown
from tests.rehearsal.other_runs import KINDS

_MEGATRON = "hybridrl.rehearsal.megatron"
_UNKNOWN_DEVICE = 80 * 2**30


def rehearse(case: Case) -> Shown:
    """Execute a case, in a process that ends with it."""
    shown = Shown()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        os.chdir(folder)  # relative paths of recipes
        try:
            _rehearse(case, Path(folder), shown)
        except Exception:
            shown.error = traceback.format_exc()
    return shown


def compose(case: Case, folder: Path = Path()) -> Mapping[str, object]:
    """Compose the configuration of a case, whose folders are in ``folder``."""
    return composed(*(each.replace("FOLDER/", f"{folder}/") for each in case.overrides))


def _import_anew(packages: str) -> None:
    """Let megatron-core find other packages: it looks for them while it is imported."""
    sys.path.insert(0, packages)
    for name in list(sys.modules):
        if name.startswith(("megatron", "hybridrl.workers.train.megatron", _MEGATRON)):
            del sys.modules[name]
    transformer_engine = import_module("tests.rehearsal.transformer_engine")
    transformer_engine.divide()


def _rehearse(case: Case, folder: Path, shown: Shown) -> None:
    for name, settings in case.folders.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
        if "vision_config" in settings:
            patch_size = settings["vision_config"]["patch_size"]  # type: ignore[index]
            processor = PREPROCESSOR | {"patch_size": patch_size}
            (folder / name / "preprocessor_config.json").write_text(json.dumps(processor))
    if case.packages is not None:
        _import_anew(case.packages)
    config, problems = read_config(compose(case, folder))
    if config is None or problems:
        raise ConfigErrors(problems)
    num_layers = case.num_layers or layers_to_execute(config, architecture_of(config.model))[0]
    gpu = FakeGpu(
        num_bytes=capacity_bytes(config.cluster) or _UNKNOWN_DEVICE,
        num_devices=config.cluster.num_ranks_per_node,
    )
    hollow = folder / "hollow"
    hollow.mkdir()
    with gpu:
        config = with_hollow_models(config, hollow, num_layers=num_layers)
        if case.fault is not None:
            case.fault.put_in()
        cycle = KINDS[case.kind](config, gpu, rank=case.rank)
        shown.executed = cycle.executed
        try:
            cycle.run(num_steps=case.num_steps)
        finally:
            shown.unopened = list(cycle.handles.unopened)
            for server in cycle.servers:
                if isinstance(server, RehearsedServer):
                    shown.asked = server.asked
        shown.sums = {
            state.value: sum(resident_bytes(e.backend.tensors(state)) for _, e in cycle._engines())
            for state in TrainState
        }
