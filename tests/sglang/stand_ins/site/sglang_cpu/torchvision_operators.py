"""Lets torchvision be imported although its compiled operators cannot be loaded.

SGLang imports torchvision for any model. The package index has builds of it for CUDA alone, whose
library does not load beside a CPU build of torch; torchvision takes that in its stride, except
that it describes two operators to torch which then do not exist. Here they are declared, without
a body: calling them raises. This module is imported when Python starts (by a ``.pth`` file), so it
imports nothing heavy, and does nothing until torchvision is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

DESCRIBED_OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_alive: list[object] = []  # operators live as long as the object that declared them


class _DeclareOperators(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if not _operators_load(Path(self.path).parent):
            _declare_operators()
        super().exec_module(module)


def _operators_load(folder: Path) -> bool:
    import torch

    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:  # built for CUDA
        return False
    return True


def _declare_operators() -> None:
    import torch

    declared = torch.library.Library("torchvision", "DEF")
    for name in DESCRIBED_OPERATORS:
        declared.define(name + SIGNATURE)
    _alive.append(declared)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _DeclareOperators(name, spec.origin)
        return spec


def install() -> None:
    """Watch for the import of torchvision."""
    sys.meta_path.insert(0, _Finder())
