"""Commands of other frameworks as recipes of the same meaning, by the table ``port.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.checks.messages import own_arguments
from hybridrl.config.foreign.names import answer_key, foreign_keys
from hybridrl.config.foreign.rules import (
    MOST_STEPS,
    RULES,
    Command,
    UnknownNumber,
    files_of,
    folder_of,
    is_on,
    list_of,
)
from hybridrl.config.foreign.scripts import Typed
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.functions.parts import POLICY_LOSS
from hybridrl.env import CONFIG_ROOT

_NO_NUMBER = "none it should be a number, or one that divides others"

_CONFIGS = CONFIG_ROOT / "hydra_configs"
_GROUPS = {folder.name for folder in _CONFIGS.iterdir() if folder.is_dir()}


@dataclass(slots=True)
class Recipe:
    """Groups and values with the original beside them, and what has no place in a recipe."""

    groups: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    none: list[str] = field(default_factory=list)
    out: list[str] = field(default_factory=list)

    def write(self, text: str, value: str, origin: str) -> None:
        """Enter a text of ``port.yaml`` for a typed value."""
        kind, _, why = text.partition(" ")
        if kind in ("out", "none"):
            (self.out if kind == "out" else self.none).append(f"{origin}: {why}".rstrip(": "))
            return
        for assignment in text.split(" "):
            key, _, word = assignment.removeprefix("+").partition("=")
            meant = _PLACES[word](value) if word in _PLACES else value_of(word)
            if isinstance(meant, str):
                meant = _TYPED.sub(partial(_typed, value=value), meant)
            if key in _GROUPS:
                self.groups[key] = str(meant), origin
            else:
                self.values[key] = meant, origin

    def drop(self, section: str, why: str) -> None:
        """Take back what was written of a section."""
        for key in [key for key in self.values if key.startswith(section)]:
            _, origin = self.values.pop(key)
            if "'s default of " not in origin:
                self.out.append(f"{origin}: {why}")

    def number(self, key: str, default: int) -> int:
        """Return a written number; ``default`` where there is none, or what is written is none."""
        value, _ = self.values.get(key, (default, ""))
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else default

    def text(self, title: str) -> str:
        """Return the YAML of the recipe."""
        lines = ["# @package _global_", *(f"# {line}" for line in title.splitlines()), "defaults:"]
        for group, (name, origin) in self.groups.items():
            lines.append(f"  - override /{group}: {name}  # {_one_line(origin)}")
        tree: dict[str, Any] = {}
        for key, leaf in self.values.items():
            *above, last = key.split(".")
            node = tree
            for part in above:
                node = node.setdefault(part, {})
            node[last] = leaf
        lines += _lines_of(tree)
        for head, notes in (("Without a counterpart:", self.none), ("Left out:", self.out)):
            lines += ["", f"# {head}"] * bool(notes) + [f"#   {_one_line(note)}" for note in notes]
        return "\n".join(lines) + "\n"


def _lines_of(tree: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, node in tree.items():
        if isinstance(node, dict):
            lines += [f"{indent}{key}:", *_lines_of(node, indent + "  ")]
        else:
            value, origin = node
            text = yaml.safe_dump(value, default_flow_style=True, width=MOST_STEPS)
            text = text.removesuffix("...\n").strip()
            lines.append(f"{indent}{key}: {text}  # {_one_line(origin)}")
    return lines


def _one_line(comment: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in comment)


def value_of(text: str) -> Any:  # noqa: ANN401 - of YAML
    """Return a typed value: a number, true or false, a list, or text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        number = float(text)
    except ValueError:
        if text[:1] not in tuple("[{'\"") and text not in ("true", "false"):
            return text
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return list_of(text) if text[0] == "[" and text[-1] == "]" else text
    is_whole = math.isfinite(number) and number == int(number) and "e" not in text.lower()
    return int(number) if is_whole and "." not in text else number


def _typed(place: re.Match[str], *, value: str) -> str:
    """Return a typed value for <V>, and for <KEY> its translation by the values of that key."""
    if place[1] == "V":
        return value
    meanings = foreign_keys().typed.get(place[1])  # none: the text was typed
    translated: str = place[0] if meanings is None else meanings.get(value.lower(), value)
    return translated


_PLACES: Mapping[str, Callable[[str], Any]] = {
    **{"<V>": value_of, "<L>": list_of, "<B>": is_on, "<FOLDER>": folder_of},
    **{f"<{split.upper()}>": partial(files_of, split=split) for split in ("train", "test")},
    "<I>": lambda text: max(0, int(float(text))),
}
_TYPED = re.compile(r"<(\w+)>")
_OUTSIDE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}|\$([A-Z_][A-Z0-9_]*)\b")
_READ_LATER = re.compile(r"\$\{oc\.env:\w+\}")
_OF_SHELL = re.compile(r"\$\(.*|\$\{(?!oc\.)[^}]*\}?|\$\w+")


@cache
def frameworks() -> Mapping[str, Any]:
    """Read ``port.yaml``."""
    return read_yaml(Path(__file__).with_name("port.yaml").read_text(encoding="utf-8"))


def port(framework: str, typed: Sequence[Typed]) -> Recipe:
    """Return the recipe of a command."""
    table = frameworks()[framework]
    recipe, renamed = Recipe(), table.get("renamed", {})
    typed = [replace(one, former=renamed.get(one.name, "")) for one in map(_in_environment, typed)]
    command = Command(framework, typed)
    _write_defaults(table, command, recipe)
    from_json = table.get("config_json", ())
    for one in typed:
        origin = f"{one.key}{one.shown}"
        if one.name in from_json:
            recipe.out.append(f"{origin}: config.json of the model has it")
        elif unknown := _OF_SHELL.search(one.value):
            recipe.none.append(f"{origin}: {unknown[0]} is known to the shell alone; write it")
        else:
            text = _meaning(table, command, one)
            if one.value.lower() in ("null", "none") and not text.startswith(("out", "none")):
                text = "out it is not set"
            try:
                recipe.write(text, one.value, origin)
            except (ValueError, OverflowError):
                recipe.write(_NO_NUMBER, one.value, origin)
    _complete(recipe, framework)
    return recipe


def _write_defaults(table: Mapping[str, Any], command: Command, recipe: Recipe) -> None:
    for key, text in table["defaults"].items():
        if not command.get(key):
            name, _, argument = text.removeprefix("rule ").partition(" ")
            is_rule = text.startswith("rule ")
            meant = _by_rule(name, command, argument) if is_rule else text
            if not meant.startswith("out"):
                recipe.write(meant, argument, f"{command.framework}'s default of {key}")


def _by_rule(name: str, command: Command, value: str) -> str:
    try:
        return RULES[name](command, value)
    except UnknownNumber as error:
        return f"none {error}"
    except (ValueError, ArithmeticError):
        return _NO_NUMBER


def _in_environment(one: Typed) -> Typed:
    """Let OmegaConf read variables that the script expects from outside, where the recipe runs."""
    value = one.value.replace("$(pwd)", "$PWD")
    value = _OUTSIDE.sub(lambda m: f"${{oc.env:{m[1] or m[2]}}}", value)
    is_all = _READ_LATER.fullmatch(value)  # it may be a number
    return replace(one, value=f"${{oc.decode:{value}}}" if is_all else value)


def _meaning(table: Mapping[str, Any], command: Command, one: Typed) -> str:
    parts = one.name.split(".")
    for first in range(len(parts)):
        key = ".".join(parts[first:])
        if key in table["names"]:
            return _by_name(table["names"][key], command, one.value)
        for above, text in table.get("below", {}).items():
            if key.startswith(above):
                return _unless_refused(text.replace("<NAME>", key.removeprefix(above)))
    return _by_answer(answer_key(one.name, one.value), one.value)


def _by_name(text: str | Mapping[str, str], command: Command, value: str) -> str:
    if not isinstance(text, str):  # by typed value
        return text.get(value.lower(), text["else"])
    if text.startswith("rule "):
        return _by_rule(text.removeprefix("rule "), command, value)
    is_flag = not text.startswith(("out", "none")) and "<" not in text
    return "out it is off" if is_flag and value.lower() == "false" else text


def _by_answer(answer: str, value: str) -> str:
    """Return a text for the line to type that ``foreign.yaml`` has for a key."""
    match = re.fullmatch(r"set ((?:[\w.]+=[^ ,;]+ ?)+)", answer)
    if match and not re.search(r"=\[?(VALUE|NAME|FOLDER|FILE)", answer):
        is_off = value.lower() == "false" and "false" not in answer.lower()
        return "out it is off" if is_off else match[1].strip()
    if answer.startswith("leave it out"):
        return "out" + answer.removeprefix("leave it out").replace(":", "")
    is_known = answer and not answer.startswith("its keys are in")
    return f"none {answer if is_known else 'no key of hybridrl means this'}"


def _unless_refused(text: str) -> str:
    """Return why an argument of another program is refused, if it is; else the text."""
    section, _, name = text.removeprefix("+").partition("=")[0].rpartition(".")
    if not section.endswith("_args"):
        return text
    kind, why = own_arguments(section).get(name, ("", ""))
    if kind == "typed":
        return f"none set {why}"
    return f"none it cannot be chosen: {why}" if kind else text


def _complete(recipe: Recipe, framework: str) -> None:
    """Write what follows from several keys together."""
    values = recipe.values
    counts = ("algorithm.num_minibatches", "algorithm.num_epochs")
    num_updates = math.prod(recipe.number(key, 1) for key in counts)
    charges_kl = values.get("algorithm.kl.placement", ("", ""))[0] == "reward"
    _leave_uncorrected(values)
    if num_updates > 1 or "algorithm.rollout_correction" in values or charges_kl:
        values.setdefault(
            "algorithm.old_logprobs", ("recompute", "as there, once before the updates")
        )
    _complete_optimizers(recipe, num_updates, counts_steps=framework == "verl")
    _complete_loss(recipe)
    if recipe.groups.get("actor", ("", ""))[0] == "megatron":
        recipe.drop("actor.fsdp2.", "it is of FSDP2")
    if recipe.groups.get("algorithm", ("", ""))[0] != "ppo":
        recipe.drop("critic.", "the algorithm has no critic")
    schedule, origin = values.get("actor.optimizer.schedule", ("constant", ""))
    if schedule != "constant" and recipe.number("trainer.num_steps", 0) == MOST_STEPS:
        recipe.none.append(
            f"{origin}: a {schedule} schedule ends with trainer.num_steps; set that to rows x "
            "epochs / prompts of a step"
        )
    longest = recipe.number("data.max_prompt_tokens", 512)
    longest += recipe.number("rollout.max_response_tokens", 512)
    key = "actor.max_tokens_per_microbatch"
    if recipe.number(key, longest) < longest:
        origin = f"{values[key][1]}; a prompt and a response of full length fit"
        values[key] = longest, origin


def _leave_uncorrected(values: dict[str, tuple[Any, str]]) -> None:
    """Say that tokens of earlier weights are trained as they are, where a command says nothing."""
    is_sampler = values.get("algorithm.old_logprobs", ("", ""))[0] == "sampler"
    is_corrected = is_sampler or "algorithm.rollout_correction" in values
    if "trainer.max_staleness" in values and not is_corrected:
        origin = "as there, uncorrected"
        values["algorithm.rollout_correction"] = "importance", origin
        values["algorithm.rollout_correction_args.level"] = "none", origin


def _complete_optimizers(recipe: Recipe, num_updates: int, *, counts_steps: bool) -> None:
    """Convert a warm-up of steps to updates, and give the critic the numbers of the policy."""
    values = recipe.values
    warmup, origin = values.get("actor.optimizer.num_warmup_steps", (0, ""))
    if counts_steps and isinstance(warmup, int) and warmup and num_updates > 1:
        origin += f", of {num_updates} updates each"
        values["actor.optimizer.num_warmup_steps"] = warmup * num_updates, origin
    if recipe.groups.get("algorithm", ("", ""))[0] == "ppo":
        same = {f"algorithm.num_{name}": f"critic.num_{name}" for name in ("minibatches", "epochs")}
        for name, own in {**same, "actor.optimizer.lr": "critic.optimizer.lr"}.items():
            if name in values:
                values.setdefault(own, values[name])


def _complete_loss(recipe: Recipe) -> None:
    """Leave out numbers that the policy loss does not have."""
    group = recipe.groups.get("algorithm", ("grpo", ""))[0]
    file = _CONFIGS / "algorithm" / f"{group}.yaml"
    usual = read_yaml(file.read_text(encoding="utf-8")) if file.is_file() else {}
    name = str(usual.get("policy_loss", "ppo_clip"))
    name = recipe.values.get("algorithm.policy_loss", (name, ""))[0]
    numbers = POLICY_LOSS.read(name).numbers
    low, origin = recipe.values.get("algorithm.clip_low", (0, ""))
    if name == "cispo" and isinstance(low, int | float) and low > 1:
        recipe.values["algorithm.clip_low"] = 1.0, f"{origin}, below ratios of 0"
    for key in ("clip_low", "clip_high", "policy_loss_args.dual_clip"):
        if key.rpartition(".")[2] not in numbers:
            recipe.drop(f"algorithm.{key}", f"{name} has no such number")
