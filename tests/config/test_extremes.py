"""Whatever stands in a configuration, checking it ends, soon, and with ConfigErrors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ends_of
from hybridrl.config.load import known_keys, load_config
from hybridrl.config.summary import sentence, summarize
from hybridrl.errors import ConfigError, ConfigErrors
from tests.config.examples import LORA, MOE
from tests.config.test_checks import QWEN3_MOE
from tests.config.test_load import LIMITED
from tests.config.values import Values, values_of, with_overrides
from tests.drawn import cases

SECTIONS = {key.rpartition(".")[0] for key in known_keys()} - {""}
KEYS = [key for key in known_keys() if key not in SECTIONS]
HUGE_TEXT = "x" * 100_000
DEEP = json.loads("[" * 900 + "]" * 900)
EXTREMES: list[object] = [
    *(0, -1, 1, 2**31, 2**63, 10**400, 10**5000, 1e308, -1e308, 5e-324, math.nan, math.inf),
    *(True, None, "", "???", "9" * 400, "9" * 5000, HUGE_TEXT, "a/" * 2000, "\0", "\ud800", "é"),
    *([], {}, [None], [[]], [HUGE_TEXT], [1] * 20_000, {"a": {"b": {}}}, {"": 1}, {1: math.nan}),
    *({"\ud800": 1}, {"x" * 10_000: 1}, "a" * 5000 + "\ud800", DEEP),
]
SCENES = [
    (),
    ("algorithm=ppo", "critic.num_ranks_per_node=1"),
    ("actor=megatron", "rollout=sglang", "lora=default", "cluster.num_ranks_per_node=8"),
    ("cluster=one_gpu", "cluster.num_nodes=2", "cluster.ray_address=auto", "mode=eval"),
    ("mode=sft", "data.task=null", "data.train_files=[a.jsonl]", "model.path=x"),
]
# What a check may take at most: far more than it does, far less than a loop over 2^31.
DEADLINE_S = 60


def check(values: Values) -> tuple[ConfigError, ...]:
    """What ``mode=check`` prints before it executes anything, or why it refuses."""
    try:
        config = load_config(values)
    except ConfigErrors as errors:
        return errors.violations
    assert summarize(config)
    assert sentence(config)
    return ()


def put(values: Values, key: str, value: object) -> None:
    *sections, name = key.split(".")
    section: Any = values
    for part in sections:
        section = section.get(part) if isinstance(section, dict) else None
    if isinstance(section, dict):  # a copy: a mapping put into itself would have no end
        section[name] = dict(value) if isinstance(value, dict) else value


# An eighth of the values for each key, another one for the next key; the others nightly.
EIGHTHS = [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 8))]


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("number", range(len(KEYS)), ids=KEYS)
@pytest.mark.parametrize("eighth", EIGHTHS)
def test_no_value_of_a_key_ends_a_check_in_a_traceback(number: int, eighth: int) -> None:
    key, scene = KEYS[number], SCENES[number % len(SCENES)]
    for value in EXTREMES[(number + eighth) % len(EIGHTHS) :: len(EIGHTHS)]:
        values = values_of(*scene)
        put(values, key, value)
        for violation in check(values):
            assert len(str(violation)) < 20_000


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("name", QWEN3_MOE)
def test_no_size_in_config_json_ends_a_check_in_a_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moe").mkdir()
    values: list[object] = [0, -1, 10**12, 10**400, 1.5, "x", None, [], [[]], {}, True]
    for value in values:
        Path("moe/config.json").write_text(json.dumps(QWEN3_MOE | {name: value}))
        check(values_of(*MOE, *LORA, "model.dtype=bfloat16"))
        check(values_of(*MOE[2:], "rollout=sglang", "mode=sft"))


def keys_and_values(keys: list[str]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(keys), st.sampled_from(EXTREMES), max_size=4)


@pytest.mark.timeout(DEADLINE_S)
@cases(by_day=50, by_night=500)
@given(st.sampled_from(SCENES), keys_and_values([*KEYS, *sorted(SECTIONS)]))
def test_no_values_of_several_keys_end_a_check_in_a_traceback(
    scene: tuple[str, ...], changes: dict[str, object]
) -> None:
    values = values_of(*scene)
    for key, value in changes.items():
        put(values, key, value)
    check(values)


def tops() -> Iterator[tuple[str, object]]:
    for key, hint in LIMITED:
        yield key, get_args(hint)[0](ends_of(hint).get("le", 0.999))


@pytest.mark.timeout(2 * DEADLINE_S)
@cases(by_day=20, by_night=200)
@example((), [("rollout.oversample", 100.0), ("cluster.num_nodes", 65536)])
@example((), [("cluster.num_ranks_per_node", 65536), ("cluster.num_nodes", 65536)])
@given(st.sampled_from(SCENES[:4]), st.lists(st.sampled_from(list(tops())), max_size=12))
def test_the_highest_numbers_are_checked_and_remedies_mend(
    scene: tuple[str, ...], changes: list[tuple[str, object]]
) -> None:
    values = values_of(*scene)
    for key, value in changes:
        put(values, key, value)
    for violation in check(values):
        for remedy in violation.remedies:
            after = check(with_overrides(values, remedy))
            told_again = [v for v in after if (v.key, v.rule) == (violation.key, violation.rule)]
            assert not told_again, (str(violation), remedy)
            typed = {override.partition("=")[0] for override in remedy}
            assert not [v for v in after if v.key in typed and v.rule.startswith("must be >")]


def test_each_number_has_an_interval_with_a_top() -> None:
    assert list(numbers_without_interval(ExperimentConfig)) == []
    for key, hint in LIMITED:
        ends = ends_of(hint)
        top = ends.get("le", ends.get("lt"))
        assert top is not None, key
        assert math.isfinite(top), key


def numbers_without_interval(section: type) -> Iterator[str]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        for part in (hint, *(get_args(hint) if get_origin(hint) is not Mapping else ())):
            if part in (int, float) and get_origin(hint) is not Annotated:
                yield f"{section.__name__}.{name}"
            elif dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from numbers_without_interval(part)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "a" * 5000])
def test_text_that_no_file_can_take_is_refused(text: str) -> None:
    for key in ("trainer.run_dir", "tracking.project", "data.prompt_key"):
        values = values_of()
        put(values, key, text)
        assert [v.key for v in check(values)] == [key]


@pytest.mark.parametrize(
    ("key", "value", "end"),
    [
        ("seed", 2**63, "<= 2147483647"),
        ("cluster.call_timeout_s", 1e9, "<= 1000000"),
        ("reward.timeout_s", 1e9, "<= 1000000"),
        ("algorithm.clip_high", 1e39, "<= 1000000"),
        ("lora.alpha", 1e39, "<= 1000000"),
    ],
)
def test_what_a_run_would_die_of_is_refused_with_the_end_of_its_interval(
    key: str, value: float, end: str
) -> None:
    values = values_of()
    put(values, key, value)
    (violation,) = [v for v in check(values) if v.key == key and "must be >" in v.rule]
    assert violation.rule.endswith(end)
