"""Files and folders at a path, for messages: looking never raises, whatever the path is."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

_MISSING = "does not exist"


def flaw_of_file(path: str | Path) -> str:
    """Return why ``path`` is not a file that this user may read; empty if it is one."""
    mode, flaw = _look_at(path)
    if not flaw and not stat.S_ISREG(mode):
        flaw = f"{Path(path).absolute()} is no file"
    return flaw or _denied(path, os.R_OK, "read it")


def flaw_of_folder(path: str | Path) -> str:
    """Return why ``path`` is not a folder that this user may list; empty if it is one."""
    mode, flaw = _look_at(path)
    if not flaw and not stat.S_ISDIR(mode):
        flaw = f"{Path(path).absolute()} is no folder"
    return flaw or _denied(path, os.R_OK | os.X_OK, "look into it")


def flaw_of_new_folder(path: str | Path) -> str:
    """Return why a folder cannot be created at ``path``, with its parents; empty if it can."""
    above = Path(path).absolute()
    mode, flaw = _look_at(above)
    while flaw.endswith(_MISSING) and above != above.parent:
        above = above.parent
        mode, flaw = _look_at(above)
    if not flaw and not stat.S_ISDIR(mode):
        flaw = f"{above} is no folder"
    return flaw or _denied(above, os.W_OK | os.X_OK, "write there")


def is_there(path: str | Path) -> bool:
    """Return whether a file or folder exists at ``path``, as far as this user can see."""
    return not _look_at(path)[1]


def split_function(path: str | Path) -> tuple[Path, str] | None:
    """Return file and name of ``path/to/file.py:function``; None if it is not of that form."""
    file, colon, name = str(path).rpartition(":")
    return (Path(file), name) if colon and file.endswith(".py") else None


TASK_PREFIX = "reasoning_gym:"
"""A file of this beginning is none, but a task of reasoning-gym that makes rows."""


def is_made(path: str | Path) -> bool:
    """Return whether a function or task makes the rows of ``path``, so that none are in a file."""
    return split_function(path) is not None or str(path).startswith(TASK_PREFIX)


_Section = TypeVar("_Section")

_FOLDERS = ("teacher_path", "teacher_paths", "search_folder", "path")
"""Keys whose value is a folder."""

_NO_FOLDERS = re.compile(r"initial|policy|serving\.models\..*")
"""Values of such a key that are none, but teachers."""


def with_absolute_files(section: _Section) -> _Section:
    """Return a section with absolute paths of the files it names, for any working folder."""
    return cast(_Section, _absolute(section, ""))


def _absolute(value: Any, name: str) -> Any:  # noqa: ANN401 - of any field
    if is_dataclass(value) and not isinstance(value, type):
        values = {one.name: getattr(value, one.name) for one in fields(value)}
        return replace(value, **{key: _absolute(one, key) for key, one in values.items()})
    if isinstance(value, Mapping):
        of_folders = name == "teacher_paths"
        return {k: _absolute(one, name if of_folders else str(k)) for k, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_absolute(one, name) for one in value)
    if not isinstance(value, str):
        return value
    is_no_folder = name.startswith("teacher") and _NO_FOLDERS.fullmatch(value)
    is_folder = name in _FOLDERS and not is_no_folder
    is_file = is_folder or (name == "command" and not flaw_of_file(value))
    return str(Path(value).absolute()) if is_file or split_function(value) else value


def _look_at(path: str | Path) -> tuple[int, str]:
    """Return the mode of the file, and the reason if it cannot be seen."""
    try:
        return os.stat(path).st_mode, ""
    except (FileNotFoundError, NotADirectoryError):
        return 0, f"{Path(path).absolute()} {_MISSING}"
    except (OSError, ValueError) as err:  # too long, a circle of links, NUL, no permission
        reason = err.strerror if isinstance(err, OSError) else str(err)
        return 0, f"{Path(path).absolute()} cannot be looked at: {reason}"


def _denied(path: str | Path, needed: int, what: str) -> str:
    if os.access(path, needed):
        return ""
    return f"{Path(path).absolute()}: this user may not {what}"
