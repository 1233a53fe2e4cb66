"""All rules that a single field cannot state. Each runs, and yields an error per violation.

Checks only report, they never assign. A remedy is a set of overrides that fixes the violation and
breaks no other rule; tests/config/test_checks.py applies every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybridrl.config.checks import (
    algorithm,
    batch_sizes,
    cluster,
    critic,
    data,
    fsdp2,
    lora,
    megatron,
    megatron_args,
    model,
    rollout,
    trackers,
)
from hybridrl.config.checks.adapter import check_lora_init_from
from hybridrl.config.checks.disk import check_reward_function, check_run_folder
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

Rule = Callable[[ExperimentConfig], Iterator[ConfigError]]


def find_violations(config: ExperimentConfig) -> list[ConfigError]:
    """Run every rule that concerns ``config.mode`` and return all violations.

    ``check`` runs the rules of ``train``. Reads the disk, starts nothing.
    """
    return [
        violation for rules in rules_of(config.mode).values() for violation in run(rules, config)
    ]


def run(rules: tuple[Rule, ...], config: ExperimentConfig) -> list[ConfigError]:
    """Return the violations of ``rules``, in their order."""
    return [violation for rule in rules for violation in rule(config)]


def rules_of(mode: str) -> Mapping[str, tuple[Rule, ...]]:
    """Return the groups of rules by name; ``sft`` does not sample, so it has fewer."""
    return {**_COMMON_RULES, **(_SFT_RULES if mode == "sft" else _TRAIN_RULES)}


_COMMON_RULES: Mapping[str, tuple[Rule, ...]] = {
    "model": model.RULES,
    "fsdp2": fsdp2.RULES,
    "megatron": (*megatron.RULES, *megatron_args.RULES),
    "lora": (*lora.RULES, check_lora_init_from),
    "schedule": (algorithm.check_lr_warmup,),
    "data": data.RULES,
    "cluster": cluster.RULES,
    "run folder": (check_run_folder, *trackers.RULES),
}
_TRAIN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "algorithm": algorithm.RULES,
    "rollout": (*rollout.RULES, lora.check_lora_base, megatron.check_routing_replay),
    "critic": critic.RULES,
    "batch sizes": batch_sizes.RULES,
    "reward": (check_reward_function,),
    "evaluation": data.EVAL_RULES,
}
_SFT_RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (batch_sizes.check_sft_batch, megatron.check_routes_were_sampled)
}
