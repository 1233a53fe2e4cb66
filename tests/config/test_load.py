import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import to_override
from hybridrl.config.limits import ends_of, spell_interval
from hybridrl.config.load import keys_of_other_modes, load_config, read_stored
from hybridrl.config.values import read_values
from hybridrl.errors import ConfigError, ConfigErrors, instruction
from hybridrl.main import compose
from tests.config.values import config_of, values_of, with_overrides


def violations_of(values: dict[str, Any]) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        load_config(values)
    return caught.value.violations


def limited_fields(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        if get_origin(hint) in (tuple, Mapping):  # a list, or sections under names of the user's
            continue
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Annotated:
                yield prefix + name, part
            elif dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from limited_fields(part, f"{prefix}{name}.")


LIMITED = list(limited_fields(ExperimentConfig))


def test_a_configuration_survives_the_way_through_plain_values() -> None:
    config = config_of()
    assert load_config(dataclasses.asdict(config)) == config


def test_a_whole_number_is_a_number_but_not_the_other_way_round() -> None:
    assert config_of("rollout.temperature=1").rollout.temperature == 1.0
    assert isinstance(config_of("rollout.temperature=1").rollout.temperature, float)
    assert violations_of(values_of("rollout.top_k=0.5"))[0].key == "rollout.top_k"


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.top_k=true", "an integer"),
        ("rollout.top_k=null", "an integer"),
        ("rollout.top_k='8'", "an integer"),
        ("rollout.top_k=8.0", "an integer"),
        ("rollout.temperature=.nan", "a finite number"),
        ("rollout.temperature=.inf", "a finite number"),
        ("rollout.temperature=false", "a finite number"),
        ("rollout.sleep=1", "true or false"),
        ("rollout.sleep='yes'", "true or false"),
        ("trainer.run_dir=5", "text"),
        ("trainer.run_dir=null", "text"),
        ("data.prompt_key=true", "text"),
        ("data.prompt_key=1.0e+5", "text"),
        ("data.train_files=a.jsonl", "a list"),
        ("actor.optimizer=[]", "a section"),
        ("actor.optimizer=null", "a section"),
        ("mode=trian", "one of train, check, plan, sft"),
        ("model.dtype=16", "one of float32, bfloat16"),
        ("data.task=sort", "one of sort_digits"),
        ("tracking.trackers=[tensorbord]", "one of tensorboard"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_each_remedy_loads(
    override: str, rule: str
) -> None:
    key = override.partition("=")[0]
    values = values_of(override)
    _, (violation,) = read_values(ExperimentConfig, values)
    assert violation.key == key
    assert rule in violation.rule
    for remedy in violation.remedies:
        assert not read_values(ExperimentConfig, with_overrides(values, remedy))[1]


def test_something_else_in_the_place_of_a_section_is_refused() -> None:
    values = values_of()
    values["rollout"] = 3
    assert [v.key for v in violations_of(values)] == ["rollout"]


@pytest.mark.parametrize(("key", "hint"), LIMITED)
def test_a_number_outside_its_interval_is_refused_with_a_legal_one(key: str, hint: Any) -> None:
    ends, kind = ends_of(hint), get_args(hint)[0]
    for name, end in ends.items():
        outside = kind(end - 1 if name in ("ge", "gt") else end + 1)
        found = [v for v in violations_of(values_of(f"{key}={outside}")) if v.key == key]
        assert spell_interval(hint) in found[0].rule
        ((override,),) = found[0].remedies
        values = with_overrides(values_of(), [override])
        assert not read_values(ExperimentConfig, values)[1]


def test_an_open_end_is_itself_outside() -> None:
    assert violations_of(values_of("rollout.temperature=0"))[0].key == "rollout.temperature"
    assert violations_of(values_of("rollout.top_p=0"))[0].key == "rollout.top_p"
    assert config_of("rollout.top_p=1").rollout.top_p == 1.0


@pytest.mark.parametrize(
    ("mode", "typed", "is_refused"),
    [("sft", "dpo.beta=1", 1), ("train", "+dpo.beta=1", 1), ("check", "sft.turns=all", 0)],
)
def test_a_typed_key_of_another_mode_is_refused(mode: str, typed: str, is_refused: int) -> None:
    errors = list(keys_of_other_modes(mode, ["python", "seed=1", typed]))
    assert ["mode=dpo reads it" in str(error) for error in errors] == [True] * is_refused


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    values = values_of()
    values["rollout"]["temprature"] = 0.7
    values["actor"]["optimizer"]["learning_rate"] = 1.0
    values["rolout"] = {}
    violations = violations_of(values)
    assert [v.key for v in violations] == [
        "actor.optimizer.learning_rate",
        "rollout.temprature",
        "rolout",
    ]
    assert "Fix: use rollout.temperature=0.7." in str(violations[1])


def test_a_missing_key_and_a_mandatory_one_are_both_named() -> None:
    values = values_of("~rollout.top_k", "model.dtype='???'")
    assert [v.key for v in violations_of(values)] == ["model.dtype", "rollout.top_k"]


def test_a_wrong_entry_of_a_list_is_mended_by_spelling_the_whole_list() -> None:
    values = values_of("tracking.trackers=[tensorboard,wandbb]")
    (violation,) = violations_of(values)
    assert violation.remedies[0] == ("tracking.trackers=[tensorboard,wandb]",)


nonsense: st.SearchStrategy[object] = (
    st.none() | st.integers() | st.sampled_from(["", "train", "???"]) | st.just([{}])
)


@given(st.dictionaries(st.sampled_from(["mode", "seed", "rollout", "x"]), nonsense))
def test_nonsense_is_refused_with_config_errors_and_nothing_else(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors):
        load_config(values)


texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1) | st.sampled_from(
    [
        "true",
        "Null",
        "inf",
        "-1",
        "1_0",
        "a'b",
        "a\\'b\\",
        "\\",
        "${x}",
        "a=b",
        "[a]",
        " a ",
        "~",
        "é",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@given(scalars | st.lists(scalars))
def test_spelled_values_read_back_as_themselves(value: object) -> None:
    override = f"seed={to_override(value)}"
    assert with_overrides(values_of(), [override])["seed"] == value
    assert shlex.split(instruction([override])) == ["set", override]


def test_a_stored_run_is_read_by_the_names_that_its_keys_had() -> None:
    now = dataclasses.asdict(config_of())
    then: Any = values_of()
    then["rollout"] = then["rollout"] | {"routed_experts": then["actor"].pop("replay_routing")}
    then["model"]["starter"]["warmup_lr"] = 1e-3
    then["megatron"]["overlap_communication"] = "auto"  # a constant now, of which others are set
    config, _ = read_stored(then)
    assert config is not None
    assert dataclasses.asdict(config) == now
    assert "replay_routing" not in then["actor"]  # what was read is left as it is


def test_named_sections_take_what_they_leave_out_from_the_section_above() -> None:
    text = "eval.sets={gsm8k: {}, math: {temperature: 0.5, num_responses_per_prompt: 8}}"
    plain, changed = config_of(text, "eval.num_prompts=7").eval.all_sets()
    assert (plain.name, plain.num_prompts, plain.temperature) == ("gsm8k", 7, 0.0)
    assert (changed.name, changed.num_prompts, changed.num_responses_per_prompt) == ("math", 7, 8)
    assert [one.name for one in config_of().eval.all_sets()] == [""]


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("eval.sets=[a]", "eval.sets", "must be a mapping"),
        ("eval.sets={a b: {}}", "eval.sets.a b", "begins with a letter"),
        ("eval.sets={a: 3}", "eval.sets.a", "must be a section"),
        ("eval.sets={a: {temprature: 1}}", "eval.sets.a.temprature", "there is no such key"),
        ("eval.sets={a: {num_prompts: 0}}", "eval.sets.a.num_prompts", ">= 1"),
        ("data.sources={a: {weight: 2}}", "data.sources.a.files", "it has no default"),
    ],
)
def test_a_bad_named_section_is_named(override: str, key: str, words: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config_of(override)
    (violation,) = caught.value.violations
    assert (violation.key, words in violation.rule) == (key, True)
    for remedy in violation.remedies:
        load_config(with_overrides(values_of(override), remedy))


def test_a_weight_of_zero_in_a_mix_is_refused() -> None:
    violations = violations_of(values_of("data.sources={a: {files: [], weight: 0}}"))
    refused = {violation.key: violation for violation in violations}
    assert refused["data.sources.a.weight"].rule == "must be > 0 and <= 1000000"
    assert refused["data.sources.a.weight"].remedies == (("data.sources.a.weight=1.0",),)


@pytest.mark.parametrize("key", ["data.sources", "eval.sets", "reward.functions"])
def test_a_command_may_give_all_named_sections_at_once(key: str) -> None:
    section, name = key.split(".")
    composed: Any = compose([f"{key}={{a: {{b: 1}}}}"])
    assert composed[section][name] == {"a": {"b": 1}}
