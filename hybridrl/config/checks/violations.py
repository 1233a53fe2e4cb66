"""All rules that a single field cannot state. Each runs, and yields an error per violation.

Checks only report, they never assign. A remedy is a set of overrides that fixes the violation and
breaks no other rule; tests/config/test_checks.py applies every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybridrl.config.checks import (
    agent,
    algorithm,
    batch_sizes,
    cluster,
    data,
    evaluation,
    megatron,
    model,
    other_models,
    reward,
    rollout,
    serving,
)
from hybridrl.config.checks.unread import check_unread_keys
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

Rule = Callable[[ExperimentConfig], Iterator[ConfigError]]
Groups = Mapping[str, tuple[Rule, ...]]
"""Rules by the name of their group."""


def find_violations(config: ExperimentConfig) -> list[ConfigError]:
    """Run every rule that concerns ``config.mode`` and return all violations.

    ``check`` runs the rules of ``train``. Reads the disk, starts nothing.
    """
    groups = dict(rules_of(config.mode))
    if config.mode == "eval" and config.eval.checkpoint is not None:
        del groups["model"]  # of the checkpoint: looked at when it has been exported
    return [error for name, rules in groups.items() for error in check_group(name, rules, config)]


def check_group(name: str, rules: tuple[Rule, ...], config: ExperimentConfig) -> list[ConfigError]:
    """Return the violations of a group's rules, in their order, and its keys that nobody reads."""
    broken = [violation for rule in rules for violation in rule(config)]
    return [*broken, *check_unread_keys(config, name)]


def rules_of(mode: str) -> Groups:
    """Return the groups of rules by name; some modes do not sample, ``eval`` does not train.

    ``plan`` reads a model's config.json alone: it predicts a run before its data, packages and
    weights are on the machine.
    """
    if mode == "doctor":
        groups = {**_COMMON_RULES, **_SAMPLING_RULES}
        return {name: groups[name] for name in ("model", "data", "reward", "evaluation")}
    if mode == "eval":
        return {
            **_COMMON_RULES,
            **_SAMPLING_RULES,
            "checkpoint": (evaluation.check_eval_checkpoint,),
        }
    if mode in algorithm.OFFLINE_RULES:
        return {**_COMMON_RULES, **_TRAINING_RULES, mode: algorithm.OFFLINE_RULES[mode]}
    groups = {**_COMMON_RULES, **_TRAINING_RULES, **_SAMPLING_RULES, **_REINFORCING_RULES}
    if mode != "plan":
        return groups
    return {
        name: tuple(rule for rule in rules if rule not in _OF_A_RUN)
        for name, rules in groups.items()
    }


_COMMON_RULES: Groups = {
    "model": model.RULES,
    "fsdp2": megatron.FSDP2_RULES,
    "megatron": megatron.RULES,
    "lora": model.LORA_RULES,
    "data": data.RULES,
    "cluster": cluster.RULES,
    "run folder": cluster.RUN_FOLDER_RULES,
}
_TRAINING_RULES: Groups = {
    "schedule": (algorithm.check_schedule,),
    "checkpoints": (evaluation.check_best_metric,),
}
_SAMPLING_RULES: Groups = {
    "rollout": rollout.RULES,
    "serving": serving.RULES,
    "agent": agent.RULES,
    "reward": reward.RULES,
    "other models": other_models.RULES,
    "evaluation": evaluation.RULES,
}
_REINFORCING_RULES: Groups = {
    "algorithm": (*algorithm.RULES, *other_models.TEACHER_RULES),
    "asynchronous": rollout.ASYNCHRONOUS_RULES,
    "batch sizes": batch_sizes.RULES,
}
_OF_A_RUN: frozenset[Rule] = frozenset(
    {
        data.check_data_files,
        *reward.RULES,
        agent.check_agent_is_there,
        cluster.check_run_folder,
        cluster.check_tracker_packages,
        rollout.check_sglang_is_installed,
        rollout.check_replayed_run,
        serving.check_keys_are_set,
    }
)
"""Rules about files and packages that a run needs, and its plan does not."""
