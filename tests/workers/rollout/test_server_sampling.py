from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from aiohttp import web

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Metrics
from hybridrl.sampler import Program, Sample, Sampler, SamplingParams, response_keys
from hybridrl.workers.rollout.event_loop import RequestGate, run_program
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.pairing import EncodedEndpoint, PairedEndpoint
from hybridrl.workers.rollout.sglang.sampling import HttpSampler, ServedModel, read_sample
from hybridrl.workers.rollout.single_turn import single_turn
from tests.workers.rollout.answering import Answer, Answering, Body, answering
from tests.workers.rollout.engines import prompt_batch, tokens_of


def item(prompt: list[int], parameters: Body, *, finish: str = "length") -> Body:
    """The answer to one response: its tokens are the prompt's first one, over and over."""
    tokens = [prompt[0]] * parameters["max_new_tokens"]
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish, "message": "Aborted"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "cached_tokens": len(prompt) - 1,
            "spec_num_correct_drafts": 1,  # as with speculation
            "spec_num_proposed_drafts": 4,
            "weight_version": "5",
        },
    }


class Samples:
    """Answers /generate; ``finish`` says why a response ended, by seed and how often it came."""

    def __init__(self, finish: Callable[[int, int], str]) -> None:
        self._finish = finish
        self.times: Counter[int] = Counter()

    async def __call__(self, _: str, body: Body) -> web.StreamResponse:
        parameters = body["sampling_params"]
        if isinstance(parameters, dict):
            return web.json_response(item(body["input_ids"], parameters))
        answers = []
        for prompt, wanted in zip(body["input_ids"], parameters, strict=True):
            seed = wanted["sampling_seed"]
            self.times[seed] += 1
            answers.append(item(prompt, wanted, finish=self._finish(seed, self.times[seed])))
        return web.json_response(answers)


SAMPLING = SamplingParams(
    num_responses_per_prompt=3, max_response_tokens=4, temperature=1.0, stop_token_ids=(9,)
)
Run = Callable[[], tuple[list[Sample], Metrics]]
PROMPTS = prompt_batch([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], [70, 80])
A_B = [[1, 2, 3], [4, 5]]
SINGLE_TURN = single_turn(PROMPTS, SAMPLING)
MODEL = ServedModel(max_context_tokens=6, vocab_size=64, version=5)
TOKENS = [[1] * 3] * 3 + [[4] * 4] * 3
"""Of all responses that end for their length."""


def always(reason: str) -> Samples:
    return Samples(lambda _, __: reason)


def sample_at(
    endpoint: Any,
    model: ServedModel,
    *,
    gate: RequestGate | None = None,
    program: Program[list[Sample]] = SINGLE_TURN,
    timeout_s: float = 30.0,
) -> tuple[list[Sample], Metrics]:
    with (gate or RequestGate()).admit() as call:
        sampler = HttpSampler(endpoint, model, call, timeout_s=timeout_s)

        async def connected(_: Sampler) -> list[Sample]:
            async with sampler:
                return await program(sampler)

        return run_program(connected, sampler, call), sampler.take_metrics()


@contextmanager
def sampling_from(
    answer: Callable[[str, Body], Any], *, version: int = 5, **asked: Any
) -> Iterator[tuple[Answering, Run]]:
    model = replace(MODEL, version=version, names_adapter=True)
    with answering(answer) as server:
        client = ControlClient(server.url, name="the server", require_alive=lambda _: None)
        with closing(client):
            yield server, lambda: sample_at(client, model, **asked)


@pytest.mark.shows("4.20")
def test_a_group_is_prefilled_once_and_its_responses_have_the_embedded_engines_seeds() -> None:
    with sampling_from(always("length")) as (server, run):
        responses, metrics = run()
    bodies = [body for _, body in server.asked]
    prefills = [body for body in bodies if isinstance(body["sampling_params"], dict)]
    wholes = [body for body in bodies if isinstance(body["sampling_params"], list)]
    assert sorted(body["input_ids"] for body in prefills) == A_B
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in prefills)
    assert all(body["lora_path"] == "policy-5" for body in bodies)
    seeds = [
        sorted((tokens[0], each["sampling_seed"]) for tokens, each in zip(*group, strict=True))
        for group in ((body["input_ids"], body["sampling_params"]) for body in wholes)
    ]
    keys = response_keys(PROMPTS.seed_P.repeat_interleave(3), torch.arange(3).repeat(2))
    expected = [int(key) & 0x7FFFFFFF for key in keys]
    assert len(set(expected)) == 6
    of_groups = ([(1, seed) for seed in expected[:3]], [(4, seed) for seed in expected[3:]])
    assert sorted(seeds) == [sorted(group) for group in of_groups]
    assert tokens_of(responses) == TOKENS
    assert all(r.is_truncated for r in responses)
    assert metrics["rollout/prefix_cache_hit_fraction"].value == pytest.approx(9 / 15)
    assert metrics["rollout/draft_acceptance_fraction"].value == 0.25


def test_equal_contexts_of_several_tasks_are_prefilled_once() -> None:
    params = SAMPLING.request_params()

    async def siblings(sampler: Sampler) -> list[Sample]:
        work = [sampler.sample(context, params, key=key) for context in A_B for key in range(4)]
        return [*await asyncio.gather(*work), await sampler.sample([7], params, key=9)]

    with sampling_from(always("stop"), program=siblings) as (server, run):
        responses, _ = run()
    prefills = [
        body["input_ids"] for _, body in server.asked if isinstance(body["sampling_params"], dict)
    ]
    assert sorted(prefills) == A_B
    assert len(responses) == len(server.asked) - len(prefills) == 9


def test_a_cancelled_request_is_aborted_at_the_server() -> None:
    answers = always("stop")
    is_aborted = asyncio.Event()

    async def keep(path: str, body: Body) -> web.StreamResponse:
        if path == "/abort_request":
            is_aborted.set()
            return web.Response()
        if body["input_ids"] == A_B[:1]:
            await asyncio.wait_for(is_aborted.wait(), timeout=10.0)
        return await answers(path, body)

    async def impatient(sampler: Sampler) -> list[Sample]:
        params = SAMPLING.request_params()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await sampler.sample(A_B[0], params, key=1)
        return [await sampler.sample(A_B[1], params, key=2)]

    with sampling_from(keep, program=impatient) as (server, run):
        responses, _ = run()
    bodies = dict(reversed(server.asked))
    assert bodies["/abort_request"] == {"rid": bodies["/generate"]["rid"][0]}
    assert tokens_of(responses) == [[4] * 4]


def test_only_a_response_that_was_cut_off_is_asked_for_again() -> None:
    victim = int(response_keys(PROMPTS.seed_P[1:], torch.tensor([2]))) & 0x7FFFFFFF
    answer = Samples(lambda seed, time: "abort" if seed == victim and time < 3 else "stop")
    with sampling_from(answer) as (_, run):
        responses, metrics = run()
    assert len(responses) == 6
    assert not any(r.is_truncated for r in responses)
    assert answer.times[victim] == 3
    assert sum(answer.times.values()) == 8
    assert metrics["rollout/retried_requests"].value == 2


@pytest.mark.shows("1.19")
@pytest.mark.parametrize(
    ("reason", "version", "refused"),
    [
        ("abort", 5, r"3 of 3 responses were cut off 3 times.*Aborted"),
        ("stop", 6, "weights of version 5, and the policy is at 6"),
    ],
)
def test_a_response_cut_off_three_times_or_of_other_weights_is_never_scored(
    reason: str, version: int, refused: str
) -> None:
    with (
        sampling_from(always(reason), version=version) as (_, run),
        pytest.raises(EngineError, match=refused),
    ):
        run()


def test_what_was_cut_off_on_purpose_is_not_asked_for_again() -> None:
    gate, is_asked, has_ended = RequestGate(), Event(), asyncio.Event()
    answers = always("abort")

    async def abort_late(path: str, body: Body) -> web.StreamResponse:
        if isinstance(body["sampling_params"], list):
            is_asked.set()
            await asyncio.wait_for(has_ended.wait(), timeout=5.0)
        return await answers(path, body)

    with sampling_from(abort_late, gate=gate) as (server, run), ThreadPoolExecutor(1) as pool:
        call = pool.submit(run)
        assert is_asked.wait(10.0)
        assert gate.drain(timeout_s=0.0) == 6
        with pytest.raises(EngineError, match="aborted 6 of 6 requests"):
            call.result(10.0)
        assert len(server.asked) <= 4  # of each group the prefill, and all its responses at once


class Interruptible:
    """Keeps requests open until each response is aborted; then it has some of its tokens."""

    def __init__(self, *, deaf: int) -> None:
        self.num_aborts = 0
        self._deaf = deaf
        """Aborts that do not hit: the request is still on its way."""
        self._aborted: dict[str, asyncio.Event] = {}

    async def __call__(self, path: str, body: Body) -> web.StreamResponse:
        if path == "/abort_request":
            self.num_aborts += 1
            if self.num_aborts > self._deaf:
                self._event(body["rid"]).set()
            return web.Response()
        if isinstance(body["sampling_params"], dict):
            return web.json_response(item(body["input_ids"], body["sampling_params"]))
        answers = []
        for number, name in enumerate(body["rid"]):
            await self._event(name).wait()
            wanted = body["sampling_params"][number] | {"max_new_tokens": number + 1}
            answers.append(item(body["input_ids"][number], wanted, finish="abort"))
        answers[0]["output_ids"] = []
        answers[0]["meta_info"].pop("output_token_logprobs")  # aborted in the server's queue
        return web.json_response(answers)

    def _event(self, name: str) -> asyncio.Event:
        return self._aborted.setdefault(name, asyncio.Event())


@pytest.mark.parametrize("deaf", [0, 5])
def test_an_interrupt_returns_the_tokens_so_far(deaf: int) -> None:
    server_of_four, gate = Interruptible(deaf=deaf), RequestGate()
    params = replace(SAMPLING.request_params(), max_new_tokens=3, stop_token_ids=(4,))

    async def program(sampler: Sampler) -> list[Sample]:
        asking = [
            asyncio.ensure_future(sampler.sample_group(context, params, keys=range(4)))
            for context in ([1, 2], [4, 5])
        ]
        await asyncio.sleep(0.05)
        gate.interrupt()
        groups = await asyncio.gather(*asking)
        late = await sampler.sample_group([1, 2], params, keys=[8])
        return [sample for group in (*groups, late) for sample in group]

    with sampling_from(server_of_four, program=program, gate=gate) as (server, run):
        samples, metrics = run()
    cut, stop, length = "interrupted", "stop", "length"
    assert [(len(s.token_ids), s.finish_reason) for s in samples] == [
        *[(0, cut), (2, cut), (3, length), (4, cut)],
        *[(0, cut), (2, stop), (3, stop), (4, stop)],
        (0, cut),
    ]
    assert [len(s.logprobs) for s in samples] == [len(s.token_ids) for s in samples]
    assert metrics["rollout/retried_requests"].value == 0
    generates = [body for path, body in server.asked if path == "/generate"]
    assert sum(isinstance(body["sampling_params"], list) for body in generates) == 2


class Slow(Samples):
    """Answers late, and writes its load every time; its tokens move unless it hangs."""

    def __init__(self, *, seconds: float, hangs: bool) -> None:
        super().__init__(lambda _, __: "length")
        self._seconds = seconds
        self._hangs = hangs
        self._num_loads = 0

    async def __call__(self, path: str, body: Body) -> web.StreamResponse:
        if path == "/v1/loads":
            self._num_loads += 1
            num_tokens = 0 if self._hangs else self._num_loads
            load = {"timestamp": self._num_loads, "num_used_tokens": num_tokens}
            return web.json_response({"timestamp": self._num_loads, "loads": [load]})
        await asyncio.sleep(self._seconds)
        return await super().__call__(path, body)


def test_a_request_may_take_any_time_while_its_server_makes_tokens() -> None:
    with sampling_from(Slow(seconds=1.5, hangs=False), timeout_s=0.4) as (server, run):
        responses, metrics = run()
    assert len(responses) == 6
    assert metrics["rollout/retried_requests"].value == 0
    assert ("/v1/loads", {}) in server.asked


@pytest.mark.parametrize("hangs_in", ["the scheduler", "all of it"])
def test_a_server_that_makes_no_token_is_late_by_key(hangs_in: str) -> None:
    answer = Slow(seconds=20.0, hangs=True)

    async def nothing(path: str, body: Body) -> web.StreamResponse:
        await asyncio.sleep(20.0)
        return await answer(path, body)

    asked_s = time.monotonic()
    hanging = answer if hangs_in == "the scheduler" else nothing
    late = r"no progress within rollout\.request_timeout_s=0\.4 s"
    with (
        sampling_from(hanging, timeout_s=0.4) as (_, run),
        pytest.raises(DeadlineError, match=late),
    ):
        run()
    assert time.monotonic() - asked_s < 5.0


def refusing(status: int) -> Answer:
    async def refuse(_: str, __: Body) -> web.Response:
        return web.json_response({"error": {"message": "this half is broken"}}, status=status)

    return refuse


def test_a_request_that_is_refused_is_not_repeated() -> None:
    with (
        sampling_from(refusing(400)) as (server, run),
        pytest.raises(RefusedError, match="is broken"),
    ):
        run()
    assert len(server.asked) == 2  # one a group


def test_log_probs_of_other_tokens_are_refused() -> None:
    torn = item([1], {"max_new_tokens": 2})
    torn["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError, match="2 tokens and log-probs of 1 others"):
        read_sample(torn, MODEL)


def test_experts_are_kept_in_16_bits_as_soon_as_they_arrive() -> None:
    answer = item([1], {"max_new_tokens": 2})
    sent_LJK = torch.arange(2 * 3 * 4, dtype=torch.int32).view(2, 3, 4) % 128
    answer["meta_info"]["routed_experts"] = b64encode(sent_LJK.numpy().tobytes()).decode()
    experts_LJK = read_sample(answer, replace(MODEL, expert_shape=(3, 4))).routed_experts_LJK
    assert experts_LJK is not None
    assert experts_LJK.dtype == torch.int16
    assert torch.equal(experts_LJK.int(), sent_LJK)


class Waits(Samples):
    """A decode server that waits for its first requests, as one whose other half is gone."""

    def __init__(self, num_lost: int) -> None:
        super().__init__(lambda _, __: "length")
        self._num_lost = num_lost

    async def __call__(self, path: str, body: Body) -> web.StreamResponse:
        if path != "/generate":
            return web.Response()
        self._num_lost -= 1
        if self._num_lost >= 0:
            await asyncio.Event().wait()
        return await super().__call__(path, body)


def address_of(server: Answering, port: int) -> KeyedAddress:
    host, own_port = server.url.removeprefix("http://").split(":")
    return KeyedAddress(host=host, port=int(own_port), key="secret", bootstrap_port=port)


@contextmanager
def pairs(
    decode: Answer, *prefills: Answer
) -> Iterator[tuple[Answering, Sequence[Answering], Callable[[], list[Sample]]]]:
    with ExitStack() as opened:
        second = opened.enter_context(answering(decode))
        firsts = [opened.enter_context(answering(prefill)) for prefill in prefills]
        client = ControlClient(second.url, name="decode", require_alive=lambda _: None)
        opened.callback(client.close)
        addresses = [address_of(one, 9000 + n) for n, one in enumerate(firsts)]

        def run() -> list[Sample]:
            return sample_at(PairedEndpoint(client, addresses), MODEL)[0]

        yield second, firsts, run


def rooms_of(server: Answering) -> list[tuple[list[int], int, int]]:
    """Context, port and room of each response that a server was asked for."""
    return sorted(
        asked
        for path, body in server.asked
        if path == "/generate"
        for asked in zip(
            body["input_ids"], body["bootstrap_port"], body["bootstrap_room"], strict=True
        )
    )


@pytest.mark.shows("4.2")
def test_both_halves_get_a_request_with_the_same_room() -> None:
    with pairs(*[always("length")] * 3) as (second, firsts, run):
        samples = run()
    assert tokens_of(samples) == TOKENS
    rooms = rooms_of(second)
    assert rooms == sorted(rooms_of(firsts[0]) + rooms_of(firsts[1]))
    assert len({room for _, _, room in rooms}) == len(rooms) == 6
    for number, first in enumerate(firsts):  # in turns
        assert {port for _, port, _ in rooms_of(first)} == {9000 + number}
        assert len(rooms_of(first)) == 3


@pytest.mark.shows("4.12")
def test_a_broken_prefill_half_is_passed_over() -> None:
    with pairs(Waits(1), refusing(500), always("length")) as (second, firsts, run):
        assert tokens_of(run()) == TOKENS
    assert len(rooms_of(firsts[0])) == 3  # asked once, for one group
    assert len(rooms_of(firsts[1])) == 6
    named = {body["rid"] for path, body in second.asked if path == "/abort_request"}
    assert named == set(second.asked[0][1]["rid"])  # what waited for the broken half


def test_without_a_prefill_half_a_request_fails() -> None:
    with (
        pairs(Waits(100), refusing(500)) as (_, __, run),
        pytest.raises(EngineError, match="this half is broken"),
    ):
        run()


class WithoutEncoder:
    """Answers each request with its own name, the first one with what SGLang says of its loss."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def __call__(self, _: str, body: Body) -> web.StreamResponse:
        self.num_asked += 1
        if self.num_asked == 1:
            return web.json_response({"detail": "no embeddings"}, status=503)
        return web.json_response(body["rid"])


@pytest.mark.parametrize("has_images", [True, False])
def test_requests_with_images_go_one_by_one_and_are_repeated_without_their_encoder(
    *, has_images: bool
) -> None:
    names = ["a", "b", "c"]
    parameters = [{"sampling_seed": seed} for seed in range(3)]
    body: Body = {"input_ids": [[1]] * 3, "sampling_params": parameters, "rid": names}
    body |= {"return_logprob": True} | ({"image_data": [["u", "v"]] * 3} if has_images else {})
    with (
        answering(WithoutEncoder()) as server,
        closing(ControlClient(server.url, name="it")) as own,
    ):
        ask = EncodedEndpoint(own).request("/generate", body, timeout_s=10.0)
        if not has_images:
            with pytest.raises(RefusedError, match="503"):
                own.run(ask)
            return
        assert own.run(ask) == names
    asked = [asked for _, asked in server.asked]
    assert Counter(each["rid"] for each in asked).total() == 4
    assert {each["rid"] for each in asked[:3]} == set(names)
    for each in asked:
        seed = names.index(each["rid"])
        expected = body | {"input_ids": [1], "image_data": ["u", "v"], "rid": each["rid"]}
        assert each == expected | {"sampling_params": parameters[seed]}
