"""Settings that break torch_memory_saver, checked before a server starts. Not yet run on a GPU.

It unmaps memory without torch's allocator. A conflict ends in a hang, an illegal access or a
process that does not start, and none of these names its cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hybridrl.errors import EngineError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
"""Text in allocator settings, as in ``PYTORCH_ALLOC_CONF``, that turns them on."""

_LIBRARY = "torch_memory_saver"


def require_no_obstacle(
    *, device: str, variables: Mapping[str, str], is_on: bool, is_installed: bool
) -> None:
    """Refuse to start a server whose memory could not be released.

    Args:
        device: cpu or cuda.
        is_on: whether the server is to run under torch_memory_saver.
        is_installed: whether ``torch_memory_saver`` can be imported.

    Raises:
        EngineError: every conflict, each with its remedy.
    """
    if device != "cuda":
        obstacles = list(_without_cuda(variables, is_on=is_on))
    else:
        obstacles = list(_with_cuda(variables, is_installed=is_installed)) if is_on else []
    if obstacles:
        raise EngineError("SGLang could not release its memory: " + "; ".join(obstacles))


def _without_cuda(variables: Mapping[str, str], *, is_on: bool) -> Iterator[str]:
    if is_on:
        yield "enable_memory_saver=true needs CUDA; set cluster.device=cuda"
    if _LIBRARY in variables.get("LD_PRELOAD", ""):
        yield (
            f"LD_PRELOAD={variables['LD_PRELOAD']} loads the library of {_LIBRARY} into every "
            "process, and none starts with it without CUDA; unset LD_PRELOAD"
        )


def _with_cuda(variables: Mapping[str, str], *, is_installed: bool) -> Iterator[str]:
    if not is_installed:
        yield f"it needs {_LIBRARY}: pip install {_LIBRARY}, or set rollout.sleep=false"
    for name in _ALLOCATOR:
        if EXPANDABLE_SEGMENTS.search(variables.get(name, "")):
            yield (
                f"{name}={variables[name]} turns expandable segments on, which slip past "
                f"{_LIBRARY}; unset it for the server"
            )
    if variables.get("NCCL_GRAPH_REGISTER", "1") != "0":
        yield (
            "NCCL registers buffers of CUDA graphs, and hangs once their memory was unmapped; set "
            "NCCL_GRAPH_REGISTER=0"
        )
