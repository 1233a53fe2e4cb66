"""Rows of a task of reasoning-gym, which makes any number of them [2505.24760].

``reasoning_gym:chain_sum?size=2000&seed=1&max_terms=3`` stands among the files of a key. ``size``
(500) counts rows, ``seed`` (0) chooses them, ``system`` (default) names a system prompt of the
package, and the others are the task's own. The package seeds row i with its seed + i, so a seed of
ours is a million of theirs: rows of two seeds never begin from the same numbers.

[2505.24760]: https://arxiv.org/abs/2505.24760
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module

from hybridrl.data.rows import Malformed
from hybridrl.errors import DataError, suggest_name

_MOST_ROWS = 1_000_000  # of a seed
_EXTRA = "pip install 'hybridrl[reasoning-gym]'"


def make_task_rows(spelled: str, *, key: str) -> Iterator[dict[str, object] | Malformed]:
    """Yield rows with prompt, answer, source, and the entry that the task's scorer asks for.

    The answer stands in ``<answer>`` tags, as the system prompts want it. With ``system=none`` the
    prompt is the question, as text, and the answer has no tags.

    Raises:
        DataError: no such task, options that it refuses, too many rows, or no reasoning-gym.
    """
    name, options = _parse(spelled)
    size, seed = options.pop("size", 500), options.pop("seed", 0)
    system = options.pop("system", "default")
    try:
        gym, utils = import_module("reasoning_gym"), import_module("reasoning_gym.utils")
    except ImportError as error:
        raise DataError(f"{key}: {spelled} needs reasoning-gym: {_EXTRA}") from error
    tasks = import_module("reasoning_gym.factory").DATASETS
    prompts = {**utils.SYSTEM_PROMPTS, "none": ""}
    if name not in tasks:
        raise DataError(f"{key}: {spelled}: no task {name!r}; {suggest_name(name, [*tasks])}")
    if system not in prompts:
        known = suggest_name(str(system), [*prompts])
        raise DataError(f"{key}: {spelled}: no system prompt {system!r}; {known}")
    if not (type(size) is int and 0 < size <= _MOST_ROWS and type(seed) is int and seed >= 0):
        rule = f"size is a number from 1 to {_MOST_ROWS}, seed one from 0"
        raise DataError(f"{key}: {spelled}: {rule}; correct them")
    try:
        for entry in gym.create_dataset(name, size=size, seed=seed * _MOST_ROWS, **options):
            yield _row_of(entry, name, prompts[system])
    except Exception as error:  # of a task, which may raise any
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{key}: {spelled}: {reason}; correct its options") from error


def _parse(spelled: str) -> tuple[str, dict[str, object]]:
    """Return the task and its options; values are JSON, or else text."""
    name, _, query = spelled.partition(":")[2].partition("?")
    options: dict[str, object] = {}
    for option in filter(None, query.split("&")):
        word, _, value = option.partition("=")
        try:
            options[word] = json.loads(value)
        except ValueError:
            options[word] = value
    return name, options


def _row_of(entry: dict[str, object], name: str, system: str) -> dict[str, object] | Malformed:
    question, answer = entry["question"], entry["answer"]
    if not isinstance(answer, str):
        return Malformed(f"has no reference answer, as all rows of {name}; leave out the task")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {
        "prompt": messages if system else question,
        "answer": f"<answer>{answer}</answer>" if system else answer,
        "source": name,
        "entry": repr(_plain(entry)),  # JSON has no tuples, which some scorers compare
    }


def _plain(value: object) -> object:
    """Replace numpy's text and floats, whose ``repr`` is a call, by Python's."""
    if isinstance(value, dict):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return float(value) if isinstance(value, float) else value
