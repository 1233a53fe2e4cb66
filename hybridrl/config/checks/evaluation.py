"""Rules about evaluation sets, and about the metric by which the best checkpoints are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridrl.config.eval import EvalSet, split_checkpoint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import flaw_of_file
from hybridrl.config.rollout import COLDEST
from hybridrl.errors import ConfigError, suggest_name

_WORDS_OF_METRICS = ("reward", "length", "agent")


def check_eval_has_data(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Evaluation on files needs files."""
    data = config.data
    if data.task is not None or data.eval_files:
        return
    empty = [one for one in config.eval.all_sets() if not one.files]
    if not config.evaluates or not empty or config.mode == "plan":
        return
    also = f" (and {empty[0].key}.files)" if empty[0].name else ""
    is_mode_eval = config.mode == "eval"
    yield ConfigError(
        "data.eval_files" if is_mode_eval else "eval.every_num_steps",
        [] if is_mode_eval else config.eval.every_num_steps,
        f"there is nothing to evaluate on: data.eval_files is empty{also}",
        remedies=() if is_mode_eval else [("eval.every_num_steps=0",)],
        fix="set data.eval_files=[FILE.jsonl]"
        + ("" if is_mode_eval else ", or eval.every_num_steps=0"),
    )


def check_eval_temperature(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Logits are divided by the temperature: near 0 they overflow."""
    for one in config.eval.all_sets():
        key, temperature = f"{one.key}.temperature", one.temperature
        if 0 < temperature < COLDEST:
            yield ConfigError(
                key,
                temperature,
                f"must be 0 (greedy decoding) or at least {COLDEST}",
                remedies=[_setting(one, "temperature", 0), _setting(one, "temperature", COLDEST)],
            )


def check_eval_k(config: ExperimentConfig) -> Iterator[ConfigError]:
    """pass@k and majority@k need k responses to each prompt, and these must be sampled."""
    for one in config.eval.all_sets():
        for name, numbers in (
            ("pass_at_k", one.pass_at_k),
            ("majority_at_k", one.majority_at_k),
        ):
            largest = max(numbers, default=1)
            fewer = [k for k in numbers if k <= one.num_responses_per_prompt]
            if largest > one.num_responses_per_prompt:
                yield ConfigError(
                    f"{one.key}.{name}",
                    list(numbers),
                    f"k={largest} is above eval.num_responses_per_prompt="
                    f"{one.num_responses_per_prompt}, the responses to each prompt of the set",
                    remedies=[_setting(one, name, fewer)],
                    fix=f"set {one.key}.num_responses_per_prompt={largest} or more",
                )
            elif largest > 1 and one.temperature == 0:
                yield ConfigError(
                    f"{one.key}.{name}",
                    list(numbers),
                    "greedy decoding (eval.temperature=0) gives k equal responses",
                    remedies=[_setting(one, "temperature", 1.0), _setting(one, name, [])],
                )


def check_eval_names(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A set is not named as a word of the metrics that stand beside its own."""
    for name in config.eval.sets:
        if name in _WORDS_OF_METRICS:
            yield ConfigError(
                f"eval.sets.{name}",
                "...",
                f"metrics have this word after eval/, as in eval/{name}/..., so no set can",
                fix="give the set another name",
            )


def check_eval_checkpoint(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A checkpoint brings its own model, with its adapter merged."""
    key, name = "eval.checkpoint", config.eval.checkpoint
    if name is None:
        return
    folder, _ = split_checkpoint(name)
    if flaw := flaw_of_file(folder / "config.yaml"):
        rule = f"it is no run folder, nor RUN_FOLDER/checkpoints/step-N: its config.yaml {flaw}"
        yield ConfigError(key, name, rule, fix="set model.path=FOLDER to evaluate a model folder")
    if config.model.path is not None:
        rule = "would be ignored: the model is that of the checkpoint"
        remedies = [("model.path=null",)]
        yield ConfigError("model.path", config.model.path, rule, remedies=remedies)
    if config.lora.enabled:
        rule = "the checkpoint's own adapter, if it has one, is merged into its weights"
        remedies = [("lora.enabled=false",)]
        yield ConfigError("lora.enabled", config.lora.enabled, rule, remedies=remedies)


def check_best_metric(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The metric that judges checkpoints is one that this run measures."""
    key, metric = "checkpoint.best_metric", config.checkpoint.best_metric
    if metric is None:
        return
    known = list(_measured(config))
    patterns = [re.escape(name).replace(r"\*", "[^/]+") for name in known]
    if not any(re.fullmatch(pattern, metric) for pattern in patterns):
        yield ConfigError(
            key,
            metric,
            "this run does not measure it; see eval.pass_at_k, eval.majority_at_k, eval.sets",
            fix=f"{suggest_name(metric, known)} (* is the name of a data source)",
            remedies=[(f"{key}=null",)],
        )


def _measured(config: ExperimentConfig) -> Iterator[str]:
    """Yield the names of metrics that can judge a checkpoint; ``*`` is any source."""
    if config.offline is not None:
        yield from _MEASURED_OFFLINE[config.mode]
        return
    yield "reward/mean"
    if not config.eval.every_num_steps:
        return
    yield "eval/reward/mean"
    for one in config.eval.all_sets():
        prefix = f"eval/{one.name}/" if one.name else "eval/"
        yield from (f"{prefix}reward/*", f"{prefix}truncated_fraction")
        yield f"{prefix}length/response_tokens/mean"
        names = ["reward/mean", *(f"pass_at_{k}" for k in one.pass_at_k)]
        for name in (*names, *(f"majority_at_{k}" for k in one.majority_at_k)):
            yield from (f"{prefix}{name}", f"{prefix}{name}/low")


_MEASURED_OF_PAIRS = (
    *("preference/accuracy", "loss/preference", "eval/accuracy", "eval/preference_loss"),
)
_MEASURED_OFFLINE = {
    "sft": ("loss/supervised_nats", "eval/loss_nats"),
    "dpo": _MEASURED_OF_PAIRS,
    "reward_model": _MEASURED_OF_PAIRS,
}
"""Metrics that can judge a checkpoint, by mode that learns from a data set."""


def _setting(one: EvalSet, name: str, value: object) -> tuple[str, ...]:
    """Return the override of one key of a set; a named set may lack it, which takes a plus."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else f"{value}"
    return (f"{'++' if one.name else ''}{one.key}.{name}={text}",)


RULES = (check_eval_has_data, check_eval_temperature, check_eval_k, check_eval_names)
