"""SGLang in a process of its own: a server, or its arguments alone.

``python -m hybridrl.workers.rollout.sglang.child ARGUMENTS.json`` serves.
``python -m hybridrl.workers.rollout.sglang.child CASE.json RESULT.json`` has SGLang complete and
check arguments, as a start does before a model is loaded: no model, no port, no device.
SGLang is imported by name, because that takes seconds and prepares a process to serve.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import suggest_name
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.sglang.encoder_routes import add_control_calls
from hybridrl.workers.rollout.sglang.process import end_with_parent

_SAVER = "sglang.srt.utils.torch_memory_saver_adapter"

if __name__ in ("__main__", "__mp_main__"):  # the server, and each process that it spawns
    # SGLang imports megatron-core if it is installed (debug_utils/dumper.py), and megatron-core
    # (inference/contexts/dynamic_context.py) switches torch_memory_saver to a mode that cannot
    # release CUDA graphs: their capture would end the server.
    sys.modules["megatron"] = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by SGLang, and its reason."""

    names: tuple[str, ...]
    """Arguments at fault; empty if SGLang's message names none of the sent ones."""

    reason: str
    fix: str = ""


def serve(file: Path) -> None:
    """Run a server with the arguments in ``file``, until the parent is gone."""
    end_with_parent()
    run_server = import_module("sglang.launch_server").run_server
    server_args = load_server_args()
    arguments = json.loads(file.read_text(encoding="utf-8"))
    if unknown := unknown_names(server_args, arguments):
        lines = [f"rollout.engine_args.{r.names[0]}: {r.reason}; {r.fix}" for r in unknown]
        raise SystemExit("\n".join(lines))
    if arguments.get("encoder_only"):
        add_control_calls(arguments)
    run_server(server_args(**arguments))


def load_server_args() -> Any:  # noqa: ANN401 - SGLang's class, of another kind in each version
    """Import SGLang, as its own launcher does, and return its class of arguments."""
    import_module("sglang.srt.plugins").load_plugins()
    return import_module("sglang.srt.server_args").ServerArgs


def unknown_names(server_args: Any, arguments: Mapping[str, object]) -> list[Refusal]:  # noqa: ANN401
    """Return the arguments that this version does not have, each with similar names."""
    known = list(inspect.signature(server_args).parameters)
    return [
        Refusal((name,), "the installed SGLang has no such argument", suggest_name(name, known))
        for name in arguments
        if name not in known
    ]


def foreign_values(server_args: Any, arguments: Mapping[str, object]) -> list[Refusal]:  # noqa: ANN401
    """Return arguments outside the choices of SGLang's command line, which it does not check."""
    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    choices = {action.dest: list(action.choices) for action in parser._actions if action.choices}
    return [
        Refusal((name,), f"must be one of {', '.join(map(str, choices[name]))}")
        for name, value in arguments.items()
        if isinstance(value, str) and name in choices and value not in choices[name]
    ]


def resolve(server_args: Any, arguments: Mapping[str, object]) -> None:  # noqa: ANN401
    """Let SGLang complete and check the arguments; a refusal is an exception of any type."""
    record = server_args(**arguments)
    record.resolve_once()
    import_module("sglang.srt.entrypoints.engine")._set_envs_and_config(record)  # SGLang's kernels
    record.check_server_args()
    import_module(_SAVER).TorchMemorySaverAdapter.create(
        enable=bool(arguments["enable_memory_saver"])
    )


def rehearse(case: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the result of a case of ``rehearsal.py``, in the form that it reads.

    A case has ``arguments`` of the server; ``own``, the names that the user chose among them; and
    ``device``, cpu or cuda.
    """
    try:
        server_args = load_server_args()
        version = import_module("sglang").__version__
    except Exception as error:  # any error of a GPU package on this machine
        return {"unimportable": f"{type(error).__name__}: {error}"}
    arguments = case["arguments"]
    has_device = case["device"] == "cpu" or torch.cuda.is_available()
    refused = unknown_names(server_args, arguments) + foreign_values(server_args, arguments)
    if has_device and not refused:
        try:
            resolve(server_args, arguments)
        except (Exception, SystemExit) as error:  # of any type: assertions above all
            # At fault are the arguments that SGLang names, the user's first; or else all of these.
            own, reason = case["own"], f"{type(error).__name__}: {error}"
            words = reason.replace("-", "_")
            named = [name for name in arguments if "_" in name and name in words]
            named.sort(key=lambda name: name not in own)
            refused = [Refusal(tuple(named or own), reason)]
    return {
        "version": version,
        "has_device": has_device,
        "refusals": [asdict(refusal) for refusal in refused],
    }


def check(case_file: Path, result_file: Path) -> None:
    """Rehearse, write the result, and wait until the parent ends this process."""
    end_with_parent()
    result = rehearse(json.loads(case_file.read_text(encoding="utf-8")))
    staged = result_file.with_suffix(".staged")
    staged.write_text(to_json_text(result), encoding="utf-8")
    staged.replace(result_file)
    threading.Event().wait()


if __name__ == "__main__":
    (check if sys.argv[2:] else serve)(*map(Path, sys.argv[1:]))
