"""One function per rule that a single field cannot state. All run; each yields what it finds.

Checks only report, they never assign. A remedy is a set of overrides that mends the violation and
breaks no other rule; tests/config/test_checks.py applies every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybridrl.config.checks.adapter import check_lora_init_from
from hybridrl.config.checks.batch_sizes import check_batch_sizes, check_engines_lie_within_nodes
from hybridrl.config.checks.cluster import (
    check_nodes_have_a_cluster,
    check_object_store,
    check_ray_address,
    check_worker_setup_hook,
)
from hybridrl.config.checks.critic import (
    check_critic_batch_sizes,
    check_critic_kernel,
    check_critic_warmup,
)
from hybridrl.config.checks.data import (
    check_data_source,
    check_eval_has_data,
    check_eval_temperature,
    check_sort_digits,
)
from hybridrl.config.checks.disk import (
    check_data_files,
    check_reward_function,
    check_run_folder,
)
from hybridrl.config.checks.doubled import (
    check_data_columns,
    check_files_stand_once,
    check_trackers_stand_once,
)
from hybridrl.config.checks.fsdp2 import (
    check_fsdp2_is_used,
    check_liger_kernels,
    check_replicas,
)
from hybridrl.config.checks.ignored import check_rollout_keys_are_read
from hybridrl.config.checks.lora import (
    check_adapted_layers,
    check_lora_base,
    check_lora_dropout,
    check_lora_rank,
    check_lora_targets,
)
from hybridrl.config.checks.megatron import (
    check_layer_kernels,
    check_master_weights,
    check_megatron_is_installed,
    check_megatron_is_used,
    check_megatron_reads_the_model,
    check_parallel_sizes,
    check_recompute_modules,
    check_routes_were_sampled,
    check_routing,
    check_routing_replay,
)
from hybridrl.config.checks.megatron_args import (
    check_ddp_args,
    check_optimizer_args,
    check_transformer_args,
)
from hybridrl.config.checks.model import (
    check_attention_runs_on_device,
    check_chat_template,
    check_engines_know_the_model,
    check_model_folder,
    check_model_source,
    check_starter_context,
    check_starter_reads_plain_text,
    check_starter_shape,
)
from hybridrl.config.checks.schedule import check_lr_warmup
from hybridrl.config.checks.server import (
    check_certificate,
    check_drain_fits_its_stage,
    check_engine_args,
    check_graphs_can_be_released,
    check_server_computes_in,
    check_server_reads_the_model,
    check_sglang_is_installed,
    check_transport,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.tracker_checks import check_trackers
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
    """Return what ``rules`` find, in their order."""
    return [violation for rule in rules for violation in rule(config)]


def rules_of(mode: str) -> Mapping[str, tuple[Rule, ...]]:
    """Return the groups of rules by name; ``sft`` samples nothing, so it has fewer."""
    return {**_COMMON_RULES, **(_SFT_RULES if mode == "sft" else _TRAIN_RULES)}


def check_group_has_a_baseline(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A group-relative algorithm compares siblings, so a response must have some."""
    group_size = config.rollout.num_responses_per_prompt
    if config.algorithm.name == "grpo" and group_size < 2:
        yield ConfigError(
            "rollout.num_responses_per_prompt",
            group_size,
            f"algorithm.name={config.algorithm.name} compares each response with its siblings",
            remedies=[
                ("rollout.num_responses_per_prompt=8",),
                ("rollout.num_responses_per_prompt=2",),
                ("algorithm=ppo",),
            ],
        )


def check_old_logprobs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Log-probs of the update itself are the old ones only while nothing was updated."""
    algorithm = config.algorithm
    if algorithm.old_logprobs == "recompute":
        return
    if algorithm.num_updates_per_step > 1:
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            f"needs one update per rollout, and num_epochs={algorithm.num_epochs} x "
            f"num_minibatches={algorithm.num_minibatches} makes {algorithm.num_updates_per_step}",
            remedies=[
                ("algorithm.old_logprobs=recompute",),
                ("algorithm.num_epochs=1", "algorithm.num_minibatches=1"),
            ],
        )
    if algorithm.kl.placement == "reward":
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            "algorithm.kl.placement=reward needs log-probs before the update",
            remedies=[("algorithm.old_logprobs=recompute",), ("algorithm.kl.placement=loss",)],
        )


def check_kl_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A KL penalty has both a place and a weight, or neither; in the loss it has a gradient."""
    kl = config.algorithm.kl
    if kl.placement == "none" and kl.coefficient > 0:
        yield ConfigError(
            "algorithm.kl.coefficient",
            kl.coefficient,
            "would be ignored, because algorithm.kl.placement=none",
            remedies=[("algorithm.kl.placement=loss",), ("algorithm.kl.coefficient=0",)],
        )
    if kl.placement != "none" and kl.coefficient == 0:
        yield ConfigError(
            "algorithm.kl.coefficient",
            kl.coefficient,
            f"algorithm.kl.placement={kl.placement} costs a reference model and weighs nothing",
            remedies=[("algorithm.kl.coefficient=0.001",), ("algorithm.kl.placement=none",)],
        )
    if kl.placement == "loss" and kl.estimator == "k1":
        yield ConfigError(
            "algorithm.kl.estimator",
            kl.estimator,
            "as a loss its expected gradient is 0: it would pull the policy nowhere",
            remedies=[("algorithm.kl.estimator=k2",), ("algorithm.kl.estimator=k3",)],
        )


def check_sampler_ratio_cap(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A cap below 1 would shrink the loss of tokens on which trainer and engine agree."""
    cap = config.algorithm.sampler_ratio_cap
    if 0 < cap < 1:
        yield ConfigError(
            "algorithm.sampler_ratio_cap",
            cap,
            "must be 0 (off) or at least 1, the ratio of engines that agree",
            remedies=[("algorithm.sampler_ratio_cap=2.0",), ("algorithm.sampler_ratio_cap=0",)],
        )


def check_rollout_engine(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The embedded engine runs on one rank."""
    size = config.rollout.tensor_parallel_size
    if config.rollout.engine == "hf" and size != 1:
        yield ConfigError(
            "rollout.tensor_parallel_size",
            size,
            "rollout.engine=hf runs on one rank",
            remedies=[("rollout.tensor_parallel_size=1",)],
        )


def check_sft_batch(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a supervised step divide evenly over the ranks that have rows of their own."""
    size, num_ranks = config.sft.batch_size, config.num_train_groups
    if size % num_ranks:
        legal = [n for n in (size // num_ranks * num_ranks, -(-size // num_ranks) * num_ranks) if n]
        yield ConfigError(
            "sft.batch_size",
            size,
            f"must be a multiple of {num_ranks} ranks with rows of their own",
            remedies=[(f"sft.batch_size={n}",) for n in legal],
        )


_COMMON_RULES: Mapping[str, tuple[Rule, ...]] = {
    "model": (
        check_model_source,
        check_starter_shape,
        check_starter_context,
        check_starter_reads_plain_text,
        check_chat_template,
        check_attention_runs_on_device,
        check_model_folder,
        check_engines_know_the_model,
    ),
    "fsdp2": (check_fsdp2_is_used, check_replicas, check_liger_kernels),
    "megatron": (
        check_megatron_is_used,
        check_megatron_is_installed,
        check_megatron_reads_the_model,
        check_parallel_sizes,
        check_layer_kernels,
        check_recompute_modules,
        check_master_weights,
        check_adapted_layers,
        check_routing,
        check_transformer_args,
        check_optimizer_args,
        check_ddp_args,
    ),
    "lora": (check_lora_targets, check_lora_rank, check_lora_dropout, check_lora_init_from),
    "schedule": (check_lr_warmup,),
    "data": (
        check_data_source,
        check_data_columns,
        check_data_files,
        check_files_stand_once,
        check_sort_digits,
    ),
    "cluster": (
        check_nodes_have_a_cluster,
        check_ray_address,
        check_object_store,
        check_worker_setup_hook,
    ),
    "run folder": (check_run_folder, check_trackers, check_trackers_stand_once),
}
_TRAIN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "algorithm": (
        check_group_has_a_baseline,
        check_old_logprobs,
        check_kl_penalty,
        check_sampler_ratio_cap,
    ),
    "rollout": (
        check_rollout_engine,
        check_rollout_keys_are_read,
        check_transport,
        check_lora_base,
        check_certificate,
        check_sglang_is_installed,
        check_engine_args,
        check_graphs_can_be_released,
        check_server_computes_in,
        check_drain_fits_its_stage,
        check_server_reads_the_model,
        check_routing_replay,
    ),
    "critic": (check_critic_warmup, check_critic_kernel, check_critic_batch_sizes),
    "batch sizes": (check_batch_sizes, check_engines_lie_within_nodes),
    "reward": (check_reward_function,),
    "evaluation": (check_eval_has_data, check_eval_temperature),
}
_SFT_RULES: Mapping[str, tuple[Rule, ...]] = {"sft": (check_sft_batch, check_routes_were_sampled)}
