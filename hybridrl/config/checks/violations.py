"""All rules that a single field cannot state. Each runs, and yields an error per violation.

Checks only report, they never assign. A remedy is a set of overrides that fixes the violation and
breaks no other rule; tests/config/test_checks.py applies every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybridrl.config.checks import (
    agent,
    algorithm,
    asynchronous,
    batch_sizes,
    cluster,
    critic,
    data,
    evaluation,
    external_models,
    frozen_models,
    fsdp2,
    fused_groups,
    lora,
    megatron,
    megatron_args,
    model,
    oversample,
    parts,
    preferences,
    replay,
    reward,
    reward_models,
    rollout,
    router,
    serving,
    trackers,
)
from hybridrl.config.checks.adapter import check_lora_init_from
from hybridrl.config.checks.disk import check_data_files, check_run_folder
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

Rule = Callable[[ExperimentConfig], Iterator[ConfigError]]


def find_violations(config: ExperimentConfig) -> list[ConfigError]:
    """Run every rule that concerns ``config.mode`` and return all violations.

    ``check`` runs the rules of ``train``. Reads the disk, starts nothing.
    """
    groups = dict(rules_of(config.mode))
    if config.mode == "eval" and config.eval.checkpoint is not None:
        del groups["model"]  # of the checkpoint: looked at when it has been exported
    return [violation for rules in groups.values() for violation in run(rules, config)]


def run(rules: tuple[Rule, ...], config: ExperimentConfig) -> list[ConfigError]:
    """Return the violations of ``rules``, in their order."""
    return [violation for rule in rules for violation in rule(config)]


def rules_of(mode: str) -> Mapping[str, tuple[Rule, ...]]:
    """Return the groups of rules by name; some modes do not sample, ``eval`` does not train.

    ``plan`` reads a model's config.json alone: it predicts a run before its data, packages and
    weights are on the machine.
    """
    if mode == "doctor":
        return {name: _ALL_RULES[name] for name in ("model", "data", "reward", "evaluation")}
    if mode == "eval":
        return {**_COMMON_RULES, **_EVAL_RULES}
    of_mode = _OFFLINE_RULES.get(mode, _TRAIN_RULES)
    groups = {**_COMMON_RULES, **_TRAINING_RULES, **of_mode}
    if mode != "plan":
        return groups
    return {
        name: tuple(rule for rule in rules if rule not in _OF_A_RUN)
        for name, rules in groups.items()
    }


_COMMON_RULES: Mapping[str, tuple[Rule, ...]] = {
    "model": model.RULES,
    "fsdp2": fsdp2.RULES,
    "megatron": (*megatron.RULES, *megatron_args.RULES),
    "lora": (*lora.RULES, check_lora_init_from),
    "data": data.RULES,
    "cluster": cluster.RULES,
    "run folder": (check_run_folder, *trackers.RULES),
}
_TRAINING_RULES: Mapping[str, tuple[Rule, ...]] = {
    "schedule": (algorithm.check_lr_warmup,),
    "checkpoints": (evaluation.check_best_metric,),
}
_ROLLOUT = (lora.check_lora_base, *replay.RULES)
_TRAIN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "algorithm": (*parts.RULES, *algorithm.RULES),
    "rollout": (
        *(*rollout.RULES, *_ROLLOUT, *oversample.RULES),
        megatron.check_routing_replay,
    ),
    "asynchronous": asynchronous.RULES,
    "serving": (
        *serving.RULES,
        *fused_groups.RULES,
        *router.RULES,
        *frozen_models.RULES,
        *external_models.RULES,
    ),
    "agent": agent.RULES,
    "critic": critic.RULES,
    "batch sizes": batch_sizes.RULES,
    "reward": reward.RULES,
    "reward models": reward_models.RULES,
    "evaluation": evaluation.RULES,
}
_EVAL_RULES: Mapping[str, tuple[Rule, ...]] = {
    "rollout": (*rollout.RULES, *_ROLLOUT),
    "serving": (
        *serving.RULES,
        *fused_groups.RULES,
        *router.RULES,
        *frozen_models.RULES,
        *external_models.RULES,
    ),
    "agent": agent.RULES,
    "reward": reward.RULES,
    "reward models": reward_models.RULES,
    "evaluation": (*evaluation.RULES, evaluation.check_eval_checkpoint),
}
_OF_DATA_SETS = (batch_sizes.check_offline_batch, megatron.check_routes_were_sampled)
_OFFLINE_RULES: Mapping[str, Mapping[str, tuple[Rule, ...]]] = {
    "sft": {"sft": _OF_DATA_SETS},
    "dpo": {"dpo": (*_OF_DATA_SETS, *preferences.RULES)},
    "reward_model": {
        "reward model": (*_OF_DATA_SETS, *reward_models.TRAINING_RULES),
    },
}
"""By mode that learns from a data set; see ``config.offline``."""
_OF_A_RUN: frozenset[Rule] = frozenset(
    {
        check_data_files,
        *reward.RULES,
        agent.check_agent_is_known,
        agent.check_agent_has_a_command,
        agent.check_tools_are_known,
        check_run_folder,
        rollout.check_sglang_is_installed,
        replay.check_replayed_run,
        external_models.check_keys_are_set,
        trackers.check_trackers,
    }
)
"""Rules about files and packages that a run needs, and its plan does not."""
_ALL_RULES = {**_COMMON_RULES, **_TRAIN_RULES}
