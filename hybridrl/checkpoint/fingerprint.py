"""Decide whether a run may resume from a checkpoint, and whether bitwise identically."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from hybridrl import __version__
from hybridrl.checkpoint.store import Recipe, RunFingerprint
from hybridrl.config.experiment import OFFLINE_MODES, ExperimentConfig
from hybridrl.config.foreign.names import foreign_keys, name_of_today
from hybridrl.config.foreign.spelling import flatten
from hybridrl.errors import CheckpointError
from hybridrl.json_text import to_json_text

_FREE_SECTIONS = ("tracking.", "checkpoint.", "cluster.")
_SHAPE = (
    *("actor.engine", "megatron.layers"),
    *("megatron.tensor_parallel_size", "megatron.sequence_parallel"),
    *("megatron.pipeline_parallel_size", "megatron.num_virtual_stages"),
    *("megatron.context_parallel_size", "megatron.expert_parallel_size"),
    "megatron.expert_tensor_parallel_size",
)
"""The engine and its parallel sizes: every engine with any sizes reads a checkpoint."""

_CONTEXT = "actor.fsdp2.context_parallel_size"

_FREE_KEYS = (
    *(*_SHAPE, _CONTEXT),
    *("trainer.run_dir", "trainer.overwrite", "trainer.export_hf", "critic.num_ranks_per_node"),
    *("reward.timeout_s", "reward.on_error", "reward.num_processes", "data.num_processes"),
    *("rollout.drain_timeout_s", "rollout.stage_timeout_s"),
    *("rollout.start_timeout_s", "rollout.request_timeout_s", "rollout.transport"),
    *("megatron.ddp_args.overlap_grad_reduce", "megatron.ddp_args.overlap_param_gather"),
    "rollout.verify_weights",
    *("rollout.memory_fraction", "rollout.engine_args.disable_cuda_graph"),
    *("rollout.dump", "rollout.replay", "rollout.canary_max_drift_nats"),
)
"""Keys that may change freely, because the learned weights do not depend on them."""

_FREE_OF_MODELS = re.compile(r"serving\.models\.[^.]+\.(urls|key_variable)")
"""The same: where servers run that are compared with the model at each start."""

_NUMERIC = (
    *("cluster.device", "cluster.num_nodes", "cluster.num_ranks_per_node"),
    "cluster.num_threads_per_rank",
)
_PACKAGES = ("torch", "transformers", "tensordict", "peft", "ray")
_NUM_NAMED = 8
_SAMPLE_BYTES = 2**20

TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.model"),
)
"""Patterns of the files that a tokenizer is loaded from."""


def recipe_of(config: ExperimentConfig) -> Recipe:
    """Return every key on which the learned weights depend, with its value in types of JSON."""
    flat = dict(flatten(asdict(config)))
    if config.actor.optimizer.schedule == "constant":
        # A longer run begins as a shorter one does.
        del flat["trainer.num_steps"], flat["trainer.num_epochs"]
    other_modes = tuple(f"{mode}." for mode in OFFLINE_MODES if mode != config.mode)
    kept = {
        key: value
        for key, value in flat.items()
        if key not in _FREE_KEYS
        and not key.startswith((*_FREE_SECTIONS, *other_modes))
        and not _FREE_OF_MODELS.fullmatch(key)
    }
    return {key: json.loads(to_json_text(value)) for key, value in kept.items()}


def environment_of(config: ExperimentConfig) -> Mapping[str, str]:
    """Return the facts that rounding depends on: ranks, threads, processor, hook, and versions."""
    flat, facts = dict(flatten(asdict(config))), dict[str, str]()
    hook = config.cluster.worker_setup_hook
    if hook is not None:  # each worker calls it first
        spec = find_spec(hook.rpartition(".")[0])
        file = Path(spec.origin or "") if spec is not None else Path()
        digest = f" {_digest(file.parent, (file.name,))}" if file.suffix == ".py" else ""
        facts["cluster.worker_setup_hook"] = hook + digest
    shape = _SHAPE if config.megatron_worlds else (_CONTEXT,) * (config.num_ranks_per_group > 1)
    packages: tuple[str, ...] = _PACKAGES
    packages += ("sglang",) if config.samples and config.rollout.engine == "sglang" else ()
    packages += ("megatron-core",) if config.megatron_worlds else ()
    return {
        **{key: str(flat[key]) for key in (*_NUMERIC, *shape)},
        **facts,
        "processor": _processor(),
        "python": platform.python_version(),
        "hybridrl": __version__,
        **{package: version(package) for package in packages},
    }


def environment_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    """Yield the facts that differ, in words; a former key that has its constant is no fact now."""
    constants = foreign_keys().constants
    return differences({k: v for k, v in saved.items() if str(constants.get(k)) != v}, now)


def folder_fingerprints(model_folder: Path, *, with_weights: bool) -> Mapping[str, str]:
    """Digest a model folder's configuration, its tokenizer, and optionally its weights.

    Args:
        with_weights: where the run still reads them when it resumes (frozen under an adapter, or
            of the reference). Of each file the size, the beginning and the end are looked at.
    """
    fingerprints = {
        "model configuration": _digest(model_folder, ("config.json",)),
        "tokenizer": _digest(model_folder, TOKENIZER_FILES),
    }
    return fingerprints | ({"frozen weights": _sample(model_folder)} if with_weights else {})


def own_fingerprints(config: ExperimentConfig) -> Mapping[str, str]:
    """Digest the user's functions, by the key that names their file, teacher, reward models and
    served models.

    Files that these files import are not looked at.
    """
    own = {}
    for key, value in flatten(asdict(config)):
        file = Path(value.rpartition(":")[0]) if isinstance(value, str) else Path()
        if file.suffix == ".py" and file.is_file():
            own[f"code of {key}"] = _digest(file.parent, (file.name,))
    for source, teacher in config.algorithm.teachers.items():
        if teacher in config.algorithm.teacher_folders:
            key, folder = "algorithm.teacher_path", Path(teacher)
            key += f"s.{source}" if source else ""
            own[key] = _digest(folder, ("config.json",)) + _sample(folder)
    others: dict[str, Path] = {}
    if config.offline is None:
        scorers, served = config.reward.model_paths.items(), config.serving.frozen.items()
        others |= {f"reward model {name}": Path(path) for name, path in scorers}
        others |= {f"served model {name}": Path(str(model.path)) for name, model in served}
    for name, folder in others.items():
        digests = folder_fingerprints(folder, with_weights=True)
        own |= {f"{kind} of {name}": digest for kind, digest in digests.items()}
    return own


def _sample(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _digest(folder: Path, patterns: Iterable[str]) -> str:
    digest = hashlib.sha256()
    paths = {path.name: path for pattern in patterns for path in folder.glob(pattern)}
    for name in sorted(paths):
        data = paths[name].read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def check_recipe(saved: Recipe, now: Recipe, *, where: Path, accept: bool) -> list[str]:
    """Compare recipes of a run that was begun and of the run that would resume.

    Keys that were renamed have their names of today. Those are left out that may change freely, or
    are constants now and were these. Returns the differences in words; ``CheckpointError`` names
    them if they are not accepted.
    """
    constants, kept, unset = foreign_keys().constants, dict[str, object](), object()
    for key, value in saved.items():
        name = name_of_today(key)
        if name is not None and name in now:
            kept[name] = value
        elif key not in _FREE_KEYS and constants.get(key, unset) not in (None, value):
            kept[key] = value
    changes = list(differences(kept, now))
    if changes and not accept:
        num_unnamed = len(changes) - _NUM_NAMED
        more = f"\n  and {num_unnamed} more" if num_unnamed > 0 else ""
        raise CheckpointError(
            f"{where} holds a run with other settings:\n  "
            + "\n  ".join(changes[:_NUM_NAMED])
            + f"{more}\nSet trainer.run_dir to a new folder, trainer.overwrite=true to replace it, "
            "or checkpoint.accept_changes=true to continue with the new settings"
        )
    return changes


def check_fingerprints(
    saved: RunFingerprint, now: RunFingerprint, *, where: Path, accept: bool
) -> list[str]:
    """Compare model files, the user's functions and the teacher; as `check_recipe`."""
    changes = list(differences(saved.fingerprints, now.fingerprints))
    if changes and not accept:
        raise CheckpointError(
            f"{where} was made with other files of model.path or of your own: "
            f"{'; '.join(changes)}. Bring the old files back, set trainer.run_dir to a new folder, "
            "or set checkpoint.accept_changes=true"
        )
    return changes


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> Iterable[str]:
    """Yield each key whose values differ, in words."""
    for key in sorted(saved.keys() | now.keys()):
        if saved.get(key) != now.get(key):
            yield f"{key}: {saved.get(key)!r} there, {now.get(key)!r} here"


def processor_name() -> str:
    """Name the processor as Linux does."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def _processor() -> str:
    """Name the processor and its vector instructions, by which kernels are chosen."""
    flags = _cpu_info().get("flags", "").split()
    vectors = sorted(flag for flag in flags if "avx" in flag or "amx" in flag)
    return " ".join([processor_name(), *vectors])


def _cpu_info() -> Mapping[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in fields}
