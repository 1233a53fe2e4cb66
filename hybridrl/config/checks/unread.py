"""Keys that would be ignored: a table of what a run reads under which condition, and one rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

from hybridrl.config.checks.messages import error, value_at
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml, to_override
from hybridrl.errors import ConfigError, instruction
from hybridrl.models.architecture import find_architecture

REWARDS = ("rewards_B", "rewards_BL", "reward_parts_BK")
"""Inputs of an advantage that are less the charges."""

_TERM = re.compile(r"([\w.]+)(=|!=| has )(.*)")
_OWN_MODEL = re.compile(r"serving\.models\.[^.]+")


def _sees(config: ExperimentConfig) -> bool:
    model = find_architecture(config.model)
    return model is None or model.tower is not None


def _has_experts(config: ExperimentConfig) -> bool:
    model = find_architecture(config.model)
    return model is None or model.experts is not None


def _ranks_share_engines(config: ExperimentConfig) -> bool:
    serving, size = config.serving, config.rollout.tensor_parallel_size
    led = [group for group in serving.placed_groups if config.is_on_trainer(group)]
    sizes = [group.config.devices_per_engine for group in led if group.model == serving.policy]
    return not serving.models or size in sizes


_FACTS: Mapping[str, Callable[[ExperimentConfig], bool]] = {
    "the model has experts": _has_experts,
    "the model sees": _sees,
    "ranks share engines": _ranks_share_engines,
    "the policy has engines of its own": lambda config: config.topology.has_others,
    "the advantage reads rewards": lambda config: config.algorithm.advantage_reads(*REWARDS),
    "there is a teacher": lambda config: config.algorithm.has_teacher,
}


@cache
def unread_keys() -> Mapping[str, list[dict[str, Any]]]:
    """Return the rows of ``unread.yaml`` by group of rules."""
    table = read_yaml(Path(__file__).with_name("unread.yaml").read_text(encoding="utf-8"))
    return cast("dict[str, list[dict[str, Any]]]", table)


def check_unread_keys(config: ExperimentConfig, group: str) -> Iterator[ConfigError]:
    """A key that differs from its default has an effect."""
    reported: list[str] = []
    for row in unread_keys().get(group, ()):
        for key, usual in _defaults(config, row):
            value = _value_at(config, key, usual)
            if value == usual or key.startswith(tuple(reported)):
                continue
            conditions = [row["if"]] if isinstance(row["if"], str) else row["if"]
            if own_model := _OWN_MODEL.match(key):
                conditions = [c.replace("serving.models.*", own_model[0]) for c in conditions]
            broken = [c for c in conditions if not any(_holds(config, t) for t in c.split(" or "))]
            if broken:
                reported.append(key)
                yield _error(config, key, value, usual, row, broken)


def _defaults(config: ExperimentConfig, row: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for section in row.get("sections", ()):
        defaults: Any = type(value_at(config, section))()
        yield from ((f"{section}.{name}", value) for name, value in asdict(defaults).items())
    for pattern, usual in row.get("keys", {}).items():
        yield from ((key, usual) for key in _matching(config, pattern))


def _value_at(config: ExperimentConfig, key: str, usual: object) -> object:
    try:
        value = value_at(config, key)
    except KeyError:  # an argument that is not given
        return usual
    return list(value) if isinstance(value, tuple) else value


def _matching(config: ExperimentConfig, pattern: str) -> Iterator[str]:
    above, star, below = pattern.partition(".*.")
    if not star:
        yield pattern
        return
    for name in cast("Mapping[str, object]", value_at(config, above)):
        yield from _matching(config, f"{above}.{name}.{below}")


def _holds(config: ExperimentConfig, term: str) -> bool:
    if term in _FACTS:
        return _FACTS[term](config)
    key, operator, wanted = cast("re.Match[str]", _TERM.fullmatch(term)).groups()
    value = value_at(config, key)
    if operator == " has ":
        return wanted in cast("tuple[str, ...]", value)
    return (to_override(value) == wanted) == (operator == "=")


def _error(
    config: ExperimentConfig,
    key: str,
    value: object,
    usual: object,
    row: Mapping[str, Any],
    broken: list[str],
) -> ConfigError:
    keys = [condition.partition("=")[0].rstrip("!") for condition in broken]
    why = row.get("why") or " and ".join(f"{k}={to_override(value_at(config, k))}" for k in keys)
    why = re.sub(r"\{([\w.]+)\}", lambda place: str(value_at(config, place[1])), why)
    is_argument = "_args." in key
    # Entries of a mapping are deleted one by one: ``key={}`` is merged, and changes nothing.
    if isinstance(value, Mapping):
        overrides = [f"~{key}.{name}" for name in value]
    else:
        overrides = [f"~{key}" if is_argument else f"{key}={to_override(usual)}"]
    fix = instruction(overrides) + (f", or {row['or']}" if "or" in row else "")
    rule = f"would be ignored, because {why}"
    return error(config, key, rule, " ".join(overrides), fix=fix, got=value)
