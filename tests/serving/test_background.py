from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.batch import PromptBatch, jagged
from hybridrl.config.serving import OnUpdate
from hybridrl.errors import HybridRLError, PhaseError, RequestError, ServerDiedError
from hybridrl.metrics import Metrics, Sum
from hybridrl.sampler import (
    FinishedGroup,
    Program,
    RequestParams,
    Sample,
    Sampler,
    SamplingMasks,
    SamplingParams,
    response_keys,
)
from hybridrl.serving.background import BackgroundSampling, SampleBuffer
from hybridrl.serving.finished_groups import GroupSaver, pack_groups, read_groups
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.requests import PolicyRequests
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.publishing import update_with_tries
from hybridrl.workers.sharding.weight_files import AdaptedWeights, WeightCopy
from tests.config.values import config_of
from tests.serving.engines import (
    MOST_TOKENS,
    DecodingHandle,
    ServerRig,
    length_of,
    plan_of,
    token_of,
    weights_in,
)
from tests.waiting import wait_until

GROUP = 2
PARAMS = RequestParams(max_new_tokens=MOST_TOKENS, temperature=1.0)
SAMPLING = SamplingParams(
    num_responses_per_prompt=GROUP, max_response_tokens=MOST_TOKENS, temperature=1.0
)


def prompts_at(indices: range) -> PromptBatch | None:
    if not indices:
        return None
    return PromptBatch(
        token_ids_PL=jagged([torch.tensor([index % 50]) for index in indices]),
        prompt_index_P=torch.tensor(list(indices)),
        seed_P=torch.tensor([1000 + index for index in indices]),
        batch_size=[len(indices)],
    )


class Rig(ServerRig[DecodingHandle]):
    def __init__(
        self,
        *,
        num_prompts: int = 2,
        max_staleness: int = 1,
        on_update: OnUpdate = "interrupt",
        timeout_s: float = 20.0,
    ) -> None:
        super().__init__(
            DecodingHandle,
            plan_of(("regular", 2)),
            start_timeout_s=timeout_s,
            stage_timeout_s=timeout_s,
            request_timeout_s=0.2,  # no limit of a request whose engine makes tokens
        )
        self.stuck: set[int] = set()
        """Engines whose next processes never load weights."""
        self.server.start()
        pool = self.server.pool(max_context_tokens=MOST_TOKENS + 1, vocab_size=100, version=-1)
        self.buffer = SampleBuffer(num_prompts=num_prompts, max_staleness=max_staleness)
        self.ahead = BackgroundSampling(
            self.server,
            pool,
            single_turn,
            self.buffer,
            requests=PolicyRequests(config_of("serving=own"), vocab_size=100, images=None, key=""),
            recovery=Recovery(self.server, health_timeout_s=60.0),
            on_update=on_update,
        )
        self.num_admitted = 0
        self.most_adapters = 1
        """That an engine has at the same time."""

    def prepare(self, handle: DecodingHandle) -> None:
        handle.takes_weights = handle.index not in self.stuck

    def update(self, version: int) -> None:
        with self.ahead.updating(version):
            super().update(version)

    def update_adapter(self, version: int) -> bool:
        """As the manager does, with files in place of what lies below the adapter.

        Returns whether nothing waited.
        """
        source = AdaptedWeights(weights_in(self._folder / "base", 0), WeightCopy())
        if self.ahead.add_adapter(source, version=version, most=self.most_adapters):
            return True
        with self.ahead.updating(version):
            self.server.update(source, version=version)
        return False

    def exchange(self, step: int, *, num_open: int) -> tuple[Answered, Metrics]:
        """Admit prompts so that so many are open, and wait for a batch."""
        new = range(self.num_admitted, self.num_admitted + num_open)
        self.num_admitted = new.stop
        answered, metrics = self.ahead.exchange(prompts_at(new), SAMPLING, step=step)
        require_exact(answered)
        return answered, metrics


@contextmanager
def rig_of(**settings: Any) -> Iterator[Rig]:
    rig = Rig(**settings)
    try:
        yield rig
    finally:
        rig.ahead.end()
        rig.server.shutdown()


def require_exact(answered: Answered) -> None:
    """Each response has the tokens that its key gives, whatever happened to its engines."""
    seed_P, samples = answered.prompts.seed_P, answered.samples
    keys = response_keys(seed_P[:, None], torch.arange(GROUP)).view(-1).tolist()
    assert len(samples) == len(keys)
    for key, sample in zip(keys, samples, strict=True):
        expected = [token_of(key, position) for position in range(length_of(key))]
        assert sample.token_ids.tolist() == expected
        assert sample.finish_reason == "stop"


@dataclass(frozen=True)
class RunWithKills:
    max_staleness: int
    num_prompts: int
    num_steps: int
    kills: Sequence[tuple[int, int]]
    """Steps, and after how many steps of decoding an engine dies then."""
    random: Random

    def batches(
        self, rig: Rig, update: Callable[[int], object]
    ) -> Iterator[tuple[int, Answered, Metrics]]:
        """Do the steps; each prompt is answered once, and by weights that are not too old."""
        taken: list[int] = []
        for step in range(self.num_steps):
            update(step)
            for at, steps in self.kills:
                if at == step:
                    self.random.choice(rig.launched).dies_after = steps
            wanted = (min(self.max_staleness, self.num_steps - 1 - step) + 1) * self.num_prompts
            num_open = rig.num_admitted - len(taken)
            answered, metrics = rig.exchange(step, num_open=wanted - num_open)
            for sample in answered.samples:
                assert step - sample.weight_version <= self.max_staleness
            taken += answered.prompts.prompt_index_P.tolist()
            yield step, answered, metrics
        assert sorted(taken) == list(range(self.num_steps * self.num_prompts))


FEW = settings(max_examples=16, suppress_health_check=[HealthCheck.too_slow])
RUNS = st.builds(
    RunWithKills,
    max_staleness=st.integers(1, 3),
    num_prompts=st.integers(1, 3),
    num_steps=st.integers(2, 7),
    kills=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30)), max_size=2),
    random=st.randoms(use_true_random=False),
)


@pytest.mark.parametrize("on_update", ["interrupt", "finish", "abort"])
@FEW
@given(run=RUNS)
def test_each_prompt_is_answered_once_and_never_too_old(
    on_update: OnUpdate, run: RunWithKills
) -> None:
    with rig_of(
        num_prompts=run.num_prompts, max_staleness=run.max_staleness, on_update=on_update
    ) as rig:
        for step, answered, _ in run.batches(rig, rig.update):
            for sample in answered.samples:
                versions = sample.versions_L.tolist()
                assert versions == sorted(versions)
                assert on_update == "interrupt" or len(set(versions)) == 1
                assert versions[-1] <= step


def test_a_response_goes_on_with_new_weights_where_it_stopped() -> None:
    with rig_of(max_staleness=2) as rig:
        versions = set()
        for handle in rig.launched:
            handle.step_s = 0.002  # the longest response takes longer than a step of the trainer
        for step in range(200):
            rig.update(step)
            answered, metrics = rig.exchange(step, num_open=6 if step == 0 else 2)
            versions |= {len(set(sample.versions_L.tolist())) for sample in answered.samples}
            assert metrics["time/engines_idle_s"].value >= 0
            assert metrics["time/update_engines_s"].value > 0
            assert metrics["rollout/open_groups"].value == 4
            assert metrics["rollout/interrupted_tokens"].value >= 0  # of each step, 0 included
            if versions > {1} and step >= 39:
                break
        assert versions > {1}  # some were sampled by several versions


@FEW
@given(run=RUNS)
def test_an_adapter_comes_beside_those_of_open_responses_and_no_engine_pauses(
    run: RunWithKills,
) -> None:
    """Engines refuse an adapter that is gone, and one more than there may be."""
    with rig_of(
        num_prompts=run.num_prompts, max_staleness=run.max_staleness, on_update="finish"
    ) as rig:
        rig.most_adapters = run.max_staleness + 1

        def update(step: int) -> None:
            update_with_tries(partial(rig.update_adapter, step))
            if step == 0:
                rig.journal.events.clear()

        for step, answered, metrics in run.batches(rig, update):
            if step and not run.kills:
                assert metrics["time/update_engines_s"].value == 0
                assert max(len(handle.adapters) for handle in rig.launched) <= rig.most_adapters
            assert {sample.weight_versions for sample in answered.samples} == {None}
        calls = {event.call for event in rig.journal.events}
        assert run.kills or calls == {"unload_adapter", "load_adapter"}


def test_an_engine_that_does_not_take_an_adapter_is_replaced_while_the_other_one_serves() -> None:
    with rig_of(timeout_s=1.0, on_update="finish") as rig:
        rig.most_adapters = 2
        rig.update_adapter(0)
        rig.exchange(0, num_open=4)
        rig.launched[1].takes_weights = False
        rig.update_adapter(1)
        rig.exchange(1, num_open=2)
        wait_until(lambda: len(rig.launched) == 3 and rig.launched[2].adapters == {1})
        assert rig.launched[0].is_alive()
        rig.update_adapter(2)
        rig.exchange(2, num_open=2)


def test_engines_that_all_refused_an_adapter_come_back_with_that_which_requests_name() -> None:
    with rig_of(timeout_s=1.0, on_update="finish") as rig:
        rig.most_adapters = 2
        rig.update_adapter(0)
        rig.exchange(0, num_open=4)
        for handle in rig.launched:
            handle.takes_weights = False
        with pytest.raises(StageError):
            rig.update_adapter(1)
        wait_until(lambda: [handle.adapters for handle in rig.launched[2:]] == [{0}, {0}])
        rig.update_adapter(1)
        rig.exchange(1, num_open=2)


def test_an_adapter_is_not_added_to_engines_that_failed_to_stop_for_another() -> None:
    """They serve, but no request reaches them: the next update opens the way again."""
    with rig_of(on_update="finish") as rig:
        rig.most_adapters = 2
        rig.update_adapter(0)
        rig.exchange(0, num_open=4)
        with pytest.raises(HybridRLError, match="broken"), rig.ahead.updating(1):
            rig.server.version = -1  # as within an update
            raise HybridRLError("broken")
        assert not rig.update_adapter(1)
        rig.exchange(1, num_open=2)


def test_more_adapters_than_there_is_room_for_wait_for_open_responses() -> None:
    async def ask(sampler: Sampler) -> list[Sample]:
        return await sampler.sample_group([3], PARAMS, keys=[7])

    with rig_of(on_update="finish") as rig, ThreadPoolExecutor(3) as thread:
        rig.most_adapters = 2
        rig.update_adapter(0)
        for handle in rig.launched:
            handle.is_frozen.set()
        answers = [thread.submit(rig.ahead.run, ask)]
        wait_until(lambda: rig.ahead._pool.open_versions == {0})
        rig.update_adapter(1)
        answers.append(thread.submit(rig.ahead.run, ask))
        wait_until(lambda: rig.ahead._pool.open_versions == {0, 1})
        waiting = thread.submit(rig.update_adapter, 2)
        time.sleep(0.2)
        has_waited = not waiting.done()
        for handle in rig.launched:
            handle.thaw()
        waiting.result()
        assert has_waited
        versions = [answer.result()[0].weight_version for answer in answers]
        assert versions == [0, 1]
        assert {frozenset(handle.adapters) for handle in rig.launched} == {frozenset({2})}


def test_steps_go_on_beside_an_evaluation_and_new_weights_wait_for_it() -> None:
    has_ended = threading.Event()

    async def held(sampler: Sampler) -> list[Sample]:
        first = await sampler.sample_group([3], SAMPLING.request_params(), keys=[7])
        await asyncio.to_thread(has_ended.wait)
        return first + await sampler.sample_group([3], SAMPLING.request_params(), keys=[8])

    with rig_of() as rig:
        rig.update(0)
        rig.exchange(0, num_open=4)
        rig.ahead.begin_evaluation([held, held])
        with pytest.raises(PhaseError, match="no exchange came"):
            rig.ahead.end_evaluation()
        rig.update(1)
        for _ in range(2):  # a group filter may ask for a further batch
            rig.exchange(1, num_open=2)
        with pytest.raises(PhaseError, match="evaluation is open"):
            rig.update(2)
        has_ended.set()
        programs = rig.ahead.end_evaluation()
        lengths = [length_of(key) for key in (7, 8)]
        for samples in programs:
            versions = [sample.versions_L.tolist() for sample in samples]
            assert versions == [[1] * length for length in lengths]
        assert len(programs) == 2
        rig.update(2)
        rig.exchange(2, num_open=2)


def test_an_error_within_an_evaluation_is_raised_where_it_is_waited_for() -> None:
    async def fail(sampler: Sampler) -> list[Sample]:
        raise RequestError("the context is too long")

    with rig_of() as rig:
        rig.ahead.begin_evaluation([fail])
        rig.update(0)
        rig.exchange(0, num_open=4)
        with pytest.raises(RequestError, match="too long"):
            rig.ahead.end_evaluation()
        rig.update(1)


def test_siblings_that_end_in_another_order_are_returned_in_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def last_first(prompts: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
        """Ask for siblings one after another, as conversations may end: the last one first."""

        async def program(sampler: Sampler) -> list[Sample]:
            for p, seed in enumerate(prompts.seed_P):
                keys = response_keys(seed[None], torch.arange(GROUP)).tolist()
                context = prompts.token_ids_PL.unbind()[p]
                for number, key in reversed(list(enumerate(keys))):
                    (sample,) = await sampler.sample_group(context, PARAMS, keys=[key])
                    assert sampling.reporter is not None
                    index = int(prompts.prompt_index_P[p])
                    sampling.reporter.report(index, number, sample)
            return []

        return program

    monkeypatch.setitem(globals(), "single_turn", last_first)
    with rig_of() as rig:
        rig.update(0)
        rig.exchange(0, num_open=4)


def test_the_error_of_a_program_ends_the_next_batch() -> None:
    with rig_of() as rig:
        rig.update(0)
        for handle in rig.launched:
            handle.refusal = RequestError("the context is too long")
        for num_open in (4, 0):
            with pytest.raises(RequestError, match="too long"):
                rig.exchange(0, num_open=num_open)


def test_the_end_frees_a_trainer_that_waits_for_a_batch() -> None:
    with rig_of() as rig, ThreadPoolExecutor(1) as thread:
        rig.update(0)
        for handle in rig.launched:
            handle.is_frozen.set()
        waiting = thread.submit(rig.exchange, 0, num_open=4)
        for handle in rig.launched:
            handle.has_requests.wait()
        rig.ahead.end()
        with pytest.raises(ServerDiedError, match="ended before a batch was there"):
            waiting.result()


def test_after_a_failed_update_nothing_is_sampled_until_the_next() -> None:
    with rig_of() as rig:
        rig.update(0)
        rig.exchange(0, num_open=4)
        with pytest.raises(HybridRLError, match="broken"), rig.ahead.updating(1):
            raise HybridRLError("broken")
        rig.update(1)
        rig.exchange(1, num_open=2)


def test_engines_that_make_tokens_are_not_lost_however_long_a_request_takes() -> None:
    with rig_of() as rig:
        rig.update(0)
        for handle in rig.launched:
            handle.step_s = 0.05
        begin = time.monotonic()
        _, metrics = rig.exchange(0, num_open=2)
        assert time.monotonic() - begin > 2 * 0.2
        assert len(rig.launched) == 2
        assert metrics["rollout/repeated_requests"] == Sum(0)


NO_ANSWER = r"sync failed on engine 1: .*no answer within 2 s"


def test_an_engine_that_never_takes_new_weights_is_replaced() -> None:
    with rig_of(timeout_s=1.0) as rig:
        rig.update(0)
        rig.exchange(0, num_open=4)
        rig.launched[1].takes_weights = False
        with pytest.raises(StageError, match=NO_ANSWER):
            rig.update(1)
        update_with_tries(lambda: rig.update(1))
        assert [handle.is_alive() for handle in rig.launched] == [True, False, True]
        rig.exchange(1, num_open=2)
        assert rig.server.version == 1


@pytest.mark.nightly
def test_engines_that_never_take_new_weights_end_the_update() -> None:
    with rig_of(timeout_s=1.0) as rig:
        rig.update(0)
        rig.launched[1].takes_weights = False
        rig.stuck = {1}
        with pytest.raises(StageError, match=NO_ANSWER):
            update_with_tries(lambda: rig.update(1))
        assert [handle.index for handle in rig.launched] == [0, 1, 1, 1, 1]  # three tries


def test_a_trainer_that_stays_away_finds_no_more_groups_than_fit() -> None:
    """As a slow reward does: engines end what is open, and begin nothing."""
    with rig_of(num_prompts=2, max_staleness=3) as rig:
        rig.update(0)
        rig.exchange(0, num_open=8)
        wait_until(lambda: rig.buffer.num_complete == 6)
        assert rig.buffer.num_open == 6
        assert sum(handle.num_requests for handle in rig.launched) == 8
        with pytest.raises(PhaseError, match="at most 8 may be open"):
            rig.exchange(0, num_open=3)
        _, metrics = rig.exchange(0, num_open=2)
        assert metrics["rollout/open_groups"].value == 6


@pytest.mark.parametrize("is_same", [True, False])
def test_finished_groups_of_a_checkpoint_are_learned_from_unless_settings_have_changed(
    is_same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_of(num_prompts=2, max_staleness=2) as rig:
        rig.update(0)
        rig.exchange(0, num_open=5)
        rig.update(1)
        wait_until(lambda: rig.buffer.num_complete == 3)
        saver = GroupSaver(cast("Any", rig.ahead), origin="before")
        saver.save(tmp_path / "groups")
        [entry] = saver.collect_saved(True)
        groups = rig.ahead.finished_groups()
    assert entry is not None
    assert saver.find_torn(tmp_path / "groups", [entry]) == [[]]
    with rig_of(num_prompts=2, max_staleness=2) as rig, caplog.at_level(logging.INFO):
        saver = GroupSaver(cast("Any", rig.ahead), origin="before" if is_same else "after")
        saver.load(tmp_path / "older")  # a checkpoint without groups
        saver.load(tmp_path / "groups")
        rig.update(1)
        everything = prompts_at(range(6))
        assert everything is not None
        first, _ = rig.ahead.exchange(everything[[*groups, 5]], SAMPLING, step=1)
        second, _ = rig.ahead.exchange(None, SAMPLING, step=2)
        num_sampled = sum(handle.num_requests for handle in rig.launched)
    versions = {}
    for answered in (first, second):
        require_exact(answered)
        for p, index in enumerate(answered.prompts.prompt_index_P.tolist()):
            samples = answered.samples[GROUP * p : GROUP * (p + 1)]
            versions[index] = {sample.weight_version for sample in samples}
    before = {i: {sample.weight_version for sample in each.samples} for i, each in groups.items()}
    again = {index: {1} for index in groups}
    assert num_sampled == (1 if is_same else 4)
    assert versions == (before if is_same else again) | {5: {1}}
    assert ("sampled again" in caplog.text) is not is_same
    (tmp_path / "groups" / entry.name).write_bytes(b"spoilt")
    assert saver.find_torn(tmp_path / "groups", [entry]) == [[entry.name]]


def test_a_sample_in_a_checkpoint_keeps_all_that_it_has(tmp_path: Path) -> None:
    tokens = torch.arange(6)
    full = Sample(
        *(tokens[2:5], torch.tensor([-0.5, -math.inf, -2.0]), "length", 3),
        weight_versions=torch.tensor([3, 4, 4]),
        routed_experts_LJK=torch.ones(4, 2, 1, dtype=torch.int16),
        is_sampled=torch.tensor([True, False, True]),
        rewards=torch.tensor([0.0, 0.5, 1.0]),
        context=tokens[:2],
        sequence_begins=(1,),
        turns=torch.tensor([0, 0, 1], dtype=torch.uint8),
        masks=SamplingMasks(torch.arange(6).int(), torch.tensor([1, 3, 2]).int()),
        teacher_JL=torch.randn(5, 3),
    )
    seen = replace(full, images=())
    groups = {7: FinishedGroup(2, (full, SAMPLES[0])), 9: FinishedGroup(2, (seen,))}
    (tmp_path / "groups.safetensors").write_bytes(pack_groups(groups, origin="here"))
    _, read = read_groups(tmp_path)
    assert list(read) == [7]  # pixels would make a checkpoint large
    for kept, sample in zip(read[7].samples, groups[7].samples, strict=True):
        for name in (each.name for each in fields(Sample)):
            value, expected = getattr(kept, name), getattr(sample, name)
            if isinstance(expected, torch.Tensor | SamplingMasks):
                torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
            else:
                assert value == expected, name


SAMPLES = [Sample(torch.tensor([1]), torch.zeros(1), "stop", 0)]


@given(
    extra_batches=st.sampled_from([0, 2]),
    restarts=st.sampled_from([0.0, 0.4]),
    num_prompts=st.integers(1, 4),
    max_staleness=st.integers(1, 4),
    num_steps=st.integers(1, 12),
    random=st.randoms(use_true_random=False),
)
def test_no_group_is_older_than_the_bound_or_waits_for_others(
    extra_batches: int,
    restarts: float,
    num_prompts: int,
    max_staleness: int,
    num_steps: int,
    random: Random,
) -> None:
    buffer = SampleBuffer(num_prompts=num_prompts, max_staleness=max_staleness)
    admitted: list[int] = []
    """By prompt: the step."""
    unfinished: list[int] = []
    taken: set[int] = set()
    for step in range(num_steps):
        if step and random.random() < restarts:  # a checkpoint after the step before, and a resume
            finished = buffer.finished
            again = [index for index in range(len(admitted)) if index not in taken]
            buffer = SampleBuffer(num_prompts=num_prompts, max_staleness=max_staleness)
            buffer.admit(again, step=step, finished=finished)
            unfinished = [index for index in again if index not in finished]
            admitted = [step if n in unfinished else was for n, was in enumerate(admitted)]
        for _ in range(1 + random.randint(0, extra_batches)):  # more than one with a group filter
            level = (min(max_staleness, num_steps - 1 - step) + 1) * num_prompts
            new = range(len(admitted), len(admitted) + max(0, level - buffer.num_open))
            buffer.admit(new, step=step)
            unfinished += new
            admitted += [step] * len(new)
            while (batch := buffer.take(step=step)) is None:
                is_open = [index for index in range(len(admitted)) if index not in taken]
                is_open.sort(key=admitted.__getitem__)
                assert set(is_open[:num_prompts]) & set(unfinished)  # else it waits for ever
                index = random.choice(unfinished)
                unfinished.remove(index)
                buffer.complete(index, SAMPLES)
            assert len(batch) == num_prompts
            assert list(batch) == sorted(batch, key=admitted.__getitem__)  # oldest first
            assert taken.isdisjoint(batch)
            taken |= batch.keys()
            assert all(step - admitted[index] <= max_staleness for index in batch)
    assert buffer.num_open == 0
    assert taken == set(range(len(admitted)))


def test_a_young_group_may_overtake_one_that_still_has_its_turn() -> None:
    buffer = SampleBuffer(num_prompts=1, max_staleness=2)
    buffer.admit([0, 1, 2], step=0)
    buffer.complete(2, SAMPLES)
    assert buffer.take(step=0) == {2: tuple(SAMPLES)}
    buffer.admit([3], step=1)
    buffer.complete(3, SAMPLES)
    assert buffer.take(step=1) is None  # 0 and 1 are both due by step 2
    buffer.complete(1, SAMPLES)
    assert buffer.take(step=1) == {1: tuple(SAMPLES)}
    assert (buffer.num_open, buffer.num_complete) == (2, 1)


def test_what_could_not_be_learned_from_in_time_is_never_started() -> None:
    buffer = SampleBuffer(num_prompts=2, max_staleness=1)
    buffer.admit([0, 1, 2], step=0)
    with pytest.raises(PhaseError, match="at most 4 may be open"):
        buffer.admit([3, 4], step=0)
    with pytest.raises(PhaseError, match="prompt 2 was admitted twice"):
        buffer.admit([2], step=0)
    buffer.complete(0, SAMPLES)
    for index in (0, 7):
        with pytest.raises(PhaseError, match=f"group of prompt {index} is not open"):
            buffer.complete(index, SAMPLES)
