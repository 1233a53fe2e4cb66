"""The training engines that the contract is held against, and the ways in which each is cut.

To hold another engine against it, register the engine in ``hybridrl/workers/build.py`` and add an
entry to ``ENGINES``. Nothing else here knows an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from tests.models import Family


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to cut a model over ranks."""

    name: str

    engine: str
    """As in ``actor.engine``."""

    num_ranks: int = 1

    dp_size: int = 1
    """Ranks, or groups of ranks that share a model, which have rows of their own: 1 or 2."""

    family: Family = "qwen3"
    num_layers: int = 2

    megatron: Mapping[str, int | bool] = field(default_factory=dict)
    """Changes of the ``megatron`` section."""

    max_share: float = 1.0
    """Of the model's bytes that one rank may hold."""

    is_nightly: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineUnderTest:
    """A training engine, by the name under which ``hybridrl/workers/build.py`` has it."""

    layouts: tuple[Layout, ...]

    families: tuple[Family, ...]
    """Model families that it loads and exports."""

    has_critic: bool = True
    has_adapters: bool = True

    prepare: Callable[[], None] = lambda: None
    """What a rank's process needs before it builds an engine; called again before every check."""


ENGINES: dict[str, EngineUnderTest] = {
    "fsdp2": EngineUnderTest(
        layouts=(
            Layout(name="fsdp2-1", engine="fsdp2"),
            Layout(name="fsdp2-2", engine="fsdp2", num_ranks=2, dp_size=2, max_share=0.6),
        ),
        families=("qwen3", "qwen2", "llama"),
    ),
}

RESHAPES = [("fsdp2-2", "fsdp2-1"), ("fsdp2-1", "fsdp2-2")]
"""Layouts that write a checkpoint, and others that go on from it."""


def layout_of(name: str) -> Layout:
    """Return the layout of that name."""
    return {layout.name: layout for e in ENGINES.values() for layout in e.layouts}[name]


def on_layouts(
    wanted: Callable[[EngineUnderTest], bool] = lambda _: True,
) -> pytest.MarkDecorator:
    """Run a module's tests on every layout of the engines that are ``wanted``."""
    params = [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.nightly] * layout.is_nightly)
        for engine in ENGINES.values()
        if wanted(engine)
        for layout in engine.layouts
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True, scope="package")
