"""Rules about prompts that are begun in one phase and completed in a later one."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.checks.batch_sizes import BatchSizes
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.rollout import MOST_OVERSAMPLED
from hybridrl.errors import ConfigError

_KEY = "rollout.oversample"
_OFF = (f"{_KEY}=1",)


def check_oversample(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Open responses stay with the engines of the ranks, which ask for single responses."""
    rollout = config.rollout
    if not config.oversamples:
        return
    refusals = (
        (
            not config.agent.is_single_turn,
            f"agent.loop={config.agent.loop}: conversations are not interrupted; with "
            "rollout.oversample every response is a single turn",
        ),
        (
            config.has_servers,
            "serving.models has rollout engines on devices of their own: they need not stop for "
            "the longest response; set trainer.max_staleness instead",
        ),
        (
            rollout.routed_experts,
            "rollout.routed_experts=true: the experts of interrupted tokens are not kept",
        ),
        (
            rollout.dump or rollout.replay is not None,
            "rollout.dump and rollout.replay have all prompts of a call in one file, and here a "
            "call answers some of them",
        ),
    )
    for is_refused, rule in refusals:
        if is_refused:
            yield ConfigError(_KEY, rollout.oversample, rule, remedies=[_OFF])


def check_open_prompts_divide(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each rollout engine has as many open prompts as the others, and more than it completes."""
    if not config.oversamples or config.has_servers:
        return
    num_engines = BatchSizes.of(config).num_engines
    num_prompts, num_open = config.trainer.num_prompts_per_step, config.num_open_prompts
    if num_open % num_engines == 0 and num_open > num_prompts:
        return
    above = max(-(-num_open // num_engines), num_prompts // num_engines + 1) * num_engines
    is_too_much = above > MOST_OVERSAMPLED * num_prompts
    yield ConfigError(
        _KEY,
        config.rollout.oversample,
        f"{num_open} open prompts (of trainer.num_prompts_per_step={num_prompts}) must be a "
        f"multiple of {num_engines} rollout engines, and more than a step has",
        remedies=[_OFF] if is_too_much else [(f"{_KEY}={above / num_prompts}",), _OFF],
    )


RULES = (check_oversample, check_open_prompts_divide)
