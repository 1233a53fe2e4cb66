"""The report of ``mode=check``: the validated rules, and numbers that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridrl.config.checks.violations import find_violations, rules_of
from hybridrl.config.experiment import OFFLINE_MODES, PAIR_MODES, ExperimentConfig


def summarize(config: ExperimentConfig) -> str:
    """Describe a configuration that passed its checks: a line per group of rules, then numbers."""
    lines = [f"{name:<17} ok" for name in rules_of(config.mode)]
    # Other modes could learn from the same rows.
    has_pairs = config.data.task is not None or config.data.rejected_key is not None
    for mode in OFFLINE_MODES:
        if has_pairs or mode not in PAIR_MODES:
            refused = find_violations(replace(config, mode=mode))
            text = "; ".join(str(violation) for violation in refused) or "would pass, too"
            lines.append(f"{f'mode={mode}':<17} {text}")
    numbers = [f"{name:<17} {value}" for name, value in _numbers(config)]
    return "\n".join(["checked, nothing started:", *lines, "", *numbers])


def sentence(config: ExperimentConfig) -> str:
    """Return in one sentence what a run would do: ``train the starter model with grpo ...``."""
    algorithm, cluster = config.algorithm, config.cluster
    num_prompts = _count(config.trainer.num_prompts_per_step, "prompt")
    num_responses = _count(config.rollout.num_responses_per_prompt, "response")
    at_most = "" if config.trainer.num_epochs is None else "at most "
    return (
        f"train {config.model.path or 'the starter model'} with {algorithm.advantage} and "
        f"{algorithm.policy_loss} on {num_prompts} x "
        f"{num_responses} a step of {_data(config)}, learning rate {config.actor.optimizer.lr:g}, "
        f"{at_most}{_count(config.trainer.num_steps, 'step')}, on "
        f"{_count(cluster.num_ranks, 'GPU rank' if cluster.device == 'cuda' else 'CPU rank')}"
    )


def note_of_cut_sampling(config: ExperimentConfig) -> str:
    """Return that what is sampled is not what is scored; empty where they are the same."""
    rollout = config.rollout
    if rollout.sampling_masks or (rollout.top_p == 1.0 and rollout.top_k == 0):
        return ""
    return (
        f"rollout.top_p={rollout.top_p:g} rollout.top_k={rollout.top_k} cut the distribution that "
        "is sampled, and the update scores the full one: gradients are biased, and "
        "policy/sampler_mismatch_nats does not show it; set "
        "rollout.sampling_masks=true to learn with what is sampled, or rollout.top_p=1.0 "
        "rollout.top_k=0 and eval.top_p for evaluation alone"
    )


def _data(config: ExperimentConfig) -> str:
    return config.data.task or ", ".join(config.data.sources or config.data.train_files)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _numbers(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    cluster, algorithm, num_rows = config.cluster, config.algorithm, config.num_rows_per_step
    num_updates = algorithm.num_updates_per_step
    num_prompts = _count(config.trainer.num_prompts_per_step, "prompt")
    num_responses = _count(config.rollout.num_responses_per_prompt, "response")
    is_plain = config.actor.engine == "fsdp2" and config.num_ranks_per_group == 1
    yield (
        "ranks",
        f"{cluster.num_ranks} ({cluster.num_nodes} x {cluster.num_ranks_per_node}, "
        f"{cluster.device}, {cluster.num_threads_per_rank or 'all'} threads each)",
    )
    yield (
        "rows a step",
        f"{num_rows} ({num_prompts} x {num_responses}), "
        f"{num_rows // algorithm.num_minibatches} an update, "
        f"{num_rows // algorithm.num_minibatches // config.num_train_groups} of them a rank"
        f"{'' if is_plain else ' that has rows of its own'}",
    )
    if config.megatron_worlds:
        megatron = config.megatron
        yield (
            "megatron",
            f"tensor {megatron.tensor_parallel_size} x pipeline "
            f"{megatron.pipeline_parallel_size} x context {megatron.context_parallel_size}, "
            f"{config.num_train_groups} data-parallel; experts over "
            f"{megatron.expert_parallel_size} x {megatron.expert_tensor_parallel_size} ranks",
        )
    yield (
        "updates",
        f"{config.num_policy_updates} ({num_updates} a step x "
        f"{_count(config.num_policy_updates // num_updates, 'step')})",
    )
    yield (
        "tokens",
        f"at most {config.max_row_tokens} a row, {num_rows * config.max_row_tokens} a step",
    )
    yield "data", _data(config)
    if config.has_critic:
        critic = config.critic
        yield (
            "critic",
            f"{_count(config.num_critic_ranks, 'rank')} "
            f"{'of its own' if config.has_critic_pool else 'of the policy'}; "
            f"{critic.num_updates_per_step} updates a step, alone in the first "
            f"{critic.num_warmup_steps} steps",
        )
    yield "model", config.model.path or "made on the spot (model.starter)"
    yield "run folder", config.trainer.run_dir
