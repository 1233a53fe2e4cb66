"""Imports a Python file of the user's by its path."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def import_file(path: Path, *, prefix: str) -> ModuleType:
    """Run a file as the module ``PREFIX_STEM``; each call runs it again."""
    name = f"{prefix}_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
