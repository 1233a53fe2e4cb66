"""The comparison of a server that runs elsewhere with the needs of its model, field by field.

A frozen model needs a server that has its weights; the policy one that takes them in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import EngineError, shown
from hybridrl.models.model_folder import read_settings
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.workers.rollout.sglang.arguments import CONTEXT_SLACK, ServerSpec
from hybridrl.workers.rollout.sglang.capabilities import read_capabilities

Json = Mapping[str, object]

_AUTO = "auto"
"""Type of the weights that a server takes from the model's folder; float16 for float32 there."""

_NAMES_VOCABULARY = (0, 5, 21)
_ALIASES = {"half": "float16", "float": "float32"}

_MADE_UP = "dummy"
"""Way of loading in which weights are random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectations:
    """The needs of a model: a server that answers for it must meet all."""

    key: str
    """Of the model in the configuration."""

    name: str
    """Of the model: the last part of its folder's path. Empty for the policy, whose weights the
    server gets."""

    model_type: str
    vocab_size: int

    dtype: str
    """Type of the run's engines."""

    own_dtype: str
    """Type that its authors gave its weights; empty if they name none."""

    max_context_tokens: int

    takes_weights: bool = False
    """Whether it is the policy's: it gets all weights, in ``dtype``, and no adapter."""

    by_broadcast: bool = False
    """Whether they reach it through a process group."""

    has_experts: bool = False
    """Whether answers must have the experts of each token."""

    @property
    def model_remedy(self) -> str:
        """How to bring model and server together."""
        if self.takes_weights:
            return "start it with the model of model.path"
        return f"set {self.key}.path to its model"


def expect_policy_server(spec: ServerSpec, section: str) -> Expectations:
    """Return the needs of the policy.

    Args:
        section: configuration key of the model.

    Raises:
        ModelError: config.json of its folder cannot be read.
    """
    settings = read_settings(spec.model_folder)
    return Expectations(
        key=section,
        name="",
        model_type=settings["model_type"],
        vocab_size=settings["vocab_size"],
        dtype=spec.rollout.dtype,
        own_dtype="",
        max_context_tokens=spec.max_context_tokens,
        takes_weights=True,
        by_broadcast=spec.by_broadcast,
        has_experts=spec.rollout.routed_experts,
    )


def expect_server(config: ExperimentConfig, model: str) -> Expectations:
    """Return the needs of a frozen model.

    Args:
        model: name in ``serving.models``.

    Raises:
        ModelError: config.json of its folder cannot be read.
    """
    folder = Path(str(config.serving.models[model].path))
    settings = read_settings(folder)
    return Expectations(
        key=f"serving.models.{model}",
        name=folder.name,
        model_type=settings["model_type"],
        vocab_size=settings["vocab_size"],
        dtype=config.rollout.dtype,
        own_dtype=str(settings.get("dtype") or settings.get("torch_dtype") or ""),
        max_context_tokens=max_context_tokens(config, model),
    )


def differences(expected: Expectations, server_info: object, model_info: object) -> list[str]:
    """Compare a server with what is needed.

    Args:
        server_info: answer of ``/server_info``.
        model_info: answer of ``/model_info``; it is newer where both have a field.

    Returns:
        A line for each difference: field, value, what it must be, what to type. A field that this
        release of SGLang does not have is not compared.
    """
    if not isinstance(server_info, Mapping) or not isinstance(model_info, Mapping):
        return ["it is no SGLang: its answers are no JSON objects; correct the URL"]
    try:
        read_capabilities(server_info, None)
    except EngineError as error:
        return [str(error)]
    said = {**server_info, **model_info}
    return [line for check in _CHECKS for line in check(expected, said)]


def names_vocabulary(server_info: object) -> bool:
    """Whether a server refuses a token beyond its vocabulary, and names the range of legal ones.

    Older releases read memory that is not the model's.
    """
    version = server_info.get("version") if isinstance(server_info, Mapping) else None
    numbers = tuple(map(int, re.findall(r"\d+", str(version))[:3]))
    return numbers >= _NAMES_VOCABULARY


def _model(expected: Expectations, said: Json) -> Iterator[str]:
    path, served_name = str(said.get("model_path", "")), said.get("served_model_name")
    if not expected.takes_weights and expected.name not in (
        path.rstrip("/").rpartition("/")[2],
        served_name,
    ):
        yield (
            f"model_path={shown(path)}, must end with {expected.name}: set {expected.key}.path to "
            f"a copy of its model, or start it with --served-model-name {expected.name} if it is "
            "the same"
        )


def _model_type(expected: Expectations, said: Json) -> Iterator[str]:
    yield from _require(said, "model_type", [expected.model_type], expected.model_remedy)


def _generates(expected: Expectations, said: Json) -> Iterator[str]:
    yield from _require(said, "is_generation", [True], "start it without --is-embedding")


def _dtype(expected: Expectations, said: Json) -> Iterator[str]:
    given = str(said.get("dtype", expected.dtype))
    own = expected.own_dtype or expected.dtype
    effective = _ALIASES.get(given, given)
    if given == _AUTO and not expected.takes_weights:  # else its folder is not known here
        effective = "float16" if own == "float32" else own
    if effective not in (expected.dtype, own):
        legal = " or ".join(dict.fromkeys((own, expected.dtype)))
        meaning = f"dtype={given}" + (f", which is {effective}" if given != effective else "")
        yield f"{meaning}, must be {legal}: start it with --dtype {own}"


def _quantization(expected: Expectations, said: Json) -> Iterator[str]:
    yield from _require(said, "quantization", [None], "start it without --quantization")


def _load_format(expected: Expectations, said: Json) -> Iterator[str]:
    if said.get("load_format") == _MADE_UP and not expected.takes_weights:
        yield f"load_format={_MADE_UP}: its weights are random; start it without --load-format"


def _disaggregation(expected: Expectations, said: Json) -> Iterator[str]:
    fix = "name the server of a model that answers alone"
    yield from _require(said, "disaggregation_mode", ["null", None], fix)


def _context(expected: Expectations, said: Json) -> Iterator[str]:
    longest = said.get("max_req_input_len", said.get("context_length"))
    if isinstance(longest, int) and longest < expected.max_context_tokens:
        other = f"set {expected.key}.max_context_tokens={longest}"
        if expected.takes_weights:
            other = "lower data.max_prompt_tokens or rollout.max_response_tokens"
        yield (
            f"max_req_input_len={longest} tokens, must be at least {expected.max_context_tokens}: "
            f"start it with --context-length {expected.max_context_tokens + CONTEXT_SLACK} and "
            f"room for as many tokens, or {other}"
        )


def _adapters(expected: Expectations, said: Json) -> Iterator[str]:
    if expected.takes_weights:
        fix = "start it without --enable-lora and --lora-paths: it gets all weights"
        yield from _require(said, "enable_lora", [None, False], fix)


def _experts(expected: Expectations, said: Json) -> Iterator[str]:
    if expected.has_experts:
        fix = "start it with --enable-return-routed-experts, or set rollout.routed_experts=false"
        yield from _require(said, "enable_return_routed_experts", [True], fix)


def _ranks(expected: Expectations, said: Json) -> Iterator[str]:
    for field, option in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
        if expected.by_broadcast:
            fix = f"start one server for each without {option}, or set serving.weights=files"
            yield from _require(said, field, [1, None], fix)


def _require(said: Json, field: str, legal: Sequence[object], fix: str) -> Iterator[str]:
    if field in said and said[field] not in legal:
        values = " or ".join(map(str, legal))
        yield f"{field}={shown(said[field])}, must be {values}: {fix}"


_CHECKS: Sequence[Callable[[Expectations, Json], Iterator[str]]] = (
    *(_model, _model_type, _generates, _dtype, _quantization, _load_format),
    *(_disaggregation, _context, _adapters, _experts, _ranks),
)
