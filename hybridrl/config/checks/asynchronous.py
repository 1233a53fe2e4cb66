"""Rules about responses that stay open between steps; docs/asynchronous.md."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.agent import PROXY
from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Attached, Own
from hybridrl.errors import ConfigError

_STALENESS = "trainer.max_staleness"
_OVERSAMPLE = "rollout.oversample"
_WEIGHED = "algorithm.rollout_correction=importance"
_CLIPPED = "algorithm.old_logprobs=sampler"
_MASK = "off_policy_mask"
_MASKED = f"algorithm.token_mask={_MASK}"


def check_sampling_ahead(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only engines on devices of their own sample while the trainer learns."""
    off = f"{_STALENESS}=0"
    if not config.trainer.max_staleness:
        return
    if config.rollout.replay is not None:
        yield error(config, _STALENESS, "rollout.replay samples nothing", off)
    elif not isinstance(config.topology, Own | Attached):
        rule = "the ranks of the policy have the rollout engines, which sleep while the ranks learn"
        yield error(config, _STALENESS, rule, off, f"serving=own rollout.sleep=false {_WEIGHED}")
    if config.rollout.dump:
        rule = "rollout.dump has all prompts of a call in one file, and here a call answers others"
        yield error(config, _STALENESS, rule, off)
    if config.agent.loop == PROXY:
        rule = f"agent.loop={PROXY} has one server for its programs, which ends with their step"
        yield error(config, _STALENESS, rule, off)


def check_oversampling(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Open responses stay with the engines of the ranks, which ask for single responses."""
    rollout, off = config.rollout, f"{_OVERSAMPLE}=1"
    if not config.oversamples:
        return
    if not config.agent.is_single_turn:
        rule = (
            f"agent.loop={config.agent.loop}: conversations are not interrupted; with "
            "rollout.oversample every response is a single turn"
        )
        yield error(config, _OVERSAMPLE, rule, off)
    if config.has_servers:
        rule = (
            "serving.models has rollout engines on devices of their own: they need not stop for "
            "the longest response; set trainer.max_staleness instead"
        )
        yield error(config, _OVERSAMPLE, rule, off)
    if rollout.routed_experts:
        rule = "rollout.routed_experts=true: the experts of interrupted tokens are not kept"
        yield error(config, _OVERSAMPLE, rule, off)
    if rollout.dump or rollout.replay is not None:
        rule = (
            "rollout.dump and rollout.replay have all prompts of a call in one file, and here a "
            "call answers some of them"
        )
        yield error(config, _OVERSAMPLE, rule, off)


def check_stale_tokens(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Tokens of earlier weights are corrected for, or it is said that they are not."""
    algorithm = config.algorithm
    if algorithm.rollout_correction is not None or algorithm.old_logprobs == "sampler":
        return
    if algorithm.token_mask == _MASK:
        return
    causes = [f"{_OVERSAMPLE}={config.rollout.oversample:g}"] if config.oversamples else []
    causes += [f"{_STALENESS}={config.trainer.max_staleness}"] if config.samples_ahead else []
    for cause in causes:
        rule = f"{cause} learns from tokens of earlier weights, and nothing corrects for it"
        fix = (
            f"set {_CLIPPED}, {_MASKED} or {_WEIGHED}; to leave them uncorrected, "
            f"{_WEIGHED} algorithm.rollout_correction_args.level=none"
        )
        key = "algorithm.rollout_correction"
        yield error(config, key, rule, _CLIPPED, _MASKED, _WEIGHED, fix=fix)


def check_updates_meet_open_responses(config: ExperimentConfig) -> Iterator[ConfigError]:
    """In a synchronous run no response is open when weights are loaded.

    Only a single response begins again as a unit: earlier turns of a conversation stay.
    """
    key, on_update = "serving.on_update", config.serving.on_update
    if on_update != "interrupt" and not config.samples_ahead:
        rule = f"would be ignored: {_STALENESS}=0 leaves no response open while weights are loaded"
        yield error(config, key, rule, f"{key}=interrupt")
    elif on_update == "abort" and not config.agent.is_single_turn:
        rule = (
            f"agent.loop={config.agent.loop} holds conversations, whose earlier turns and calls of "
            "tools cannot begin again"
        )
        yield error(config, key, rule, f"{key}=interrupt", f"{key}=finish")


RULES = (
    check_sampling_ahead,
    check_oversampling,
    check_stale_tokens,
    check_updates_meet_open_responses,
)
