"""Rows of a user's function: ``path/to/file.py:function`` among the files of a key.

The function takes no argument and yields dictionaries, always the same in the same order.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError, shown
from hybridrl.import_file import import_file


def call_function(path: Path, name: str, *, key: str) -> Iterator[Mapping[str, object] | str]:
    """Import the file, call the function, and yield its rows.

    Args:
        key: the configuration key that lists it, for messages.

    Yields:
        A dictionary; or of another value the reason why it is not a row.

    Raises:
        DataError: the file cannot be imported, or the function raises or yields nothing.
    """
    spelled = f"{key}: {path}:{name}"
    try:
        rows: Iterable[object] = _import(path, name)()
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise TypeError(f"it returned {shown(rows)}, must yield dictionaries")
        for row in rows:
            kind = type(row).__name__
            yield row if isinstance(row, dict) else f"is of type {kind}, must be a dictionary"
    except Exception as error:  # of a user's code, which may raise any
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        where = f" ({path}:{lines[-1]})" if lines else ""
        raise DataError(
            f"{spelled}: {type(error).__name__}: {error}{where}; correct the file"
        ) from error


def _import(path: Path, name: str) -> Callable[[], Any]:
    function = vars(import_file(path, prefix="hybridrl_rows")).get(name)
    if not callable(function):
        raise AttributeError(f"there is no function {name!r}")
    rows: Callable[[], Any] = function
    return rows
