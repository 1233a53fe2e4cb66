from __future__ import annotations

import ast
import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.source_tree import read_modules
from hybridrl.errors import MetricError
from hybridrl.json_text import to_json_text
from hybridrl.metrics import (
    DECLARATIONS,
    Last,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    Sum,
    check_declared,
    from_json,
    merge,
    to_json,
    to_markdown,
)

AREAS = (
    *("reward", "loss", "policy", "moe", "critic", "rollout", "length"),
    *("preference", "agent", "groups", "time", "memory", "throughput", "data", "eval"),
)
"""First parts of names, a closed list."""

ROOT = Path(__file__).parents[1]
NAME = re.compile(rf"({'|'.join(AREAS)})/[a-z0-9_/]*[a-z0-9]")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 5), st.randoms())
def test_merging_parts_gives_what_the_whole_gives(
    values: list[float], num_parts: int, shuffle: random.Random
) -> None:
    parts = [values[start::num_parts] for start in range(num_parts)]
    shuffle.shuffle(parts)
    merged = merge(describe(part) for part in parts if part)
    assert merged["mean"].value == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert merged["max"].value == max(values)
    assert merged["min"].value == min(values)
    assert merged["sum"].value == pytest.approx(sum(values), abs=1e-6)


def describe(values: list[float]) -> dict[str, Metric]:
    return {
        "mean": Mean(sum(values), len(values)),
        "max": Max(max(values)),
        "min": Min(min(values)),
        "sum": Sum(sum(values)),
    }


@pytest.mark.parametrize("kind", [Max, Min])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_extreme_of_nan_is_none_in_any_order(kind: type[Max] | type[Min], place: int) -> None:
    values = [1.0, 2.0, 3.0]
    values[place] = math.nan
    assert math.isnan(merge({"a": kind(value)} for value in values)["a"].value)


def test_a_rate_keeps_its_last_value_a_part_its_name_and_an_empty_mean_is_no_number() -> None:
    assert merge([{"lr": Last(2.0)}, {"lr": Last(3.0)}, {"lr": Last(1.0)}]) == {"lr": Last(1.0)}
    assert merge([{"a": Sum(1.0)}, {"b": Sum(2.0)}]) == {"a": Sum(1.0), "b": Sum(2.0)}
    assert math.isnan(Mean(0.0, 0).value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1])
def test_metrics_come_back_from_json_that_any_reader_takes(value: float) -> None:
    metrics: Metrics = {"a": Mean(value, 3.0), "b": Max(value), "c": Last(value)}
    spelled = json.dumps(to_json(metrics), allow_nan=False)
    assert repr(from_json(json.loads(spelled))) == repr(metrics)  # a NaN equals nothing


def test_an_undeclared_name_is_refused_with_the_nearest_one_and_braces_stand_for_a_word() -> None:
    with pytest.raises(
        MetricError, match="'reward/men' is not declared; did you mean 'reward/mean'"
    ):
        check_declared(["reward/max", "reward/men"])
    check_declared(["eval/reward/gsm8k", "memory/make_room_peak_bytes/max"])
    with pytest.raises(MetricError):
        check_declared(["eval/reward/gsm8k/more"])


def test_every_declared_name_follows_the_rule() -> None:
    for name, declaration in DECLARATIONS.items():
        assert name == declaration.name
        assert NAME.fullmatch(re.sub(r"{\w+}", "word", name)), name
        assert declaration.unit
        assert declaration.meaning


def test_every_name_written_in_the_code_is_declared() -> None:
    names = {
        node.value
        for path in (ROOT / "hybridrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    }
    assert "loss/policy" in names  # the search finds what it is to find
    check_declared(sorted(names))


def test_the_document_is_the_table() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == to_markdown(), "run: python -m hybridrl.metrics > docs/metrics.md"


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
