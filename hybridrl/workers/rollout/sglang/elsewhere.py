"""Servers that others started: compared with the needs of a model, and the policy's, left running.

A frozen model needs a server that has its weights; the policy one that takes them in each step. Its
facts are compared field by field; then it is asked for a token, in the form of all later requests.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.rollout import FLUSH_TIMEOUT_S
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    ExternalServersError,
    ServerDiedError,
    shown,
)
from hybridrl.models.model_folder import read_settings, vision_settings
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.sampler import RequestParams
from hybridrl.workers.rollout.event_loop import ProgramCall
from hybridrl.workers.rollout.sglang.arguments import CONTEXT_SLACK, Elsewhere, ServingSpec
from hybridrl.workers.rollout.sglang.client import (
    ConnectionLostError,
    ControlCalls,
    ControlClient,
    RefusedError,
)
from hybridrl.workers.rollout.sglang.sampling import HttpSampler, ServedModel
from hybridrl.workers.rollout.sglang.server import Json, require_known_version

_CALL_S = 10.0
"""Seconds that the answer to a question may take that the server computes nothing for."""

BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors of reading an answer that has another form than SGLang's."""

_REFUSED = (401, 403)
"""Statuses of a wrong key."""

_VOCAB_SIZE = re.compile(r"valid range is \[0, (\d+)\)")

_APPEARS_S = 20.0
"""Seconds until a server must listen: one that was ended may be about to start again."""

_POLL_S = 0.5
_NUM_LOST = 3
"""Connections that fail in a row before a server counts as gone."""

_LEAVE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectations:
    """The needs of a model: a server that answers for it must meet all."""

    key: str  # of the model in the configuration
    name: str  # the last part of its folder's path; empty for the policy: the server gets weights
    model_type: str
    vocab_size: int
    dtype: str  # type of the run's engines
    own_dtype: str  # type that its authors gave its weights; empty if they name none
    max_context_tokens: int
    takes_weights: bool = False  # whether it is the policy's: all weights in ``dtype``, no adapter
    by_broadcast: bool = False  # whether they reach it through a process group
    has_experts: bool = False  # whether answers must have the experts of each token

    @property
    def model_remedy(self) -> str:
        """How to bring model and server together."""
        if self.takes_weights:
            return "start it with the model of model.path"
        return f"set {self.key}.path to its model"


def expect_policy_server(spec: ServingSpec, section: str) -> Expectations:
    """Return the needs of the policy, whose configuration key is ``section``."""
    settings = read_settings(spec.model_folder)
    return Expectations(
        key=section,
        name="",
        model_type=_served_type(spec.model_folder),
        vocab_size=settings["vocab_size"],
        dtype=spec.rollout.dtype,
        own_dtype="",
        max_context_tokens=spec.max_context_tokens,
        takes_weights=True,
        by_broadcast=spec.by_broadcast,
        has_experts=spec.returns_experts,
    )


def expect_server(config: ExperimentConfig, model: str) -> Expectations:
    """Return the needs of a frozen model of ``serving.models``."""
    folder = Path(str(config.serving.models[model].path))
    settings = read_settings(folder)
    return Expectations(
        key=f"serving.models.{model}",
        name=folder.name,
        model_type=_served_type(folder),
        vocab_size=settings["vocab_size"],
        dtype=config.rollout.dtype,
        own_dtype=str(settings.get("dtype") or settings.get("torch_dtype") or ""),
        max_context_tokens=max_context_tokens(config, model),
    )


def _served_type(folder: Path) -> str:
    """Return the ``model_type`` that a server of a folder names: of both parts if it sees."""
    own = str(read_settings(folder)["model_type"])
    return own if vision_settings(folder) is None else own.removesuffix("_text")


def differences(expected: Expectations, server_info: Json, model_info: Json) -> list[str]:
    """Return a line for each difference: field, value, what it must be, what to type.

    ``/model_info`` is newer where ``/server_info`` has a field, too. A field that this release of
    SGLang does not have is not compared.
    """
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
        fix = "start it with --enable-return-routed-experts, or set actor.replay_routing=false"
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
    if said.get("load_format") == "dummy":
        yield "load_format=dummy: its weights are random; start it without --load-format"


def _dtype(expected: Expectations, said: Json) -> Iterator[str]:
    given = str(said.get("dtype", expected.dtype))
    own = expected.own_dtype or expected.dtype
    effective = {"half": "float16", "float": "float32"}.get(given, given)
    if given == "auto" and not expected.takes_weights:  # that of the folder, if it is known here
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
            other = "lower data.max_prompt_tokens, or max_response_tokens of rollout or eval"
        yield (
            f"max_req_input_len={longest} tokens, must be at least {expected.max_context_tokens}: "
            f"start it with --context-length {expected.max_context_tokens + CONTEXT_SLACK} and "
            f"room for as many tokens, or {other}"
        )


@dataclass(frozen=True, slots=True)
class Questions:
    """Asks one server, on the loop of its client."""

    client: ControlClient
    expected: Expectations

    timeout_s: float  # seconds until it must have computed a token (``rollout.stage_timeout_s``)

    async def facts(self) -> tuple[Json, Json]:
        """Return its answers to ``/server_info`` and ``/model_info``; errors are for ``advice``."""
        get = partial(self.client.request, timeout_s=_CALL_S, method="GET")
        server_info, model_info = await asyncio.gather(get("/server_info"), get("/model_info"))
        if not isinstance(server_info, Mapping) or not isinstance(model_info, Mapping):
            raise EngineError("it is no SGLang: its answers are no JSON objects")
        return server_info, model_info

    def advice(self, error: Exception) -> str:
        """Return a remedy for a question without an answer."""
        key = f"{self.expected.key}.key_variable"
        if isinstance(error, RefusedError) and error.status in _REFUSED:
            if self.client.key:
                return f"it refuses the key (status {error.status}): correct the variable of {key}"
            return f"it requires a key: set {key} to the environment variable that has it"
        return f"{error}: start it, or correct {self.expected.key}.urls"

    async def unlike_in_use(self, weight_version: str) -> list[str]:
        """Ask for tokens; return a line if its vocabulary or its answer are not as they should."""
        return await self._unlike_a_vocabulary() or await self._unlike_an_answer(weight_version)

    async def _unlike_a_vocabulary(self) -> list[str]:
        """Ask for the log-prob of a token that no model has: the refusal names the range."""
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
        }
        try:
            await self.client.request("/generate", body, timeout_s=self.timeout_s)
        except RefusedError as error:
            size = _VOCAB_SIZE.search(error.text)
            if size is not None and int(size[1]) != self.expected.vocab_size:
                return [
                    f"vocab_size={size[1]}, must be {self.expected.vocab_size}: "
                    f"{self.expected.model_remedy}"
                ]
        except (EngineError, DeadlineError) as error:
            return [self.advice(error)]
        return []

    def sampler(self, weight_version: str, *, timeout_s: float) -> HttpSampler:
        """Return a sampler of the server's model, whose weights have this name."""
        model = ServedModel(
            max_context_tokens=self.expected.max_context_tokens,
            vocab_size=self.expected.vocab_size,
            version=0,
            weight_version=weight_version,
        )
        return HttpSampler(self.client, model, ProgramCall(), timeout_s=timeout_s)

    async def _unlike_an_answer(self, weight_version: str) -> list[str]:
        """Ask for a token with its log-prob, in the form of all later requests."""
        sampler = self.sampler(weight_version, timeout_s=self.timeout_s)
        params = RequestParams(max_new_tokens=1, temperature=1.0)
        try:
            async with asyncio.timeout(self.timeout_s), sampler:  # others may keep it busy
                await sampler.sample_group([0], params, keys=[0])
        except (EngineError, DeadlineError) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no token within rollout.stage_timeout_s={self.timeout_s:g} s"
        except BROKEN as error:
            reason = other_form(self.client.base_url, error)
        else:
            return []
        return [f"it does not answer a request for a token with its log-prob: {reason}"]


def other_form(url: str, error: Exception) -> str:
    """Say that an answer has another form than SGLang's: ``error`` is of ``BROKEN``."""
    return f"{url} answered in another form than SGLang's ({type(error).__name__})"


class AttachedServer(ControlCalls):
    """A server that gets the policy's weights, under names that no other attachment has."""

    def __init__(self, spec: ServingSpec, elsewhere: Elsewhere) -> None:
        """Compare it, and stop it until it gets weights.

        An ExternalServersError has a line for each difference, and leaves the server as it was; a
        DeadlineError: requests of others do not end.
        """
        super().__init__(spec)
        self._may_be_paused = False
        self.client = ControlClient(
            elsewhere.url.rstrip("/"), name=f"SGLang at {elsewhere.url}", key=elsewhere.key
        )
        begin = time.monotonic()
        try:
            self._compare(expect_policy_server(spec, elsewhere.section))
            self._may_be_paused = True
            self.hold(timeout_s=FLUSH_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - begin

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.base_url

    def has_died(self) -> bool:
        """Whether it could not be reached several times in a row: its process is not seen here."""
        return self.client.num_lost >= _NUM_LOST

    def require_alive(self, what: str) -> None:
        """Raise if it could not be reached several times in a row."""
        if self.has_died():
            raise ServerDiedError(f"{what}: {self.url}, which others run, does not answer")

    def end(self) -> None:
        """Let it serve others, and close the connections. Idempotent."""
        if self._may_be_paused and not self.has_died():
            with suppress(EngineError, DeadlineError):
                self.client.call("/continue_generation", {}, timeout_s=_LEAVE_S)
        self._may_be_paused = False
        self.client.close()

    # -- comparison ------------------------------------------------------------------------------

    def _compare(self, expected: Expectations) -> None:
        questions = Questions(self.client, expected, self._timeout_s)
        server_info, model_info = self._facts(questions)
        lines = differences(expected, server_info, model_info)
        if not lines:
            self.info = dict(server_info)
            self.num_ranks = int(self.info.get("tp_size") or 1)
            self._weight_version = str(model_info.get("weight_version"))
            lines = self._unusable() or self.client.run(
                questions.unlike_in_use(self._weight_version)
            )
        if lines:
            raise ExternalServersError("\n".join(f"{self.url}: {line}" for line in lines))

    def _facts(self, questions: Questions) -> tuple[Json, Json]:
        """Ask what it is, as soon as it listens."""
        deadline = time.monotonic() + _APPEARS_S
        while True:
            try:
                return self.client.run(questions.facts())
            except (EngineError, DeadlineError) as error:
                is_gone = isinstance(error, ConnectionLostError)
                if not is_gone or time.monotonic() > deadline:
                    line = f"{self.url}: {questions.advice(error)}"
                    raise ExternalServersError(line) from error
            time.sleep(_POLL_S)

    def _unusable(self) -> list[str]:
        """Return why it cannot be moved along the life cycle; it serves again if it was paused."""
        try:
            self.post("/continue_generation")
            with suppress(RefusedError):  # no update is open, as that of a run that was killed
                self.post("/end_weight_update")
        except (EngineError, DeadlineError) as error:
            if isinstance(error, RefusedError) and error.status in _REFUSED:
                return [
                    "its control routes refuse the key: start it with --api-key alone, without "
                    "--admin-api-key"
                ]
            return [str(error)]
        return []

    # -- weights ---------------------------------------------------------------------------------

    def version_name(self, version: int) -> str:
        """Return the server's name of the weights of a policy version: of this attachment alone."""
        return f"{self.name}-{version}"

    def begin_update(self) -> None:
        """Mark the server, so that another run that updates it meanwhile is noticed. Idempotent."""
        mark = f"{self.name}-update"
        if self._weight_version != mark:
            self.stamp(mark)

    def stamp(self, name: str) -> None:
        """Name the weights of all later responses; a DriftError if somebody else updated it."""
        answer = self.client.call("/model_info", timeout_s=_CALL_S, method="GET")
        version = str(answer.get("weight_version")) if isinstance(answer, dict) else "unknown"
        if version != self._weight_version:
            raise DriftError(
                f"{self.url}: weight_version={version}, must be {self._weight_version}: it was "
                "started again, or somebody else updates it; a server takes the weights of one run"
            )
        super().stamp(name)
        self._weight_version = name

    def load_folder(self, folder: Path, *, load_format: str) -> None:
        """Load all weights of a folder; see ``ControlCalls``."""
        try:
            super().load_folder(folder, load_format=load_format)
        except ConnectionLostError:
            raise
        except EngineError as error:
            raise EngineError(
                f"{self.url}: {error}; it must see the same folder ({folder}): point TMPDIR at a "
                "disk that both share, start it as the same user, or set serving.weights=broadcast"
            ) from error
