"""SGLang's own handling of its arguments, as a start runs it before a model is loaded.

A server's process runs it when it starts. ``python -m hybridrl.workers.rollout.sglang.start
CASE.json RESULT.json`` runs it alone, for ``rehearsal.py``: no model, no port, no device.
SGLang is imported by name, because that takes seconds and prepares a process to serve.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hybridrl.errors import suggest_name
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.sglang.process import end_with_parent

_PHASES = ("decode", "prefill")
_IN_PIECES = "breakable"
_BACKENDS = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
_SAVER = "sglang.srt.utils.torch_memory_saver_adapter"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by SGLang, and its reason."""

    names: tuple[str, ...]
    """Arguments at fault; empty if SGLang's message names none of the sent ones."""

    reason: str
    fix: str = ""


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
    """Return the arguments with values outside the choices of SGLang's command line.

    SGLang does not check this for arguments built in Python, as hybridrl's are. A server then ends
    in the middle of its start, or behaves differently.
    """
    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    choices = {action.dest: list(action.choices) for action in parser._actions if action.choices}
    return [
        Refusal((name,), f"must be one of {', '.join(map(str, choices[name]))}")
        for name, value in arguments.items()
        if isinstance(value, str) and name in choices and value not in choices[name]
    ]


def resolve(server_args: Any, arguments: Mapping[str, object]) -> None:  # noqa: ANN401
    """Build the arguments and let SGLang complete and check them, as `_launch_subprocesses` does.

    Raises:
        Exception: any exception of SGLang, of any type, for a refused argument.
    """
    record = server_args(**arguments)
    if hasattr(record, "resolve_once"):  # 0.5.17 does it when it is built
        record.resolve_once()
    import_module("sglang.srt.entrypoints.engine")._set_envs_and_config(record)  # SGLang's kernels
    record.check_server_args()
    if _resolved(record, "enable_memory_saver"):
        _make_memory_saver(record)


def refusals(server_args: Any, case: Mapping[str, Any]) -> list[Refusal]:  # noqa: ANN401
    """Run the steps of a start that need neither a model nor a device, and return the refusals.

    Args:
        server_args: SGLang's class.
        case: as for ``rehearse``. SGLang's message may name another argument than the one at fault:
            each of the user's own is left out once to see whether SGLang accepts the others.
    """
    arguments, own = case["arguments"], case["own"]
    impossible = unknown_names(server_args, arguments) + foreign_values(server_args, arguments)
    if impossible:
        return impossible
    reason = _failure(server_args, arguments)
    if reason is None:
        return []
    failed_ranks = [name for name in own if _failure(server_args, _without(case, name)) is None]
    if not failed_ranks and own and _failure(server_args, _without(case, *own)) is None:
        failed_ranks = list(own)  # together
    return [Refusal(tuple(failed_ranks) or tuple(_named_in(reason, arguments)), reason)]


def rehearse(case: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the result of a case, in the form that ``rehearsal.py`` reads.

    Args:
        case: ``arguments`` of the server; ``own``, the names that the user chose among them;
            ``ours``, the arguments as they are without the user's; ``device``, cpu or cuda.
    """
    try:
        server_args = load_server_args()
        version = import_module("sglang").__version__
    except Exception as error:  # any error of a GPU package on this machine
        return {"unimportable": f"{type(error).__name__}: {error}"}
    arguments = case["arguments"]
    has_device = case["device"] == "cpu" or torch.cuda.is_available()
    refused = (
        refusals(server_args, case)
        if has_device
        else unknown_names(server_args, arguments) + foreign_values(server_args, arguments)
    )
    return {
        "version": version,
        "has_device": has_device,
        "refusals": [asdict(refusal) for refusal in refused],
    }


def _failure(server_args: Any, arguments: Mapping[str, object]) -> str | None:  # noqa: ANN401
    """Return why SGLang refuses ``arguments``; None if it does not."""
    try:
        resolve(server_args, arguments)
    except (Exception, SystemExit) as error:  # of any type: assertions above all
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return None


def _make_memory_saver(record: Any) -> None:  # noqa: ANN401
    """Make the scheduler's objects for releasable memory, as far as no device is needed."""
    import_module(_SAVER).TorchMemorySaverAdapter.create(enable=True)
    graphs = _resolved(record, "cuda_graph_config")
    if not any(getattr(graphs, phase).backend == _IN_PIECES for phase in _PHASES):
        return
    backends = import_module(_BACKENDS)
    group = SimpleNamespace(tp_group=None)
    with ExitStack() as stack:
        if hasattr(backends, "get_parallel"):  # 0.5.23 takes the group from there
            stack.enter_context(backends.get_parallel().override(tp_group=group))
        backends.BreakableCudaGraphBackend(
            SimpleNamespace(model_runner=group, device_module=torch.cuda), enable_memory_saver=True
        )


def _resolved(record: Any, name: str) -> Any:  # noqa: ANN401
    if not hasattr(record, "resolve_once"):
        return getattr(record, name)
    return import_module("sglang.srt.arg_groups.overrides").resolution_result(record, name)


def _without(case: Mapping[str, Any], *names: str) -> dict[str, object]:
    kept = {name: value for name, value in case["arguments"].items() if name not in names}
    return kept | {name: case["ours"][name] for name in names if name in case["ours"]}


def _named_in(reason: str, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield the arguments in SGLang's message, in Python's or the command line's spelling."""
    words = reason.replace("-", "_")
    for name in arguments:
        if "_" in name and name in words:
            yield name


def main(case_file: Path, result_file: Path) -> None:
    """Rehearse, write the result, and wait until the parent ends this process."""
    end_with_parent()
    result = rehearse(json.loads(case_file.read_text(encoding="utf-8")))
    staged = result_file.with_suffix(".staged")
    staged.write_text(to_json_text(result), encoding="utf-8")
    staged.replace(result_file)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
