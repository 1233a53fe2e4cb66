"""The training engines that the contract is held against, and the ways in which each is cut.

To hold another engine against it, register the engine in ``hybridrl/workers/build.py`` and add an
entry to ``ENGINES``. Nothing else here knows an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from hybridrl.config.model import ATTENTION_LINEAR
from tests.megatron.stand_ins import install
from tests.tiny_models import SPARSE, TRAINED, Family

ByDay = Literal["all", "turns", "steps", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str

    engine: str
    """As in ``actor.engine``."""

    num_ranks: int = 1

    dp_size: int = 1
    """Ranks, or groups of ranks that share a model, which have rows of their own."""

    family: Family = "qwen3"
    num_layers: int = 2

    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the model's configuration."""

    adapted: tuple[str, ...] = ("all-linear",)
    """Layers beside which adapters are."""

    megatron: Mapping[str, object] = field(default_factory=dict)
    """Changes of the ``megatron`` section."""

    fsdp2: Mapping[str, int | bool | str] = field(default_factory=dict)
    """Changes of ``actor.fsdp2``."""

    replays_routes: bool = False
    """As ``actor.replay_routing``."""

    max_share: float = 1.1
    """Of the model's bytes that one rank may hold on its device between computations; buffers are
    filled up to whole blocks."""

    deadline_s: float = 90.0
    """Of one check on the ranks."""

    by_day: ByDay = "all"
    """Which tests are not nightly: all; optimizer steps, and of the other tests every second one,
    by turns with the engine's other layout of that kind; or the steps alone, of a cut that others
    contain."""


@dataclass(frozen=True, kw_only=True)
class EngineUnderTest:
    """A training engine, by the name under which ``hybridrl/workers/build.py`` has it."""

    layouts: tuple[Layout, ...]

    families: tuple[Family, ...]
    """Model families that it loads and exports."""

    without_windows: bool = False
    """Whether it refuses models whose attention does not reach all earlier tokens."""

    has_critic: bool = True
    has_adapters: bool = True

    prepare: Callable[[], None] = lambda: None
    """What a rank's process needs before it builds an engine; called again before every check."""


def cut(engine: str, name: str, **options: Any) -> Layout:
    """A layout; options that are none of its fields change the engine's own section."""
    fields = Layout.__dataclass_fields__
    own: dict[str, Any] = {key: options.pop(key) for key in [*options] if key in fields}
    return Layout(name=name, engine=engine, **(own | {engine: options}))


TP2: dict[str, Any] = {"tensor_parallel_size": 2}
SP2: dict[str, Any] = {**TP2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
VP2: dict[str, Any] = {**PP2, "num_virtual_stages": 2, "num_layers": 4}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
OVERLAP: dict[str, Any] = {"ddp_args": {"overlap_grad_reduce": True}}


def _megatron(name: str, **options: Any) -> Layout:
    return cut("megatron", f"megatron-{name}", **{"num_ranks": 2, **options})


def _allow_compilation() -> None:
    """Take back what megatron's stand-ins forbid to all that is imported with them."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)


def _fsdp2(name: str, *, num_ranks: int = 2, family: Family = "qwen3", **options: Any) -> Layout:
    adapted = ATTENTION_LINEAR if family in SPARSE else ("all-linear",)
    given = {"num_ranks": num_ranks, "dp_size": num_ranks, "family": family, "adapted": adapted}
    return cut("fsdp2", f"fsdp2-{name}", **{"max_share": 0.6, **given, **options})


ENGINES: dict[str, EngineUnderTest] = {
    "fsdp2": EngineUnderTest(
        layouts=(
            _fsdp2("1", num_ranks=1, max_share=1.1, by_day="steps"),
            _fsdp2("2"),
            _fsdp2("2x2", num_ranks=4, num_replicas=2, by_day="steps"),
            _fsdp2("2x1", num_replicas=2, max_share=1.1, by_day="nothing"),
            _fsdp2("offload", cpu_offload=True, max_share=0.0, by_day="steps"),
            _fsdp2("compile", kernels="compiled", deadline_s=170.0, by_day="nothing"),
            _fsdp2(
                "gathered",
                reshard_after_forward=False,
                by_day="steps",
            ),
            _fsdp2("cp2", **CP2, dp_size=1, by_day="steps"),
            _fsdp2("cp2x2", **CP2, num_ranks=4, dp_size=2, num_replicas=2, by_day="nothing"),
            # Four ranks share two heads of keys, three share none: they gather keys instead.
            _fsdp2("cp4", context_parallel_size=4, num_ranks=4, dp_size=1, by_day="steps"),
            _fsdp2("cp3", context_parallel_size=3, num_ranks=3, dp_size=1, by_day="nothing"),
            _fsdp2("cp2-moe", **CP2, dp_size=1, family="qwen3_moe", by_day="nothing"),
            _fsdp2("moe", family="qwen3_moe", by_day="steps"),
            _fsdp2("moe-1", num_ranks=1, family="qwen2_moe", max_share=1.1, by_day="nothing"),
            # Three experts on two ranks: each has half of every matrix.
            _fsdp2("moe-rows", family="mixtral", sizes={"num_local_experts": 3}, by_day="nothing"),
            _fsdp2("moe-2x2", num_ranks=4, num_replicas=2, family="qwen3_moe", by_day="nothing"),
        ),
        families=TRAINED,
        prepare=_allow_compilation,
    ),
    "megatron": EngineUnderTest(
        layouts=(
            _megatron("1", num_ranks=1, by_day="nothing"),
            _megatron("tp2", **TP2, max_share=0.7, by_day="nothing"),
            _megatron("sp2", **SP2, max_share=0.7, by_day="turns"),
            _megatron("pp2", **PP2, by_day="nothing"),
            _megatron("pp2-vp2", **VP2, by_day="turns"),
            _megatron("dp2", dp_size=2, by_day="steps"),
            _megatron("cp2", **CP2, by_day="steps"),
            _megatron(
                "pp2-vp2-overlap", **VP2, **OVERLAP, num_ranks=4, dp_size=2, by_day="nothing"
            ),
            _megatron("cp2-tp2", **CP2, **SP2, num_ranks=4, max_share=0.7, by_day="nothing"),
            _megatron("cp2-pp2", **CP2, **PP2, num_ranks=4, by_day="nothing"),
            _megatron("tp2-pp2", **TP2, **PP2, num_ranks=4, by_day="nothing"),
            _megatron("ep2", **EP2, dp_size=2, family="qwen3_moe", by_day="steps"),
        ),
        families=("qwen3", "qwen2", "llama", "mistral"),
        without_windows=True,
        prepare=install,
    ),
}

_OF_EACH_WAY: tuple[Family, ...] = (
    *("qwen3", "qwen2", "phi3", "gemma3_text", "qwen3_5_text"),
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"),
)
"""Families that differ: biases, layers that are joined, windows, states; matrices of experts under
either name or in one tensor, keys and values of fewer numbers."""

TIES_AND_FAMILIES = [
    pytest.param((True, False), _OF_EACH_WAY, id="by turns"),
    *(
        pytest.param([tie], TRAINED, id=str(tie), marks=pytest.mark.nightly)
        for tie in (True, False)
    ),
]
"""Whether the embeddings of one family after the other are tied, and the families."""

RESHAPES = [
    ("fsdp2-2", "fsdp2-1"),
    ("fsdp2-1", "fsdp2-2"),
    ("megatron-tp2", "fsdp2-2"),
    ("fsdp2-2", "megatron-pp2"),
    ("fsdp2-moe", "megatron-ep2"),
]
RESHAPES_BY_NIGHT = [
    ("fsdp2-2x2", "fsdp2-offload"),
    ("fsdp2-2", "fsdp2-cp2x2"),
    ("fsdp2-cp2x2", "fsdp2-2"),
    ("fsdp2-offload", "fsdp2-2x2"),
    ("megatron-tp2-pp2", "megatron-dp2"),
    ("megatron-dp2", "megatron-pp2"),
    ("fsdp2-2", "megatron-cp2"),
    ("megatron-cp2", "megatron-tp2"),
    ("megatron-ep2", "fsdp2-moe-2x2"),
    ("fsdp2-moe-2x2", "fsdp2-moe"),
]
"""Layouts that write a checkpoint, and others that go on from it."""


def layout_of(name: str) -> Layout:
    return {layout.name: layout for e in ENGINES.values() for layout in e.layouts}[name]


def on_layouts(
    wanted: Callable[[EngineUnderTest], bool] = lambda _: True,
    *,
    compares_numbers: bool = False,
    first_only: bool = False,
    families: Collection[Family] | None = None,
    steps_of: Collection[str] = (),
) -> pytest.MarkDecorator:
    """Run a module's tests on every layout of the engines that are ``wanted``, or on the first.

    With ``families``, on those layouts alone whose model is of one of them. ``steps_of`` names
    layouts whose optimizer steps are taken by day.
    """
    by_day = {"all", "turns", *(["steps"] if compares_numbers else [])}
    params = [
        pytest.param(
            layout,
            id=layout.name,
            marks=[pytest.mark.nightly]
            * (layout.by_day not in by_day and layout.name not in steps_of and not first_only),
        )
        for engine in ENGINES.values()
        if wanted(engine)
        for layout in engine.layouts[: 1 if first_only else None]
        if families is None or layout.family in families
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True, scope="package")
