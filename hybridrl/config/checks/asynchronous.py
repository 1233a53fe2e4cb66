"""Rules about runs whose engines sample ahead of the trainer; docs/asynchronous.md."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.agent import PROXY
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_KEY = "trainer.max_staleness"
_OFF = (f"{_KEY}=0",)
_WEIGHED = "algorithm.rollout_correction=importance"
_CLIPPED = "algorithm.old_logprobs=sampler"
_MASK = "off_policy_mask"
_MASKED = f"algorithm.token_mask={_MASK}"


def check_engines_can_sample_ahead(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only engines on devices of their own sample while the trainer learns."""
    steps = config.trainer.max_staleness
    if not steps:
        return
    if config.has_fused_engines or not config.has_own_engines:
        rule = "the ranks of the policy have the rollout engines, which sleep while the ranks learn"
        remedies: list[tuple[str, ...]] = [_OFF]
        if config.rollout.replay is not None:
            rule = "rollout.replay samples nothing"
        else:
            remedies.append(("serving=own", "rollout.sleep=false", _WEIGHED))
        yield ConfigError(_KEY, steps, rule, remedies=remedies)
    refusals = (
        (
            config.rollout.dump,
            "rollout.dump has all prompts of a call in one file, and here a call answers others",
        ),
        (
            config.agent.loop == PROXY,
            f"agent.loop={PROXY} has one server for its programs, which ends with their step",
        ),
    )
    for is_refused, rule in refusals:
        if is_refused:
            yield ConfigError(_KEY, steps, rule, remedies=[_OFF])


def check_stale_tokens_are_corrected(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Tokens of earlier weights are corrected for, or it is said that they are not."""
    algorithm = config.algorithm
    if algorithm.rollout_correction is not None or algorithm.old_logprobs == "sampler":
        return
    if algorithm.token_mask == _MASK:
        return
    causes = (
        (config.oversamples, f"rollout.oversample={config.rollout.oversample:g}"),
        (config.samples_ahead, f"{_KEY}={config.trainer.max_staleness}"),
    )
    for is_cause, setting in causes:
        if is_cause:
            yield ConfigError(
                "algorithm.rollout_correction",
                None,
                f"{setting} learns from tokens of earlier weights, and nothing corrects for it",
                remedies=[(_CLIPPED,), (_MASKED,), (_WEIGHED,)],
                fix=f"set {_CLIPPED}, {_MASKED} or {_WEIGHED}; to leave them uncorrected, "
                f"{_WEIGHED} algorithm.rollout_correction_args.level=none",
            )


def check_updates_meet_open_responses(config: ExperimentConfig) -> Iterator[ConfigError]:
    """In a synchronous run no response is open when weights are loaded.

    Only a single response begins again as a unit: earlier turns of a conversation stay.
    """
    on_update = config.serving.on_update
    if on_update != "interrupt" and not config.samples_ahead:
        yield ConfigError(
            "serving.on_update",
            on_update,
            f"would be ignored: {_KEY}=0 leaves no response open while weights are loaded",
            remedies=[("serving.on_update=interrupt",)],
        )
    elif on_update == "abort" and not config.agent.is_single_turn:
        yield ConfigError(
            "serving.on_update",
            on_update,
            f"agent.loop={config.agent.loop} holds conversations, whose earlier turns and calls of "
            "tools cannot begin again",
            remedies=[("serving.on_update=interrupt",), ("serving.on_update=finish",)],
        )


RULES = (
    check_engines_can_sample_ahead,
    check_stale_tokens_are_corrected,
    check_updates_meet_open_responses,
)
