"""What breaks torch_memory_saver, looked for before a server starts. Unproved on a GPU.

It unmaps memory behind torch's allocator. What it meets there ends in a hang, an illegal access or
a process that does not start, none of which names its cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.errors import EngineError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
"""Found in allocator settings, as in ``PYTORCH_ALLOC_CONF``, that turn them on."""

_LIBRARY = "torch_memory_saver"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaverFacts:
    """All that counts, so that the rules can be tested where there is no GPU."""

    device: str
    """cpu or cuda."""

    variables: Mapping[str, str]
    """Environment of the server."""

    arguments: Mapping[str, object]
    """Of the server."""

    is_installed: bool
    """Whether ``torch_memory_saver`` can be imported."""


def find_obstacles(facts: MemorySaverFacts) -> list[str]:
    """Return one sentence, with its remedy, for each thing that would break a release."""
    is_on = facts.arguments.get("enable_memory_saver") is True
    if facts.device != "cuda":
        return _without_cuda(facts, is_on=is_on)
    return _with_cuda(facts) if is_on else []


def require_no_obstacle(facts: MemorySaverFacts) -> None:
    """Refuse to start a server whose memory could not be released.

    Raises:
        EngineError: everything that is in the way.
    """
    if obstacles := find_obstacles(facts):
        raise EngineError("SGLang could not release its memory: " + "; ".join(obstacles))


def _without_cuda(facts: MemorySaverFacts, *, is_on: bool) -> list[str]:
    faults = []
    if is_on:
        faults.append("enable_memory_saver=true needs CUDA; set cluster.device=cuda")
    if _LIBRARY in facts.variables.get("LD_PRELOAD", ""):
        faults.append(
            f"LD_PRELOAD={facts.variables['LD_PRELOAD']} loads the library of {_LIBRARY} into "
            "every process, and none starts with it without CUDA; unset LD_PRELOAD"
        )
    return faults


def _with_cuda(facts: MemorySaverFacts) -> list[str]:
    faults = []
    if not facts.is_installed:
        faults.append(f"it needs {_LIBRARY}: pip install {_LIBRARY}, or set rollout.sleep=false")
    faults += [
        f"{name}={facts.variables[name]} turns expandable segments on, which slip past "
        f"{_LIBRARY}; unset it for the server"
        for name in _ALLOCATOR
        if EXPANDABLE_SEGMENTS.search(facts.variables.get(name, ""))
    ]
    if facts.variables.get("NCCL_GRAPH_REGISTER", "1") != "0":
        faults.append(
            "NCCL registers buffers of CUDA graphs, and hangs once their memory was unmapped; set "
            "NCCL_GRAPH_REGISTER=0"
        )
    return faults
