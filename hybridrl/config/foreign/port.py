"""Commands of other frameworks as recipes of the same meaning; ``port.yaml`` says what keys mean.

A rule is a function of the command and a typed value. Like the texts of ``port.yaml`` it gives what
to write: assignments, ``out WHY`` where nothing need be written, ``none WHY`` where nothing can be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.checks.data import SUFFIXES as FILES
from hybridrl.config.foreign.names import answer_key, foreign_keys
from hybridrl.config.foreign.scripts import Typed
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.trainer import TRACKER_MODULES

Rule = Callable[["Command", str], str]

_MOST = 10**9
_NO_NUMBER = "none it should be a number, or one that divides others"
_MATHS = ("math", "dapo", "aime", "deepscaler", "numina", "orz")
_GROUPS = ("algorithm", "rollout", "actor", "critic", "data", "model", "cluster", "reward", "lora")


@dataclass(frozen=True, slots=True)
class Command:
    """All that the user typed, by the names of the framework."""

    framework: str
    typed: Sequence[Typed]

    def get(self, *names: str, default: str = "") -> str:
        """Return the typed value of the first of these keys, named by their last words."""
        for name in names:
            for one in self.typed:
                if one.name == name or one.name.endswith("." + name):
                    return one.value
        return default

    def number(self, *names: str, default: float = 0) -> float:
        """Return a typed number; ``default`` where it is not typed, or is no number."""
        try:
            return float(self.get(*names))
        except ValueError:
            return default

    @property
    def num_row_tokens(self) -> int:
        """Prompt and response of full length."""
        prompt = self.number("max_prompt_length", "prompt_max_len", default=512)
        names = ("max_response_length", "generate_max_len", "max_completion_length")
        return int(prompt + self.number(*names, default=512))

    @property
    def num_samples(self) -> float:
        """Responses to a prompt."""
        names = ("n_samples_per_prompt", "num_generations", "rollout.n")
        return self.number(*names, default=8 if self.framework == "trl" else 1)


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
            text = yaml.safe_dump(value, default_flow_style=True, width=_MOST)
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


def list_of(text: str) -> list[str]:
    """Return the entries of ``a``, ``a,b``, ``a b`` or ``['a','b']``."""
    words = (word.strip("'\"") for word in re.split(r"[\s,]+", text.strip("[]()")))
    return [word for word in words if word]


def _count_of(text: str) -> int:
    return max(0, int(float(text)))


def _is_on(value: str) -> bool:
    return value.lower() not in ("", "false", "0", "0.0", "0.00")


def _typed(place: re.Match[str], *, value: str) -> str:
    """Return a typed value for <V>, and for <KEY> its translation by the values of that key."""
    if place[1] == "V":
        return value
    meanings = foreign_keys().typed.get(place[1])  # none: the text was typed
    translated: str = place[0] if meanings is None else meanings.get(value.lower(), value)
    return translated


_PLACES = {"<V>": value_of, "<L>": list_of, "<I>": _count_of, "<B>": _is_on}
_TYPED = re.compile(r"<(\w+)>")
_OUTSIDE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}|\$([A-Z_][A-Z0-9_]*)\b")
_READ_LATER = re.compile(r"\$\{oc\.env:\w+\}")
_IN_RECIPE = re.compile(r"\$\{oc\.decode:\$\{oc\.env:\w+\}\}|\$\{oc\.env:\w+\}")


@cache
def frameworks() -> Mapping[str, Any]:
    """Read ``port.yaml``."""
    return read_yaml(Path(__file__).with_name("port.yaml").read_text(encoding="utf-8"))


def port(framework: str, typed: Sequence[Typed]) -> Recipe:
    """Return the recipe of a command."""
    table, recipe = frameworks()[framework], Recipe()
    renamed = table.get("renamed", {})
    typed = [replace(one, former=renamed.get(one.name, "")) for one in map(_in_environment, typed)]
    command = Command(framework, typed)
    for key, text in table["defaults"].items():
        if not command.get(key):
            name, _, argument = text.removeprefix("rule ").partition(" ")
            is_rule = text.startswith("rule ")
            meant = _by_rule(name, command, argument) if is_rule else text
            recipe.write(meant, argument, f"{framework}'s default of {key}")
    from_json = table.get("config_json", ())
    for one in typed:
        origin = f"{one.key}{one.shown}"
        if one.name in from_json:
            recipe.out.append(f"{origin}: config.json of the model has it")
        elif unknown := re.search(r"\$\(.*|\$\{?\w+[}\W]|\$\w+$", _IN_RECIPE.sub("", one.value)):
            recipe.none.append(f"{origin}: {unknown[0]} is known to the shell alone; write it")
        else:
            text = _meaning(table, command, one)
            if one.value.lower() in ("null", "none") and not text.startswith(("out", "none")):
                text = "out it is not set"
            try:
                recipe.write(text, one.value, origin)
            except (ValueError, OverflowError):
                recipe.write(_NO_NUMBER, one.value, origin)
    _complete(recipe)
    return recipe


def _by_rule(name: str, command: Command, value: str) -> str:
    try:
        return RULES[name](command, value)
    except (ValueError, ArithmeticError):
        return _NO_NUMBER


def _in_environment(one: Typed) -> Typed:
    """Let OmegaConf read variables that the script expects from outside, where the recipe runs."""
    value = one.value.replace("$(pwd)", "$PWD")
    value = _OUTSIDE.sub(lambda m: f"${{oc.env:{m[1] or m[2]}}}", value)
    is_all = _READ_LATER.fullmatch(value)  # it may be a number
    return replace(one, value=f"${{oc.decode:{value}}}" if is_all else value)


def _meaning(table: Mapping[str, Any], command: Command, one: Typed) -> str:
    names, parts = table["names"], one.name.split(".")
    for first in range(len(parts)):
        text = names.get(".".join(parts[first:]))
        if isinstance(text, dict):  # by typed value
            text = text.get(one.value.lower(), text["else"])
        if text is not None:
            name = text.removeprefix("rule ")
            return text if name == text else _by_rule(name, command, one.value)
    for above, text in table.get("below", {}).items():
        _, found, rest = f".{one.name}".partition(f".{above}")
        if found:
            return str(text).replace("<NAME>", rest)
    answer = answer_key(one.name, one.value)
    match = re.fullmatch(r"set ((?:[\w.]+=[^ ,;]+ ?)+)", answer)
    if match and not re.search(r"=\[?(VALUE|NAME|FOLDER|FILE)", answer):
        return match[1].strip()
    if answer.startswith("leave it out"):
        return "out" + answer.removeprefix("leave it out").replace(":", "")
    return f"none {answer or 'no key of hybridrl means this'}"


def _complete(recipe: Recipe) -> None:
    """Write what follows from several keys together."""
    values = recipe.values
    counts = ("algorithm.num_minibatches", "algorithm.num_epochs")
    num_updates = math.prod(recipe.number(key, 1) for key in counts)
    charges_kl = values.get("algorithm.kl.placement", ("", ""))[0] == "reward"
    if num_updates > 1 or "algorithm.rollout_correction" in values or charges_kl:
        values["algorithm.old_logprobs"] = "recompute", "as there, once before the updates"
    if recipe.groups.get("actor", ("", ""))[0] == "megatron":
        recipe.drop("actor.fsdp2.", "it is of FSDP2")
    if recipe.groups.get("algorithm", ("", ""))[0] != "ppo":
        recipe.drop("critic.", "the algorithm has no critic")
    schedule, origin = values.get("actor.optimizer.schedule", ("constant", ""))
    if schedule != "constant" and recipe.number("trainer.num_steps", 0) == _MOST:
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


# -- rules ---------------------------------------------------------------------------------------


def _share(total: float, part: str, key: str) -> str:
    count = total / float(part)
    if count < 1 or count != int(count):
        return f"none {key} counts parts of a rollout, and {total:g} / {part} does not divide"
    return f"{key}={int(count)}"


def _rule_minibatches_of_prompts(command: Command, value: str) -> str:
    prompts = command.number("train_batch_size", default=1024)
    return _share(prompts, value, "algorithm.num_minibatches")


def _rule_minibatches_of_critic(command: Command, value: str) -> str:
    prompts = command.number("train_batch_size", default=1024)
    return _share(prompts, value, "critic.num_minibatches")


def _rule_minibatches_of_responses(command: Command, value: str) -> str:
    prompts = command.number("rollout_batch_size", default=1024)
    return _share(prompts * command.num_samples, value, "algorithm.num_minibatches")


def _rule_tokens_of_rows(command: Command, value: str) -> str:
    if command.get("use_dynamic_bsz").lower() == "true":
        return "out micro-batches are packed by tokens"
    return f"actor.max_tokens_per_microbatch={int(float(value)) * command.num_row_tokens}"


def _rule_tokens_of_ranks(command: Command, value: str) -> str:
    names = ("context_parallel_size", "actor.ulysses_sequence_parallel_size")
    ranks = command.number(*names, default=1)
    return f"actor.max_tokens_per_microbatch={int(float(value) * ranks)}"


def _rule_overlong(command: Command, value: str) -> str:
    if command.get("filter_overlong_prompts").lower() == "true":
        return "data.overlong_prompts=drop"
    cut = command.get("data.truncation", default="error")
    known = {"error": "error", "left": "keep_end"}
    return f"data.overlong_prompts={known[cut]}" if cut in known else f"none no cut at the {cut}"


def _rule_verl_rows(command: Command, value: str) -> str:
    return f"{_rule_train_files(command, value)} {_reward_of(command, value)}".strip()


def _rule_train_files(command: Command, value: str) -> str:
    return f"data.train_files={_files_of(value, 'train')}"


def _rule_eval_files(command: Command, value: str) -> str:
    return f"data.eval_files={_files_of(value, 'test')}"


def _files_of(value: str, split: str) -> str:
    """Return a list of files; of a dataset of the hub the one to save it in."""
    files = (
        each if Path(each).suffix in FILES else f"data/{each.rpartition('/')[2]}/{split}.parquet"
        for each in list_of(value)
    )
    return f"[{','.join(files)}]"


def _gae(number: str) -> Rule:
    def rule(command: Command, value: str) -> str:
        estimator = command.get("adv_estimator", "advantage_estimator", default="gae")
        if estimator != "gae":
            return f"out {estimator} has no such number"
        return f"algorithm.advantage_args.{number}={value}"

    return rule


def _reward_of(command: Command, files: str) -> str:
    """Return the reward of verl by data source, as far as file names say it."""
    own = command.get("custom_reward_function.path")
    if own:
        name = command.get("custom_reward_function.name", default="compute_score")
        return f"reward.function={own}:{name}"
    if "gsm8k" in files.lower():  # the last number of the response
        return "reward.function=numeric"
    return "reward=math" if any(word in files.lower() for word in _MATHS) else ""


def _rule_rm_type(command: Command, value: str) -> str:
    return "reward=math" if value in _MATHS else f"none reward.function=FILE.py:NAME for {value}"


def _rule_estimator(command: Command, value: str) -> str:
    names = foreign_keys().typed["adv_estimator"]
    name = names.get(value)
    return f"algorithm={name}" if name else f"none there is no estimator {value} here"


def _kl(command: Command, placement: str, coefficient: str) -> str:
    if not _is_on(coefficient):
        return "out no KL penalty"
    return f"algorithm.kl.placement={placement} algorithm.kl.coefficient={coefficient}"


def _rule_kl_in_loss(command: Command, value: str) -> str:
    if not _is_on(command.get("use_kl_loss")):
        return "out no KL penalty in the loss"
    coefficient = "0.001" if command.framework == "verl" else "0"
    return _kl(command, "loss", command.get("kl_loss_coef", default=coefficient))


def _rule_kl_in_reward(command: Command, value: str) -> str:
    if command.framework == "verl" and not _is_on(command.get("use_kl_in_reward")):
        return "out no KL penalty in rewards"
    return _kl(command, "reward", command.get("kl_ctrl.kl_coef", "kl_coef", default="0.001"))


def _rule_kl_openrlhf(command: Command, value: str) -> str:
    placement = "loss" if _is_on(command.get("use_kl_loss")) else "reward"
    return _kl(command, placement, command.get("init_kl_coef", default="0.01"))


def _rule_kl_type(command: Command, value: str) -> str:
    coefficient = command.get("kl_loss_coef", "init_kl_coef", default="1")
    if not _is_on(coefficient):
        return "out no KL penalty"
    name = foreign_keys().typed["kl_loss_type"].get(value, value)
    return f"algorithm.kl.estimator={name}"


def _rule_trl_beta(command: Command, value: str) -> str:
    return _kl(command, "loss", value)


def _rule_group_filter(command: Command, value: str) -> str:
    if not _is_on(value):
        return "out groups are not filtered"
    rounds = int(command.number("max_num_gen_batches")) or 100
    return f"algorithm.group_filter=zero_variance algorithm.max_sampling_rounds={rounds}"


def _rule_model(command: Command, value: str) -> str:
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not Path(value).exists()
    path = f"models/{value.rpartition('/')[2]}" if is_on_hub else value
    return f"model=hf_folder model.path={path}"


def _rule_trl_loss(command: Command, value: str) -> str:
    meant = foreign_keys().typed["loss_type"].get(value, "")
    if meant.startswith("set "):
        return meant.removeprefix("set ")
    return f"algorithm.loss_aggregation={meant}" if meant else f"none no loss is called {value}"


def _rule_trackers(command: Command, value: str) -> str:
    known = [name for name in list_of(value) if name in TRACKER_MODULES]
    return f"tracking.trackers=[{','.join(dict.fromkeys(['tensorboard', *known]))}]"


def _rule_epochs(command: Command, value: str) -> str:
    steps = command.number("total_training_steps", "num_rollout", "max_steps", default=0)
    if steps > 0:
        return f"trainer.num_epochs={value}"
    return f"trainer.num_steps={_MOST} trainer.num_epochs={value}"


def _rule_slime_eval(command: Command, value: str) -> str:
    pairs = re.findall(r"([A-Za-z][\w-]*)\s+(\S+)", value)
    sets = " ".join(f"eval.sets.{name}.files=[{file}]" for name, file in pairs)
    return sets or "none it should be NAME FILE"


def _rule_eps_clip(command: Command, value: str) -> str:
    has_high = command.get("eps_clip_high", "epsilon_high")
    return f"algorithm.clip_low={value}" + (f" algorithm.clip_high={value}" * (not has_high))


def _rule_own_reward(command: Command, value: str) -> str:
    """Return the file of a function in a module; mode=check names the line that calls it."""
    module, _, name = value.rpartition(".")
    return f"reward.function={module.replace('.', '/')}.py:{name}"


def _rule_clips(command: Command, value: str) -> str:
    low, high = (float(word) for word in value.split())
    return f"algorithm.clip_low={low} algorithm.clip_high={high}"


def _rule_betas(command: Command, value: str) -> str:
    first, second = (float(word) for word in value.split())
    return f"actor.optimizer.beta1={first} actor.optimizer.beta2={second}"


def _rule_max_len(command: Command, value: str) -> str:
    response = command.number("generate_max_len")
    if not response:
        return "none data.max_prompt_tokens and rollout.max_response_tokens share it; set both"
    return f"data.max_prompt_tokens={int(float(value) - response)}"


def _rule_trl_batches(command: Command, value: str) -> str:
    per_device = command.number("per_device_train_batch_size", default=8)
    world = command.number("num_processes", default=1)
    accumulated = command.number("gradient_accumulation_steps", default=1)
    steps = command.number("steps_per_generation", default=accumulated)
    rows = command.number("generation_batch_size", default=per_device * world * steps)
    update = per_device * world * accumulated
    tokens = int(per_device) * command.num_row_tokens
    return (
        f"{_share(rows, str(command.num_samples), 'trainer.num_prompts_per_step')} "
        f"{_share(rows, str(min(rows, update)), 'algorithm.num_minibatches')} "
        f"cluster.num_ranks_per_node={int(world)} actor.max_tokens_per_microbatch={tokens}"
    )


def _rule_remote_reward(command: Command, value: str) -> str:
    if value.endswith(".py"):
        return f"none reward.function={value}:NAME, a function of responses and answers"
    return f"reward.function=http reward.args.url={value}"


_rule_gamma = _gae("gamma")
_rule_lam = _gae("lam")

RULES: Mapping[str, Rule] = {
    name.removeprefix("_rule_"): rule
    for name, rule in globals().items()
    if name.startswith("_rule_")
}
"""By the name in ``port.yaml``."""
