"""The first lines of a report: algorithm, model, learning rate, seed, machine."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from hybridrl.atomic_io import atomic_write_text
from hybridrl.checkpoint.fingerprint import processor_name
from hybridrl.config.model import ModelConfig, StarterConfig
from hybridrl.errors import ModelError
from hybridrl.json_text import to_json_text
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.split import count_parameters
from hybridrl.report.history import parse_row
from hybridrl.report.run import Run
from hybridrl.report.settings import Settings

log = logging.getLogger(__name__)

MACHINE = "machine.json"
"""File of a run folder: the machine of the driver."""


def try_machine(folder: Path) -> None:
    """Write the driver's machine to the run folder. A full disk costs a warning, never the run."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    num_cores = len(os.sched_getaffinity(0))
    facts = {
        "host": platform.node(),
        "gpus": ", ".join(_gpus()) or "no GPU",
        "processor": f"{num_cores} core{'s' * (num_cores > 1)} of {processor_name()}",
        "memory": f"{memory_gib:.0f} GiB",
    }
    try:
        atomic_write_text(folder / MACHINE, to_json_text(facts) + "\n")
    except OSError as error:
        log.warning("%s was not written: %s", folder / MACHINE, error)


def _gpus() -> list[str]:
    """Name the GPUs that NVIDIA's driver lists, as ``8 x NVIDIA H100``; needs no torch."""
    folder = Path("/proc/driver/nvidia/gpus")
    texts = [path.read_text("utf-8", errors="replace") for path in folder.glob("*/information")]
    models = Counter(name for text in texts for name in re.findall(r"^Model:\s*(.+)$", text, re.M))
    return [f"{count} x {name}" for name, count in models.items()]


_OFFLINE = {
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimisation",
    "reward_model": "training of a reward model",
}


def facts_of(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the main facts about a run: a label, and a value."""
    text = run.settings.text
    offline = _OFFLINE.get(text("mode"))
    keys = (
        "algorithm.name",
        "algorithm.advantage",
        "algorithm.policy_loss",
    )
    algorithm = ", ".join(filter(None, map(text, keys)))
    yield "algorithm", offline or algorithm
    yield "model", _model(run.settings)
    yield "data", _first_of(text, "data.task", "data.train_files", "data.sources")
    if not offline:
        yield "reward", _first_of(text, "reward.function", "reward.functions")
    yield "learning rate", text("actor.optimizer.lr")
    yield "seed", text("seed")
    sampling = "" if offline else f", samples with {text('rollout.engine')}"
    yield "engines", f"trains with {text('actor.engine')}{sampling}"
    nodes, ranks = text("cluster.num_nodes"), text("cluster.num_ranks_per_node")
    yield "ranks", f"{nodes} x {ranks} on {text('cluster.device')}"
    if steps := run.settings.number("trainer.max_staleness"):
        yield "sampling", f"ahead of the trainer: rows are at most {steps:g} steps old"
    if best := run.best_evaluation:
        yield "best evaluation", f"{best[0]:.3g}, at step {best[1]}"
    if any((run.folder / "checkpoints").glob("step-*")):
        yield "to continue", f"the same command with trainer.run_dir={run.folder}"
    path = run.folder / MACHINE
    if machine := parse_row(path.read_bytes()) if path.is_file() else None:
        yield "machine of the driver", ", ".join(str(fact) for fact in machine.values())


def _first_of(text: Callable[[str], str], *keys: str) -> str:
    return next((value for key in keys if (value := text(key)) not in ("", "null")), "unknown")


def _model(settings: Settings) -> str:
    folder = settings.text("model.path")
    is_starter = folder == "null"
    sizes = {f.name: settings.number(f"model.starter.{f.name}") or 0 for f in fields(StarterConfig)}
    config = ModelConfig(
        path=None if is_starter else folder,
        starter=StarterConfig(**{key: int(size) for key, size in sizes.items()}),
        dtype="float32",
        attention="auto",
    )
    name = "the starter model" if is_starter else Path(folder).name
    try:
        name += f", {in_words(count_parameters(architecture_of(config)))} parameters"
    except (ArithmeticError, ModelError):
        name += ", of unknown size"  # the folder is gone, or the configuration has no sizes
    is_lora = settings.text("lora.enabled") == "true"
    return name + f", LoRA of rank {settings.text('lora.rank')}" * is_lora


def in_words(count: int) -> str:
    """Write a number of parameters for people, as ``7.6 B``."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,}"
