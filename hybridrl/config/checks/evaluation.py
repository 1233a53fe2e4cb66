"""Rules about evaluation sets, and about the metric by which the best checkpoints are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridrl.config.checks.messages import error
from hybridrl.config.eval import EvalSet, split_checkpoint
from hybridrl.config.experiment import PAIR_MODES, ExperimentConfig
from hybridrl.config.functions.paths import flaw_of_file
from hybridrl.config.rollout import COLDEST
from hybridrl.errors import ConfigError, suggest_name


def check_eval_has_data(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Evaluation on files needs files."""
    empty = [one for one in config.eval.all_sets() if not one.files]
    if config.data.task is not None or config.data.eval_files or not empty:
        return
    if not config.evaluates or config.mode == "plan":
        return
    also = f" (and {empty[0].key}.files)" if empty[0].name else ""
    rule = f"there is nothing to evaluate on: data.eval_files is empty{also}"
    fix = "set data.eval_files=[FILE.jsonl]"
    if config.mode == "eval":
        yield error(config, "data.eval_files", rule, fix=fix)
    else:
        off = "eval.every_num_steps=0"
        yield error(config, "eval.every_num_steps", rule, off, fix=f"{fix}, or {off}")


def check_eval_sets(config: ExperimentConfig) -> Iterator[ConfigError]:
    """pass@k and majority@k need k responses, which are sampled; names of metrics are not taken."""
    for name in {*config.eval.sets} & {"reward", "length", "agent"}:
        rule = f"metrics have this word after eval/, as in eval/{name}/..., so no set can"
        fix = "give the set another name"
        yield error(config, f"eval.sets.{name}", rule, fix=fix, got="...")
    for one in config.eval.all_sets():
        key, temperature = f"{one.key}.temperature", one.temperature
        if 0 < temperature < COLDEST:  # logits are divided by it and would overflow
            rule = f"must be 0 (greedy decoding) or at least {COLDEST}"
            remedies = (_override(one, "temperature", 0), _override(one, "temperature", COLDEST))
            yield error(config, key, rule, *remedies, got=temperature)
        numbers, num_responses = one.pass_at_k, one.num_responses_per_prompt
        key, largest = f"{one.key}.pass_at_k", max(numbers, default=1)
        if largest > num_responses:
            rule = (
                f"k={largest} is above eval.num_responses_per_prompt={num_responses}, the "
                "responses to each prompt of the set"
            )
            fewer = _override(one, "pass_at_k", [k for k in numbers if k <= num_responses])
            fix = f"set {one.key}.num_responses_per_prompt={largest} or more"
            yield error(config, key, rule, fewer, fix=fix, got=numbers)
        elif largest > 1 and temperature == 0:
            rule = "greedy decoding (eval.temperature=0) gives k equal responses"
            remedies = (_override(one, "temperature", 1.0), _override(one, "pass_at_k", []))
            yield error(config, key, rule, *remedies, got=numbers)


def _override(one: EvalSet, name: str, value: object) -> str:
    """Return the override of one key of a set; a named set may lack it, which takes a plus."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else f"{value}"
    return f"{'++' if one.name else ''}{one.key}.{name}={text}"


def check_eval_checkpoint(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A checkpoint is one of a run folder, or the newest of it."""
    key, name = "eval.checkpoint", config.eval.checkpoint
    if name is None:
        return
    folder, _ = split_checkpoint(name)
    if flaw := flaw_of_file(folder / "config.yaml"):
        rule = f"it is no run folder, nor RUN_FOLDER/checkpoints/step-N: its config.yaml {flaw}"
        yield error(config, key, rule, fix="set model.path=FOLDER to evaluate a model folder")


def check_best_metric(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The metric that judges checkpoints is one that this run measures."""
    key, metric = "checkpoint.best_metric", config.checkpoint.best_metric
    if metric is None:
        return
    known = list(_measured(config))
    patterns = [re.escape(name).replace(r"\*", "[^/]+") for name in known]
    if not any(re.fullmatch(pattern, metric) for pattern in patterns):
        rule = "this run does not measure it; see eval.pass_at_k, eval.sets"
        fix = f"{suggest_name(metric, known)} (* is the name of a data source)"
        yield error(config, key, rule, f"{key}=null", fix=fix)


def _measured(config: ExperimentConfig) -> Iterator[str]:
    """Yield the names of metrics that can judge a checkpoint; ``*`` is any source."""
    if config.mode == "sft":
        yield from ("loss/supervised_nats", "eval/loss_nats")
    elif config.mode in PAIR_MODES:
        yield from ("preference/accuracy", "loss/preference")
        yield from ("eval/accuracy", "eval/preference_loss")
    else:
        yield "reward/mean"
    if config.offline is not None or not config.eval.every_num_steps:
        return
    yield "eval/reward/mean"
    for one in config.eval.all_sets():
        prefix = f"eval/{one.name}/" if one.name else "eval/"
        yield from (f"{prefix}reward/*", f"{prefix}truncated_fraction")
        yield f"{prefix}length/response_tokens/mean"
        names = ["reward/mean", *(f"pass_at_{k}" for k in one.pass_at_k)]
        for name in (*names, *(f"majority_at_{k}" for k in one.pass_at_k if k > 1)):
            yield from (f"{prefix}{name}", f"{prefix}{name}/low")
