"""What would break torch_memory_saver is found before a server starts."""

from __future__ import annotations

from typing import Any

import pytest

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang.memory_saver import require_no_obstacle

GOOD: dict[str, Any] = {
    "device": "cuda",
    "variables": {"NCCL_GRAPH_REGISTER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    "is_on": True,
    "is_installed": True,
}
LIBRARY = "/lib/torch_memory_saver_hook_mode_preload.abi3.so"


def test_what_the_engine_sets_for_a_server_is_in_nobodys_way() -> None:
    require_no_obstacle(**GOOD)


@pytest.mark.shows("5.7")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"variables": {"NCCL_GRAPH_REGISTER": "1"}}, "set NCCL_GRAPH_REGISTER=0"),
        ({"variables": {}}, "set NCCL_GRAPH_REGISTER=0"),
        *(
            ({"variables": {"NCCL_GRAPH_REGISTER": "0", name: text}}, f"{name}={text}")
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
            for text in ("expandable_segments:True", "a:1,expandable_segments: true")
        ),
        ({"is_installed": False}, "pip install torch_memory_saver"),
        ({"device": "cpu"}, "needs CUDA"),
        (
            {"device": "cpu", "is_on": False, "variables": {"LD_PRELOAD": LIBRARY}},
            "unset LD_PRELOAD",
        ),
    ],
)
def test_each_obstacle_is_named_with_what_removes_it(changes: dict[str, object], word: str) -> None:
    with pytest.raises(EngineError, match=r"^SGLang could not release its memory: ") as raised:
        require_no_obstacle(**(GOOD | changes))
    assert word in str(raised.value)


def test_a_server_that_never_sleeps_is_held_to_nothing() -> None:
    require_no_obstacle(**(GOOD | {"is_on": False, "variables": {}, "is_installed": False}))
