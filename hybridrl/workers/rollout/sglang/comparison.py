"""The comparison of a server that runs elsewhere with the needs of its model.

A frozen model needs a server that has its weights; the policy one that takes them in each step. Its
facts are compared field by field; then it is asked for a token, in the form of all later requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import DeadlineError, EngineError, shown
from hybridrl.models.model_folder import read_settings
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.sampler import RequestParams
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sglang.arguments import CONTEXT_SLACK, ServingSpec
from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.sampling import HttpSampler, ServedModel
from hybridrl.workers.rollout.sglang.server import require_known_version

Json = Mapping[str, object]

_AUTO = "auto"
"""Type of the weights that a server takes from the model's folder; float16 for float32 there."""

_ALIASES = {"half": "float16", "float": "float32"}

_MADE_UP = "dummy"
"""Way of loading in which weights are random."""

CALL_S = 10.0
"""Seconds that the answer to a question may take that the server computes nothing for."""

BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors of reading an answer that has another form than SGLang's."""

REFUSED = (401, 403)
"""Statuses of a wrong key."""

_PROBE = RequestParams(max_new_tokens=1, temperature=1.0)
_NO_TOKEN = 2**31 - 1
_VOCAB_SIZE = re.compile(r"valid range is \[0, (\d+)\)")


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


def expect_policy_server(spec: ServingSpec, section: str) -> Expectations:
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
        require_known_version(server_info)
    except EngineError as error:
        return [str(error)]
    said = {**server_info, **model_info}
    lines = [line for check in (_model, _dtype, _context) for line in check(expected, said)]
    for field, legal, fix in _legal_values(expected):
        if field in said and said[field] not in legal:
            values = " or ".join(map(str, legal))
            lines.append(f"{field}={shown(said[field])}, must be {values}: {fix}")
    return lines


def _legal_values(expected: Expectations) -> Iterator[tuple[str, Sequence[object], str]]:
    """Yield the fields of which few values will do, with these and what to type."""
    yield "model_type", [expected.model_type], expected.model_remedy
    yield "is_generation", [True], "start it without --is-embedding"
    yield "quantization", [None], "start it without --quantization"
    yield "disaggregation_mode", ["null", None], "name the server of a model that answers alone"
    if expected.takes_weights:
        fix = "start it without --enable-lora and --lora-paths: it gets all weights"
        yield "enable_lora", [None, False], fix
    if expected.has_experts:
        fix = "start it with --enable-return-routed-experts, or set rollout.routed_experts=false"
        yield "enable_return_routed_experts", [True], fix
    if expected.by_broadcast:
        for field, option in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
            fix = f"start one server for each without {option}, or set serving.weights=files"
            yield field, [1, None], fix


def _model(expected: Expectations, said: Json) -> Iterator[str]:
    if expected.takes_weights:
        return
    path, served_name = str(said.get("model_path", "")), said.get("served_model_name")
    if expected.name not in (path.rstrip("/").rpartition("/")[2], served_name):
        yield (
            f"model_path={shown(path)}, must end with {expected.name}: set {expected.key}.path to "
            f"a copy of its model, or start it with --served-model-name {expected.name} if it is "
            "the same"
        )
    if said.get("load_format") == _MADE_UP:
        yield f"load_format={_MADE_UP}: its weights are random; start it without --load-format"


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


class Questions:
    """Asks one server, on the loop of its client."""

    def __init__(
        self, client: ControlClient, expected: Expectations, *, has_key: bool, timeout_s: float
    ) -> None:
        """Ask nothing yet.

        Args:
            has_key: whether the client sends a key.
            timeout_s: seconds until it must have computed a token (``rollout.stage_timeout_s``).
        """
        self._client = client
        self._expected = expected
        self._has_key = has_key
        self._timeout_s = timeout_s

    async def facts(self) -> tuple[object, object]:
        """Return its answers to ``/server_info`` and ``/model_info``.

        Raises:
            EngineError: it does not answer, or refuses; see ``advice``.
            DeadlineError: it is too slow.
        """
        get = partial(self._client.request, timeout_s=CALL_S, method="GET")
        server_info, model_info = await asyncio.gather(get("/server_info"), get("/model_info"))
        return server_info, model_info

    def advice(self, error: Exception) -> str:
        """Return a remedy for a question without an answer."""
        key = f"{self._expected.key}.key_variable"
        if isinstance(error, RefusedError) and error.status in REFUSED:
            if self._has_key:
                return f"it refuses the key (status {error.status}): correct the variable of {key}"
            return f"it requires a key: set {key} to the environment variable that has it"
        return f"{error}: start it, or correct {self._expected.key}.urls"

    async def unlike_in_use(self, model_info: object) -> list[str]:
        """Ask for tokens.

        Args:
            model_info: its last answer to ``/model_info``.

        Returns:
            A line if its vocabulary is another one, or if it does not answer as it should.
        """
        return await self._unlike_a_vocabulary() or await self._unlike_an_answer(model_info)

    async def _unlike_a_vocabulary(self) -> list[str]:
        """Ask for the log-prob of a token that no model has: the refusal names the range."""
        try:
            await self._client.request(
                "/generate",
                {
                    "input_ids": [0],
                    "sampling_params": {"max_new_tokens": 1},
                    "return_logprob": True,
                    "token_ids_logprob": [_NO_TOKEN],
                },
                timeout_s=self._timeout_s,
            )
        except RefusedError as error:
            size = _VOCAB_SIZE.search(error.text)
            if size is not None and int(size[1]) != self._expected.vocab_size:
                return [
                    f"vocab_size={size[1]}, must be {self._expected.vocab_size}: "
                    f"{self._expected.model_remedy}"
                ]
        except (EngineError, DeadlineError) as error:
            return [self.advice(error)]
        return []

    async def _unlike_an_answer(self, model_info: object) -> list[str]:
        """Ask for a token with its log-prob, in the form of all later requests."""
        version = model_info.get("weight_version") if isinstance(model_info, Mapping) else None
        model = ServedModel(
            max_context_tokens=self._expected.max_context_tokens,
            vocab_size=self._expected.vocab_size,
            version=0,
            weight_version=str(version),
        )
        sampler = HttpSampler(self._client, model, ProgramCall(), timeout_s=self._timeout_s)
        reason = ""
        try:
            async with asyncio.timeout(self._timeout_s), sampler:  # others may keep it busy
                await sampler.sample_group([0], _PROBE, keys=[0])
        except (EngineError, DeadlineError) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no token within rollout.stage_timeout_s={self._timeout_s:g} s"
        except BROKEN as error:
            reason = other_form(self._client.base_url, error)
        if not reason:
            return []
        return [f"it does not answer a request for a token with its log-prob: {reason}"]


def other_form(url: str, error: Exception) -> str:
    """Say that an answer has another form than SGLang's: ``error`` is of ``BROKEN``."""
    return f"{url} answered in another form than SGLang's ({type(error).__name__})"
