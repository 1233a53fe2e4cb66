"""Rules about the parts of an algorithm: they exist, can be called, and have the given numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hybridrl.config import parts
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.signatures import SignatureError, check_numbers
from hybridrl.errors import ConfigError

_CLIP = ("clip_low", "clip_high")


def check_parts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A part is built in, or a function in a file, and has the numbers that are given to it."""
    for kind, spelled, given in config.algorithm.parts:
        try:
            signature = kind.read(spelled)
        except SignatureError as error:
            remedies = [(f"{kind.key}={name}",) for name in list(kind.built_in)[:1]]
            yield ConfigError(kind.key, spelled, error.rule, error.fix, remedies=remedies)
            continue
        yield from check_numbers(
            signature,
            given,
            function=spelled,
            key_of=partial(_key_of, kind),
            removing=partial(_removing, kind),
        )


def check_args_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Numbers of a part need the part."""
    algorithm = config.algorithm
    for kind, part, args in (
        (parts.TOKEN_MASK, algorithm.token_mask, algorithm.token_mask_args),
        (parts.ROLLOUT_CORRECTION, algorithm.rollout_correction, algorithm.rollout_correction_args),
        (parts.GROUP_FILTER, algorithm.group_filter, algorithm.group_filter_args),
    ):
        if part is None and args:
            remedies = [tuple(f"~{kind.args_key}.{name}" for name in args)]
            rule = f"would be ignored, because {kind.key}=null"
            yield ConfigError(str(kind.args_key), dict(args), rule, remedies=remedies)
    if algorithm.group_filter is None and algorithm.max_sampling_rounds > 1:
        yield ConfigError(
            "algorithm.max_sampling_rounds",
            algorithm.max_sampling_rounds,
            "would be ignored, because algorithm.group_filter=null",
            remedies=[
                ("algorithm.max_sampling_rounds=1",),
                ("algorithm.group_filter=zero_variance",),
            ],
        )


def _key_of(kind: parts.PartKind, name: str) -> str:
    return f"algorithm.{name}" if _is_clip(kind, name) else f"{kind.args_key or kind.key}.{name}"


def _removing(kind: parts.PartKind, name: str) -> str:
    key = _key_of(kind, name)
    return f"{key}=null" if _is_clip(kind, name) else f"~{key}"


def _is_clip(kind: parts.PartKind, name: str) -> bool:
    return kind is parts.POLICY_LOSS and name in _CLIP


RULES = (check_parts, check_args_are_read)
