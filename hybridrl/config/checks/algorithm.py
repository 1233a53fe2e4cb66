"""Rules about the algorithm: groups, log-probs, the KL penalty, the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config import parts
from hybridrl.config.architecture import find_architecture, read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import flaw_of_folder
from hybridrl.config.rejection import read_rejections
from hybridrl.errors import ConfigError, ModelError

_REWARDS = ("rewards_B", "rewards_BL", "reward_parts_BK")
"""Inputs of an advantage that are less the charges."""


def check_group_has_a_baseline(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A part that compares responses to the same prompt needs several."""
    group_size = config.rollout.num_responses_per_prompt
    if config.algorithm.reads("group_B") and group_size < 2:
        yield ConfigError(
            "rollout.num_responses_per_prompt",
            group_size,
            f"algorithm.advantage={config.algorithm.advantage} compares responses to the same "
            "prompt: at least 2",
            remedies=[
                ("rollout.num_responses_per_prompt=8",),
                ("rollout.num_responses_per_prompt=2",),
                ("algorithm=ppo",),
            ],
        )


def check_old_logprobs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Log-probs of the update itself are the old ones only before the first optimizer step."""
    algorithm = config.algorithm
    recompute = ("algorithm.old_logprobs=recompute",)
    if algorithm.old_logprobs != "current":
        return
    if algorithm.num_updates_per_step > 1:
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            f"needs one update per rollout, and num_epochs={algorithm.num_epochs} x "
            f"num_minibatches={algorithm.num_minibatches} makes {algorithm.num_updates_per_step}",
            remedies=[recompute, ("algorithm.num_epochs=1", "algorithm.num_minibatches=1")],
        )
    if algorithm.kl.placement == "reward":
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            "algorithm.kl.placement=reward needs log-probs before the update",
            remedies=[recompute, ("algorithm.kl.placement=loss",)],
        )
    if parts.ADVANTAGE.reads(algorithm.advantage, "old_logprobs_BL"):
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            f"algorithm.advantage={algorithm.advantage} needs log-probs before the update",
            remedies=[recompute],
        )


def check_rollout_correction(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rules of rejection can be read, and a mean over the step needs log-probs of all of it."""
    algorithm, section = config.algorithm, "algorithm.rollout_correction_args"
    rules = algorithm.rollout_correction_args.get("reject", "")
    try:
        read_rejections(str(rules))
    except ValueError as error:
        key = f"{section}.reject"
        remedies = [(f"{key}='0.5 <= token_k1 <= 2'",), (f"~{key}",)]
        yield ConfigError(key, rules, str(error), remedies=remedies)
    is_normalized = algorithm.rollout_correction_args.get("normalize") is True
    if is_normalized and algorithm.old_logprobs != "recompute":
        key = f"{section}.normalize"
        rule = (
            "the mean weight of a step is known before the update alone, and "
            f"algorithm.old_logprobs={algorithm.old_logprobs}"
        )
        yield ConfigError(
            key,
            is_normalized,
            rule,
            remedies=[("algorithm.old_logprobs=recompute",), (f"~{key}",)],
        )


def check_kl_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A KL penalty has both a placement and a weight, or neither; in the loss it has a gradient."""
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
            f"algorithm.kl.placement={kl.placement} loads a reference model that has no effect",
            remedies=[("algorithm.kl.coefficient=0.001",), ("algorithm.kl.placement=none",)],
        )
    if kl.placement == "loss" and kl.estimator == "k1" and kl.gradient == "value":
        yield ConfigError(
            "algorithm.kl.estimator",
            kl.estimator,
            "as a loss its expected gradient is 0: it would have no effect",
            remedies=[("algorithm.kl.estimator=k2",), ("algorithm.kl.gradient=k2",)],
        )
    if kl.placement != "loss" and kl.gradient != "value":
        yield ConfigError(
            "algorithm.kl.gradient",
            kl.gradient,
            f"would be ignored, because algorithm.kl.placement={kl.placement}",
            remedies=[("algorithm.kl.gradient=value",)],
        )
    if kl.placement == "none" and kl.target_nats is not None:
        yield ConfigError(
            "algorithm.kl.target_nats",
            kl.target_nats,
            "there is no coefficient to adapt, because algorithm.kl.placement=none",
            remedies=[("algorithm.kl.target_nats=null",)],
        )


def check_charges_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rewards are charged only where the advantage reads them."""
    algorithm = config.algorithm
    if any(parts.ADVANTAGE.reads(algorithm.advantage, name) for name in _REWARDS):
        return
    rule = f"would be ignored: algorithm.advantage={algorithm.advantage} reads no reward"
    if algorithm.soft_overlong_tokens:
        key = "algorithm.soft_overlong_tokens"
        yield ConfigError(key, algorithm.soft_overlong_tokens, rule, remedies=[(f"{key}=0",)])
    if algorithm.kl.placement == "reward":
        key = "algorithm.kl.placement"
        yield ConfigError(key, "reward", rule, remedies=[(f"{key}=loss",)])


def check_reference_is_loaded(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An advantage that reads the reference's log-probs needs the reference."""
    advantage, kl = config.algorithm.advantage, config.algorithm.kl
    reads_reference = parts.ADVANTAGE.reads(advantage, "reference_logprobs_BL")
    if reads_reference and kl.placement == "none":
        yield ConfigError(
            "algorithm.kl.placement",
            "none",
            f"algorithm.advantage={advantage} reads the log-probs of a reference, and none is "
            "loaded",
            remedies=[("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.001")],
        )


def check_teacher(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A teacher is read by the advantage, can be loaded, and has the policy's vocabulary."""
    algorithm, key = config.algorithm, "algorithm.teacher_path"
    is_read = parts.ADVANTAGE.reads(algorithm.advantage, "teacher_logprobs_BL")
    folder = algorithm.teacher_path
    if folder is None or not is_read:
        if is_read:
            rule = f"algorithm.advantage={algorithm.advantage} reads the log-probs of a teacher"
            yield ConfigError(key, None, rule, fix=f"set {key} to a Hugging Face folder")
        elif folder is not None:
            rule = f"would be ignored: algorithm.advantage={algorithm.advantage} reads no teacher"
            yield ConfigError(key, folder, rule, remedies=[(f"{key}=null",)])
        return
    try:
        flaw = flaw_of_folder(folder)
        teacher = None if flaw else read_architecture(Path(folder))
    except ModelError as error:
        flaw, teacher = str(error), None
    policy = find_architecture(config.model)
    if policy is not None and teacher is not None and policy.vocab_size != teacher.vocab_size:
        flaw = (
            f"the teacher has {teacher.vocab_size} tokens and the policy {policy.vocab_size}, so "
            "their log-probs cannot be compared"
        )
    if teacher is not None and teacher.classifier is not None:
        flaw = "its config.json names a classifier, which has no log-probs"
    if flaw:
        yield ConfigError(key, folder, flaw, fix="set it to a folder of the policy's family")


def check_overlong_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The reward falls over the last tokens of the longest response."""
    num_tokens, most = config.algorithm.soft_overlong_tokens, config.rollout.max_response_tokens
    if num_tokens > most:
        yield ConfigError(
            "algorithm.soft_overlong_tokens",
            num_tokens,
            f"must be at most rollout.max_response_tokens={most}",
            remedies=[(f"algorithm.soft_overlong_tokens={most // 5}",)],
        )


def check_group_filter(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A critic learns from every response: a group without a signal for the policy teaches it."""
    if config.algorithm.group_filter is not None and config.has_critic:
        yield ConfigError(
            "algorithm.group_filter",
            config.algorithm.group_filter,
            f"algorithm.advantage={config.algorithm.advantage} compares responses with a critic, "
            "not with their group",
            remedies=[("algorithm.group_filter=null", "algorithm.max_sampling_rounds=1")],
        )


def check_lr_warmup(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The warm-up of a learning rate ends before the run does."""
    optimizers = [("actor", config.actor.optimizer, config.num_policy_updates)]
    if config.has_critic:
        optimizers.append(("critic", config.critic.optimizer, config.num_critic_updates))
    for section, optimizer, num_steps in optimizers:
        if 0 < num_steps <= optimizer.num_warmup_steps:
            key = f"{section}.optimizer.num_warmup_steps"
            yield ConfigError(
                key,
                optimizer.num_warmup_steps,
                f"the run takes {num_steps} optimizer steps: the rate would never rise to "
                f"{section}.optimizer.lr={optimizer.lr:g}",
                remedies=[(f"{key}={num_steps // 10}",), (f"{key}=0",)],
            )


def check_value_loss_has_no_prompts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The value loss is aggregated as the policy's, and its rows do not say their prompt."""
    algorithm = config.algorithm
    name = algorithm.loss_aggregation
    if config.has_critic and parts.AGGREGATION.reads(name, "group_tokens_B"):
        yield ConfigError(
            "algorithm.loss_aggregation",
            name,
            "the critic's loss cannot be a mean over prompts",
            remedies=[("algorithm.loss_aggregation=token_mean",)],
        )


RULES = (
    check_group_has_a_baseline,
    check_value_loss_has_no_prompts,
    check_old_logprobs,
    check_rollout_correction,
    check_kl_penalty,
    check_charges_are_read,
    check_reference_is_loaded,
    check_teacher,
    check_overlong_penalty,
    check_group_filter,
)
