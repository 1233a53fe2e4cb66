"""Checks the arguments of SGLang servers before a run starts, by SGLang's own code in a child."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridrl.config.checks.messages import own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.json_text import to_json_text
from hybridrl.models.architecture import starter_settings
from hybridrl.workers.rollout.sglang.arguments import (
    Arguments,
    ServingSpec,
    build_arguments,
    environment,
    server_spec,
)
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port

_CHILD = "hybridrl.workers.rollout.sglang.child"
_NAME = "rehearsal"


def rehearse_server(config: ExperimentConfig, *, keys: Mapping[str, str] | None = None) -> str:
    """Have SGLang complete and check the arguments of the servers of a run, or of one engine.

    ``keys`` are those of arguments that were given elsewhere than in ``rollout.engine_args``, by
    name. Returns one line that says what was checked. ConfigErrors name hybridrl's keys; an
    EngineError or DeadlineError if SGLang ended, or took over ``rollout.start_timeout_s``.
    """
    with tempfile.TemporaryDirectory(prefix="hybridrl-rehearsal-") as name:
        folder = Path(name)
        spec = server_spec(config, _model_folder(config, folder))
        case = case_of(spec)
        case_file, result_file = folder / "case.json", folder / "result.json"
        case_file.write_text(to_json_text(case), encoding="utf-8")
        process = ChildProcess(
            [sys.executable, "-m", _CHILD, str(case_file), str(result_file)],
            name="the rehearsal of SGLang's start",
            variables=environment(spec),
        )
        try:
            process.wait_until_ready(result_file.exists, timeout_s=spec.rollout.start_timeout_s)
            result = json.loads(result_file.read_text(encoding="utf-8"))
        finally:
            process.end()
    arguments = case["arguments"]
    if "unimportable" in result:
        return f"not rehearsed, it cannot be imported here: {result['unimportable']}"
    if refusals := result["refusals"]:
        version = result["version"]
        raise ConfigErrors([violation_of(r, arguments, version, keys or {}) for r in refusals])
    if not result["has_device"]:
        return (
            f"{result['version']} has all arguments; the rest is rehearsed where there is a GPU: "
            "run mode=check there too"
        )
    return f"{result['version']} accepts the arguments of its servers; no model was loaded"


def case_of(spec: ServingSpec) -> dict[str, Any]:
    """Write the case for the child."""
    return {
        "arguments": build_arguments(spec, name=_NAME, port=free_port(), key=_NAME),
        "own": list(spec.rollout.engine_args),
        "device": spec.device,
    }


def violation_of(
    refusal: Mapping[str, Any],
    arguments: Arguments,
    version: str,
    given_by: Mapping[str, str] = MappingProxyType({}),
) -> ConfigError:
    """Report a refusal under the key of the first argument at fault."""
    names = refusal["names"]
    rule = f"SGLang {version} refuses it: {refusal['reason']}"
    if not names:
        return ConfigError("rollout.engine", "sglang", rule, "see what it says")
    first, *others = names
    kind, why = own_arguments("rollout.engine_args").get(first, ("", ""))
    if kind == "typed":
        key = why.split()[0].rstrip(",")
        return ConfigError(key, arguments[first], rule, f"change {key}")
    keys = [given_by.get(name, f"rollout.engine_args.{name}") for name in (first, *others)]
    removal = " ".join(f"~{key}" for key in keys)
    fix = refusal["fix"] or f"give another value, or add {removal}"
    return ConfigError(keys[0], arguments[first], rule, fix, remedies=[tuple(removal.split())])


def _model_folder(config: ExperimentConfig, scratch: Path) -> Path:
    """Return the model's folder; of a model that is not made yet, one with its config.json."""
    if config.model.path is not None:
        return Path(config.model.path).absolute()
    if config.model.starter is not None:
        values = starter_settings(config.model.starter) | {"dtype": config.rollout.dtype}
        (scratch / "config.json").write_text(to_json_text(values), encoding="utf-8")
    return scratch
