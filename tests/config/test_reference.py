"""Reference and ``--help`` name every key with type, default and meaning."""

from pathlib import Path
from typing import get_type_hints

import pytest

import hybridrl
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import flatten
from hybridrl.config.load import known_keys
from hybridrl.config.reference import help_text, read_sections
from hybridrl.errors import ConfigError
from hybridrl.main import compose

FOLDER = Path(hybridrl.__file__).parents[1] / "hydra_configs"
SECTIONS = read_sections(FOLDER)
KEYS = {key.name: key for section in SECTIONS for key in section.keys}
PLACES = [
    place if place < 8 else pytest.param(place, marks=pytest.mark.nightly)
    for place in range(max(len(section.choices) for section in SECTIONS))
]
"""Of options in their groups: by day all of most groups, and some algorithms."""


def test_reference_has_every_key_with_a_meaning() -> None:
    section_names = {section.name for section in SECTIONS}
    assert set(KEYS) == set(known_keys()) - section_names
    assert [key.name for key in KEYS.values() if not key.meaning.endswith(".")] == []
    assert all(section.meaning for section in SECTIONS)


@pytest.mark.parametrize("place", PLACES)
def test_each_option_of_a_group_composes_with_the_defaults_that_the_reference_states(
    place: int,
) -> None:
    chosen = {s.name: s.choices[min(place, len(s.choices) - 1)] for s in SECTIONS[:-1]}
    values = compose([f"{section}={choice}" for section, choice in chosen.items()])
    assert values.keys() == get_type_hints(ExperimentConfig).keys()
    composed = {key: value for key, value in flatten(values) if key in KEYS and "." in key}
    defaults = {key: KEYS[key].defaults[chosen[key.partition(".")[0]]] for key in composed}
    spelled = {True: "true", False: "false", None: "null"}
    for key, value in composed.items():
        if type(value) in (int, float):
            assert float(defaults[key]) == value
        elif value is None or isinstance(value, bool):
            assert defaults[key] == spelled[value]


def test_reference_states_type_and_interval() -> None:
    lr = KEYS["actor.optimizer.lr"]
    assert (lr.type_text, lr.interval) == ("float", "> 0 and <= 1")
    assert KEYS["megatron.num_layers_in_first_stage"].interval == ">= 1 and <= 10000"
    assert KEYS["lora.sync"].type_text == "adapter | merged"


def test_help_for_a_section_names_each_of_its_keys() -> None:
    text = help_text([section.name for section in SECTIONS[:-1]], FOLDER, [])
    leaves = [key for s in SECTIONS[:-1] for key in s.keys if key.type_text != "section"]
    assert [key.name for key in leaves if f"\n{key.name} = " not in text] == []


def test_help_overview_fits_on_one_screen() -> None:
    lines = help_text([], FOLDER, ["one", "two"]).splitlines()
    assert len(lines) <= 50
    assert max(len(line) for line in lines) <= 100
    assert any(line.startswith("  model=starter | hf_folder ") for line in lines)


def test_help_for_a_mistyped_key_proposes_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'rollout\.temperature'"):
        help_text(["rollout.temprature"], FOLDER, [])
