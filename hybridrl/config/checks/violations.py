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
    if mode in _OFFLINE_RULES:
        return {**_COMMON_RULES, **_TRAINING_RULES, mode: _OFFLINE_RULES[mode]}
    groups = {**_COMMON_RULES, **_TRAINING_RULES, **_SAMPLING_RULES, **_REINFORCING_RULES}
    if mode != "plan":
        return groups
    return {
        name: tuple(rule for rule in rules if rule not in _OF_A_RUN)
        for name, rules in groups.items()
    }


_COMMON_RULES: Groups = {
    "model": (
        model.check_model_source,
        model.check_made_model,
        model.check_vision,
        model.check_attention,
        model.check_model_folder,
        model.check_context,
        model.check_engines_know_the_model,
    ),
    "fsdp2": (megatron.check_fsdp2, megatron.check_fsdp2_kernels),
    "megatron": (
        megatron.check_megatron_is_installed,
        batch_sizes.check_parallel_sizes,
        megatron.check_kernels,
        megatron.check_master_weights,
        megatron.check_passed_arguments,
    ),
    "lora": (
        model.check_adapters,
        model.check_lora_rank,
        model.check_adapted_layers,
        model.check_adapter_folder,
    ),
    "data": (
        data.check_data_source,
        data.check_data_order,
        data.check_data_columns,
        data.check_data_files,
    ),
    "cluster": (cluster.check_ray, cluster.check_worker_setup_hook),
    "run folder": (
        cluster.check_run_folder,
        cluster.check_tracker_packages,
        cluster.check_prometheus_address,
        cluster.check_functions,
    ),
}
_TRAINING_RULES: Groups = {
    "schedule": (algorithm.check_schedule,),
    "checkpoints": (evaluation.check_best_metric,),
}
_SAMPLING_RULES: Groups = {
    "rollout": (
        rollout.check_sglang_is_installed,
        rollout.check_sglang,
        rollout.check_sglang_computes_the_model,
        rollout.check_what_engines_return,
        rollout.check_replayed_run,
    ),
    "serving": (
        serving.check_devices,
        serving.check_groups,
        serving.check_models,
        serving.check_encoders,
        serving.check_ways_of_weights,
        serving.check_shared_devices,
        serving.check_router,
        serving.check_led_groups,
        serving.check_external_servers,
        serving.check_external_policy,
        serving.check_keys_are_set,
    ),
    "agent": (
        agent.check_agent_is_there,
        agent.check_agent_columns,
        agent.check_environment,
        agent.check_agent_rewards,
        agent.check_built_in_tools,
        agent.check_conversations,
    ),
    "reward": (reward.check_reward_is_one_or_several, reward.check_reward_functions),
    "other models": (
        other_models.check_frozen_models,
        other_models.check_judges,
        other_models.check_reward_models,
    ),
    "evaluation": (evaluation.check_eval_has_data, evaluation.check_eval_sets),
}
_REINFORCING_RULES: Groups = {
    "algorithm": (
        algorithm.check_parts,
        algorithm.check_groups,
        algorithm.check_advantages_by_source,
        algorithm.check_old_logprobs,
        algorithm.check_rollout_correction,
        algorithm.check_kl_penalty,
        algorithm.check_overlong_penalty,
        other_models.check_teacher,
        other_models.check_served_teachers,
        other_models.check_divergence,
    ),
    "asynchronous": (
        rollout.check_sampling_ahead,
        rollout.check_oversampling,
        rollout.check_stale_tokens,
    ),
    "batch sizes": (
        batch_sizes.check_batch_sizes,
        batch_sizes.check_critic_batch,
        batch_sizes.check_open_prompts,
    ),
}
_OFFLINE_RULES: Groups = {
    "sft": (algorithm.check_rows_of_a_step,),
    "dpo": (algorithm.check_rows_of_a_step, algorithm.check_preferences),
    "reward_model": (algorithm.check_rows_of_a_step, algorithm.check_preferences),
}
"""By mode; see ``config.offline``."""

_OF_A_RUN: frozenset[Rule] = frozenset(
    {
        data.check_data_files,
        *_SAMPLING_RULES["reward"],
        agent.check_agent_is_there,
        cluster.check_run_folder,
        cluster.check_tracker_packages,
        rollout.check_sglang_is_installed,
        rollout.check_replayed_run,
        serving.check_keys_are_set,
    }
)
"""Rules about files and packages that a run needs, and its plan does not."""
