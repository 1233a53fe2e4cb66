"""Parts of an algorithm, named in the configuration and read from their source."""

import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from hybridrl.config.functions import parts
from hybridrl.config.functions.parts import PartKind
from hybridrl.errors import ConfigErrors
from tests.config.values import config_of

KINDS = [kind for kind in vars(parts).values() if isinstance(kind, PartKind)]
BUILT_IN = [(kind, name) for kind in KINDS for name in kind.built_in]
OWN = """
from typing import Annotated

from pydantic import Field


def mine(
    rewards_B, *, floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5, mode: str = "a"
):
    return rewards_B


def greedy_one(rewards_B, greedy_rewards_B):
    return rewards_B - greedy_rewards_B


def valued(values_BL):
    return values_BL


def lost(rewards_B, sky_B):
    return rewards_B


def loose(rewards_B, **others):
    return rewards_B


def needy(rewards_B, *, temperature: float):
    return rewards_B


imported = print
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


@pytest.mark.parametrize(
    ("kind", "name"), BUILT_IN, ids=lambda value: getattr(value, "noun", value)
)
def test_a_built_in_part_is_the_function_that_was_read(kind: PartKind, name: str) -> None:
    module = importlib.import_module(f"hybridrl.algorithms.{kind.built_in[name]}")
    function, signature = vars(module)[name], kind.read(name)
    numbers = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert set(signature.inputs) <= kind.inputs
    assert {name: number.default for name, number in signature.numbers.items()} == numbers
    assert all(number.hint is not None for number in signature.numbers.values())
    assert kind.args_key is not None or not numbers
    assert signature.meaning


def test_an_own_part_is_taken_with_its_numbers(own: str) -> None:
    config = config_of(f"algorithm.advantage={own}:mine", "algorithm.advantage_args={floor: 0.25}")
    assert config.algorithm.parts[0][1:] == (f"{own}:mine", {"floor": 0.25})


def test_an_advantage_that_reads_values_gets_a_critic(own: str) -> None:
    assert config_of(f"algorithm.advantage={own}:valued").has_critic
    assert not config_of(f"algorithm.advantage={own}:mine").has_critic
    assert config_of(f"algorithm.advantage={own}:greedy_one").algorithm.reads("greedy_rewards_B")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.policy_loss=nowhere.py:f"], ["algorithm.policy_loss", "does not exist"]),
        (["algorithm.advantage=OWN:absent"], ["defines no 'absent'", "mine"]),
        (["algorithm.advantage=OWN:lost"], ["lost asks for sky_B", "rewards_BL"]),
        (["algorithm.advantage=OWN:loose"], ["**kwargs", "name each input"]),
        (["algorithm.advantage=OWN:imported"], ["imported is not written as a function"]),
        (["algorithm.advantage=OWN:needy"], ["needs it", "algorithm.advantage_args.temperature"]),
        (
            ["algorithm.advantage=OWN:mine", "algorithm.advantage_args={floor: 2}"],
            ["algorithm.advantage_args.floor=2", ">= 0 and <= 1"],
        ),
        (
            ["algorithm.advantage=OWN:mine", "algorithm.advantage_args={roof: 2}"],
            ["mine has no such number; it has floor, mode", "add ~algorithm.advantage_args.roof"],
        ),
        (
            ["algorithm.policy_loss=reinforce", "algorithm.clip_high=0.3"],
            ["algorithm.clip_high=0.3", "reinforce has no such number", "algorithm.clip_high=null"],
        ),
        (["algorithm.group_filter_args={floor: 1}"], ["algorithm.group_filter=null"]),
    ],
)
def test_a_part_that_does_not_fit_is_refused(
    overrides: list[str], words: list[str], own: str
) -> None:
    with pytest.raises(ConfigErrors) as refused:
        config_of(*(override.replace("OWN", own) for override in overrides))
    assert [word for word in words if word.replace("OWN", own) not in str(refused.value)] == []


def test_no_two_kinds_share_a_key() -> None:
    for one, other in itertools.combinations(KINDS, 2):
        assert one.key != other.key
