"""The rule about an adapter folder to start from: it is complete and fits the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hybridrl.config.architecture import ATTENTION_MODULES, find_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import LINEAR_MODULES
from hybridrl.config.paths import flaw_of_file, flaw_of_folder
from hybridrl.errors import ConfigError
from hybridrl.json_text import to_json_text

_KEY = "lora.init_from"
_NO_ADAPTER = ("lora.init_from=null",)
_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_DEFAULTS: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of peft that are supported only with these values."""

Shapes = Mapping[str, tuple[int, ...]]


def check_lora_init_from(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An adapter for other modules, of another rank or for another model is refused."""
    if not config.lora.enabled or config.lora.init_from is None:
        return
    folder = Path(config.lora.init_from)
    settings, flaw = _read_settings(folder)
    shapes: Shapes = {}
    if not flaw:
        shapes, flaw = _read_shapes(folder)
    if flaw:
        yield ConfigError(
            _KEY,
            str(folder),
            flaw,
            fix=f"give a folder with {_SETTINGS} and {_WEIGHTS}, or set {_NO_ADAPTER[0]}",
            remedies=[_NO_ADAPTER],
        )
        return
    errors = [*_unsupported(folder, settings), *_other_settings(config, settings)]
    yield from errors or _other_model(config, folder, shapes)


def _read_settings(folder: Path) -> tuple[Mapping[str, object], str]:
    """Return the adapter's settings, or an error text."""
    file = folder / _SETTINGS
    if flaw := flaw_of_folder(folder):
        return {}, flaw
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"the folder has no {_SETTINGS}"
    except (OSError, ValueError, RecursionError) as err:
        return {}, f"{_SETTINGS} is incomplete or corrupt: {err}"
    if not isinstance(settings, dict) or not {"r", "lora_alpha", "target_modules"} <= set(settings):
        return {}, f"{_SETTINGS} does not say r, lora_alpha and target_modules, as LoRA's does"
    return settings, ""


def _read_shapes(folder: Path) -> tuple[Shapes, str]:
    """Return the shape of each tensor, or an error text. Reads the file's header alone."""
    file = folder / _WEIGHTS
    if flaw_of_file(file):
        return {}, f"the folder has no {_WEIGHTS}"
    try:
        with safe_open(file, framework="np") as tensors:
            return {
                name: tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118 - it is no dictionary
            }, ""
    except (SafetensorError, OSError) as err:
        return {}, f"{_WEIGHTS} is incomplete or corrupt: {err}"


def _unsupported(folder: Path, settings: Mapping[str, object]) -> Iterator[ConfigError]:
    for name, value in _DEFAULTS.items():
        got = settings.get(name, value)
        if got != value and (got or value):  # peft writes null, {} and [] for nothing
            yield ConfigError(
                _KEY,
                str(folder),
                f"its {name}={got!r} is not supported, only {value!r} is",
                remedies=[_NO_ADAPTER],
            )


def _other_settings(
    config: ExperimentConfig, settings: Mapping[str, object]
) -> Iterator[ConfigError]:
    """Rank, scaling and modules equal those of section ``lora``."""
    lora = config.lora
    saved_modules = settings["target_modules"]
    modules = (
        sorted(str(name) for name in saved_modules)
        if isinstance(saved_modules, list)
        else [str(saved_modules)]
    )
    for key, wanted, got in (
        ("rank", lora.rank, settings["r"]),
        ("alpha", lora.alpha, settings["lora_alpha"]),
        ("use_rslora", lora.use_rslora, bool(settings.get("use_rslora"))),
        ("target_modules", sorted(lora.modules), modules),
    ):
        if got == wanted:
            continue
        typed = to_json_text(got, separators=(",", ":")).replace('"', "")
        is_legal = key != "target_modules" or set(modules) <= set(LINEAR_MODULES)
        yield ConfigError(
            f"lora.{key}",
            wanted,
            f"the adapter in lora.init_from={lora.init_from} was made with {got}",
            remedies=[(f"lora.{key}={typed}",), _NO_ADAPTER] if is_legal else [_NO_ADAPTER],
        )


def _other_model(config: ExperimentConfig, folder: Path, shapes: Shapes) -> Iterator[ConfigError]:
    model = find_architecture(config.model)
    if model is None or model.experts is not None:
        return  # experts have names of their own; the loader compares them
    expected: dict[str, tuple[int, ...]] = {}
    for layer in range(model.num_layers):
        for module in (name for name in config.lora.modules if name in model.linear_sizes):
            block = "self_attn" if module in ATTENTION_MODULES else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            outputs, inputs = model.linear_sizes[module]
            expected[f"{name}.lora_A.weight"] = (config.lora.rank, inputs)
            expected[f"{name}.lora_B.weight"] = (outputs, config.lora.rank)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            yield ConfigError(
                _KEY,
                str(folder),
                f"made for another model: {name} is {_say(shapes.get(name))} in the folder, and "
                f"{_say(expected.get(name))} in this model",
                remedies=[_NO_ADAPTER],
            )
            return  # one error is enough; the others follow from it


def _say(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
