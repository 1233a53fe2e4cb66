"""Rules about what is learned: the parts of an algorithm, and modes that sample nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridrl.config.algorithm import read_rejections
from hybridrl.config.checks.messages import check_numbers, error
from hybridrl.config.checks.unread import REWARDS
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.config.functions.signatures import SignatureError
from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import ConfigError

_KEYS_OF_NUMBERS: Mapping[str, Mapping[str, str]] = {
    parts.POLICY_LOSS.key: {
        "clip_low": "algorithm.clip_low",
        "clip_high": "algorithm.clip_high",
    },
    parts.PREFERENCE_LOSS.key: {"beta": "dpo.beta"},
}
"""By the key of a part: its numbers that have a key of their own."""


def check_parts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A part is built in, or a function in a file, and has the numbers that are given to it."""
    algorithm = config.algorithm
    for kind, spelled, given in (*algorithm.parts, *algorithm.parts_by_source.values()):
        yield from check_part(config, kind, spelled, given)


def check_part(
    config: ExperimentConfig, kind: parts.PartKind, spelled: str, given: Mapping[str, ArgumentValue]
) -> Iterator[ConfigError]:
    """Yield the violations of one part: of its name, or of the numbers that are given to it."""
    try:
        signature = kind.read(spelled)
    except SignatureError as flaw:
        usual = [f"{kind.key}={name}" for name in kind.built_in][:1]
        yield error(config, kind.key, flaw.rule, *usual, fix=flaw.fix, got=spelled)
        return
    section, own_keys = kind.args_key or kind.key, _KEYS_OF_NUMBERS.get(kind.key, {})
    yield from check_numbers(signature, given, function=spelled, section=section, own_keys=own_keys)


def check_groups(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Responses to one prompt are compared with each other, or with a critic."""
    algorithm, key = config.algorithm, "rollout.num_responses_per_prompt"
    if algorithm.reads("group_B") and config.rollout.num_responses_per_prompt < 2:
        rule = (
            f"algorithm.advantage={algorithm.advantage} compares responses to the same prompt: at "
            "least 2"
        )
        yield error(config, key, rule, f"{key}=8", f"{key}=2", "algorithm=ppo")
    if config.has_critic and algorithm.group_filter is not None:
        rule = (
            f"algorithm.advantage={algorithm.advantage} compares responses with a critic, not with "
            "their group"
        )
        remedy = "algorithm.group_filter=null algorithm.max_sampling_rounds=1"
        yield error(config, "algorithm.group_filter", rule, remedy)
    if config.has_critic and parts.AGGREGATION.reads(algorithm.loss_aggregation, "group_tokens_B"):
        key, rule = "algorithm.loss_aggregation", "the critic's loss cannot be a mean over prompts"
        yield error(config, key, rule, f"{key}=token_mean")


def check_advantages_by_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """They name sources of the mix, and ask for what all rows have."""
    algorithm = config.algorithm
    for name, (kind, spelled, _) in algorithm.parts_by_source.items():
        removing = f"~algorithm.by_source.{name}"
        if name not in config.data.sources:
            rule = f"data.sources has {', '.join(config.data.sources) or 'none'}, and not {name}"
            yield error(config, kind.key, rule, removing)
        if config.has_critic:
            rule = "a critic learns from the rows of all sources, with the one algorithm.advantage"
            yield error(config, kind.key, rule, removing)
        if algorithm.old_logprobs == "current" and kind.reads(spelled, "old_logprobs_BL"):
            rule = f"{spelled} needs log-probs before the update"
            yield error(config, kind.key, rule, "algorithm.old_logprobs=recompute", removing)


def check_old_logprobs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Log-probs of the update itself are the old ones only before the first optimizer step."""
    algorithm, key = config.algorithm, "algorithm.old_logprobs"
    recompute = f"{key}=recompute"
    if algorithm.old_logprobs != "current":
        return
    if algorithm.num_updates_per_step > 1:
        rule = (
            f"needs one update per rollout, and num_epochs={algorithm.num_epochs} x "
            f"num_minibatches={algorithm.num_minibatches} makes {algorithm.num_updates_per_step}"
        )
        remedy = "algorithm.num_epochs=1 algorithm.num_minibatches=1"
        yield error(config, key, rule, recompute, remedy)
    if algorithm.kl.placement == "reward":
        rule = "algorithm.kl.placement=reward needs log-probs before the update"
        yield error(config, key, rule, recompute, "algorithm.kl.placement=loss")
    if parts.ADVANTAGE.reads(algorithm.advantage, "old_logprobs_BL"):
        rule = f"algorithm.advantage={algorithm.advantage} needs log-probs before the update"
        yield error(config, key, rule, recompute)


def check_rollout_correction(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rules of rejection can be read, and a mean over the step needs log-probs of all of it."""
    algorithm, section = config.algorithm, "algorithm.rollout_correction_args"
    rules = algorithm.rollout_correction_args.get("reject", "")
    try:
        read_rejections(str(rules))
    except ValueError as flaw:
        key = f"{section}.reject"
        yield error(config, key, str(flaw), f"{key}='0.5 <= token_k1 <= 2'", f"~{key}")
    is_normalized = algorithm.rollout_correction_args.get("normalize") is True
    if is_normalized and algorithm.old_logprobs != "recompute":
        key = f"{section}.normalize"
        rule = (
            "the mean weight of a step is known before the update alone, and "
            f"algorithm.old_logprobs={algorithm.old_logprobs}"
        )
        yield error(config, key, rule, "algorithm.old_logprobs=recompute", f"~{key}")


def check_kl_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A KL penalty that is placed has a weight, and in the loss a gradient.

    Rewards are charged only where the advantage reads them; a reference it reads is loaded.
    """
    kl, coefficient = config.algorithm.kl, "algorithm.kl.coefficient"
    if kl.placement != "none" and kl.coefficient == 0:
        rule = f"algorithm.kl.placement={kl.placement} loads a reference model that has no effect"
        remedies = (f"{coefficient}=0.001", "algorithm.kl.placement=none")
        yield error(config, coefficient, rule, *remedies)
    if kl.placement == "loss" and kl.estimator == "k1" and kl.gradient == "value":
        key, rule = (
            "algorithm.kl.estimator",
            "as a loss its expected gradient is 0: it would have no effect",
        )
        yield error(config, key, rule, f"{key}=k2", "algorithm.kl.gradient=k2")
    algorithm, placement = config.algorithm, "algorithm.kl.placement"
    if kl.placement == "reward" and not algorithm.advantage_reads(*REWARDS):
        rule = f"algorithm.advantage={algorithm.advantage} reads no reward"
        yield error(config, placement, rule, f"{placement}=loss")
    if kl.placement == "none" and algorithm.advantage_reads("reference_logprobs_BL"):
        rule = "the advantage, or that of a source, reads log-probs of a reference: none is loaded"
        yield error(config, placement, rule, f"{placement}=loss algorithm.kl.coefficient=0.001")


def check_overlong_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The reward falls over the last tokens of the longest response."""
    key, most = "algorithm.soft_overlong_tokens", config.rollout.max_response_tokens
    if config.algorithm.soft_overlong_tokens > most:
        rule = f"must be at most rollout.max_response_tokens={most}"
        yield error(config, key, rule, f"{key}={most // 5}")


def check_schedule(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A learning rate, and a critic, have warmed up before the run ends; it has profiled steps."""
    optimizer, num_steps = config.actor.optimizer, config.num_policy_updates
    if config.has_critic:
        num_steps = min(num_steps, config.num_critic_updates)
    if 0 < num_steps <= optimizer.num_warmup_steps:
        key = "actor.optimizer.num_warmup_steps"
        rule = (
            f"the run takes {num_steps} optimizer steps: the rate would never rise to "
            f"actor.optimizer.lr={optimizer.lr:g}"
        )
        yield error(config, key, rule, f"{key}={num_steps // 10}", f"{key}=0")
    key, num_steps = "critic.num_warmup_steps", config.trainer.num_steps
    num_warmup_steps = config.critic.num_warmup_steps
    if config.has_critic and num_warmup_steps >= num_steps:
        rule = f"the policy would never learn, must be less than trainer.num_steps={num_steps}"
        longer = f"trainer.num_steps={10 * num_warmup_steps}"
        yield error(config, key, rule, f"{key}={num_steps // 10}", longer)
    key = "trainer.profile_steps"
    if late := [step for step in config.trainer.profile_steps if step > num_steps]:
        rule = f"has step {late[0]}, and the run ends after trainer.num_steps={num_steps}"
        yield error(config, key, rule, f"{key}=[{num_steps}]", f"trainer.num_steps={late[0]}")


def check_rows_of_a_step(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows divide evenly over the data-parallel ranks, and hold no routes of experts."""
    size, num_ranks = config.trainer.num_prompts_per_step, config.num_train_groups
    if size % num_ranks:
        key, legal = "trainer.num_prompts_per_step", -(-size // num_ranks) * num_ranks
        rule = f"must be a multiple of {num_ranks} data-parallel ranks"
        yield error(config, key, rule, f"{key}={legal}")
    if config.actor.replay_routing:
        key = "actor.replay_routing"
        rule = f"mode={config.mode} learns from a file, which holds no routes of experts"
        yield error(config, key, rule, f"{key}=false")


def check_preferences(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of files have rejected answers, a loss its numbers; a value head has no adapter."""
    data, key = config.data, "data.rejected_key"
    columns = [source.rejected_key or data.rejected_key for source in data.sources.values()]
    if data.task is None and not all(columns or [data.rejected_key]):
        rule = f"mode={config.mode} learns from pairs of a chosen and a rejected answer"
        fix = (
            "set data=preferences for columns prompt, chosen and rejected; or data.rejected_key="
            "COLUMN, beside data.answer_key for the chosen answer"
        )
        yield error(config, key, rule, f"data.answer_key=chosen {key}=rejected", fix=fix)
    for kind, spelled, given in config.dpo.parts if config.mode == "dpo" else ():
        yield from check_part(config, kind, spelled, given)
    if config.mode == "reward_model" and config.lora.enabled:
        rule = "mode=reward_model trains all weights, as the critic does"
        yield error(config, "lora.enabled", rule, "lora=none")
