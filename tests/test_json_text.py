from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridrl
from benchmarks.source_tree import read_modules
from hybridrl.json_text import to_json_text

ROOT = Path(hybridrl.__file__).parents[1]
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def strictly(text: str) -> object:
    """Read JSON as a browser does: no NaN, no Infinity."""

    def refuse(word: str) -> object:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def without(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without(entry) for key, entry in value.items()}
    return [without(entry) for entry in value] if isinstance(value, list) else value


@given(DATA)
def test_json_writes_null_for_numbers_that_are_not_finite(value: object) -> None:
    assert strictly(to_json_text(value)) == without(value)
    assert strictly(to_json_text(value, indent=1, keeps_unicode=True)) == without(value)


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError):
        to_json_text({"a": object()})


def test_only_json_text_writes_json() -> None:
    # Processes of foreign code are behind a pipe, not a file, and import nothing of ours.
    # Pydantic is to see numbers that are not finite: it refuses them by key.
    loose = {
        f"{module.name}:{call.lineno}"
        for module in read_modules(ROOT / "hybridrl", root=ROOT)
        if not module.name.startswith(("hybridrl.processes.", "hybridrl.config.values"))
        for call in module.calls_of("dumps", "dump")
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "json"
        if "allow_nan=False" not in [ast.unparse(keyword) for keyword in call.keywords]
    }
    assert loose == set()
