"""Rules about the parts of an algorithm: they exist, can be called, and have the given numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from hybridrl.config import parts
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.signatures import SignatureError, check_numbers
from hybridrl.errors import ConfigError

_KEYS_OF_NUMBERS = {
    (parts.POLICY_LOSS.key, "clip_low"): "algorithm.clip_low",
    (parts.POLICY_LOSS.key, "clip_high"): "algorithm.clip_high",
    (parts.PREFERENCE_LOSS.key, "beta"): "dpo.beta",
}
"""Numbers that have a key of their own."""


def check_parts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A part is built in, or a function in a file, and has the numbers that are given to it."""
    for kind, spelled, given in config.algorithm.parts:
        yield from check_part(kind, spelled, given)


def check_part(
    kind: parts.PartKind, spelled: str, given: Mapping[str, ArgumentValue]
) -> Iterator[ConfigError]:
    """Yield the violations of one part: of its name, or of the numbers that are given to it."""
    try:
        signature = kind.read(spelled)
    except SignatureError as error:
        remedies = [(f"{kind.key}={name}",) for name in list(kind.built_in)[:1]]
        yield ConfigError(kind.key, spelled, error.rule, error.fix, remedies=remedies)
        return
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
        (parts.ROW_FILTER, algorithm.row_filter, algorithm.row_filter_args),
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
    return _KEYS_OF_NUMBERS.get((kind.key, name), f"{kind.args_key or kind.key}.{name}")


def _removing(kind: parts.PartKind, name: str) -> str:
    key = _key_of(kind, name)
    return f"{key}=null" if (kind.key, name) in _KEYS_OF_NUMBERS else f"~{key}"


RULES = (check_parts, check_args_are_read)
