"""Rules about the algorithm: groups, old log-probs, the KL penalty, the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError


def check_group_has_a_baseline(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A group-relative algorithm compares responses to the same prompt, so it needs several."""
    group_size = config.rollout.num_responses_per_prompt
    if config.algorithm.name == "grpo" and group_size < 2:
        yield ConfigError(
            "rollout.num_responses_per_prompt",
            group_size,
            f"algorithm.name={config.algorithm.name} compares responses to the same prompt: at "
            "least 2",
            remedies=[
                ("rollout.num_responses_per_prompt=8",),
                ("rollout.num_responses_per_prompt=2",),
                ("algorithm=ppo",),
            ],
        )


def check_old_logprobs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Log-probs of the update itself are the old ones only before the first optimizer step."""
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
    if kl.placement == "loss" and kl.estimator == "k1":
        yield ConfigError(
            "algorithm.kl.estimator",
            kl.estimator,
            "as a loss its expected gradient is 0: it would have no effect",
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


def check_lr_warmup(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The warm-up of a learning rate ends before the run does."""
    optimizers = [("actor", config.actor.optimizer, config.num_policy_updates)]
    if config.has_critic and config.mode != "sft":
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


RULES = (check_group_has_a_baseline, check_old_logprobs, check_kl_penalty, check_sampler_ratio_cap)
