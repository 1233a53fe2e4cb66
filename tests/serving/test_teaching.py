from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.batch import LogprobBatch, PromptBatch, RolloutBatch, TrainBatch, jagged
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import EngineError
from hybridrl.sampler import Program, Sample, Sampler, SampleRequest, SamplingParams, Scoring
from hybridrl.serving.launching import start_servers
from hybridrl.serving.teaching import ServedTeachers
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.train.teachers import Teachers
from tests.config.values import config_of
from tests.serving.processes import engine_processes
from tests.serving.test_manager import with_tokenizer
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params
from tests.workers.train.engines import build_fsdp2

K, TEMPERATURE = 5, 0.8
PROMPTS = make_prompts([3, 6, 5, 2])
TAUGHT = replace(sampling_params(group=2, tokens=4, temperature=TEMPERATURE), teacher_top_k=K)


def two_teachers(policy: Path, folders: list[Path]) -> ExperimentConfig:
    served = ", ".join(
        f"t{number}: {{path: '{folder}', groups: {{m: {{num_devices: 1}}}}}}"
        for number, folder in enumerate(folders)
    )
    return config_of(
        f"serving.models={{policy: {{groups: {{m: {{num_devices: 1}}}}}}, {served}}}",
        *("serving.num_devices_per_node=3", "rollout.num_slots=2", "algorithm=gkd"),
        f"algorithm.divergence_top_k={K}",
        "algorithm.teacher_paths={a: serving.models.t0, b: serving.models.t1}",
        *("data.max_prompt_tokens=9", "rollout.max_response_tokens=4"),
        *(f"rollout.temperature={TEMPERATURE}", f"model.path={policy}", "model.starter=null"),
        "data.use_chat_template=false",
    )


def on_ranks(folders: list[Path], rollouts: RolloutBatch) -> tuple[RolloutBatch, TrainBatch]:
    """Return what teachers on a rank say."""
    teachers = Teachers(
        models=[build_fsdp2(folder) for folder in folders],
        temperature=TEMPERATURE,
        vocab_size=64,
        num_likeliest=K,
    )
    rollouts.teacher_logprobs_BL = teachers.logprobs(rollouts)
    train = build_train_batch(rollouts, LogprobBatch(batch_size=[8]), rollouts.teacher_logprobs_BL)
    return rollouts, teachers.teach(train)


@pytest.mark.usefixtures("ray_cluster")
def test_teachers_on_engines_say_what_those_on_ranks_say_and_lost_ones_come_back(
    tmp_path: Path,
) -> None:
    policy, *folders = (
        with_tokenizer(make_tiny_model(tmp_path / name, seed=seed))
        for seed, name in enumerate(("policy", "first", "second"))
    )
    prompts = PROMPTS.clone(recurse=False)
    prompts.teacher_P = torch.tensor([0, 1, 0, 1])
    prompts.teacher_prompt_PN = jagged([torch.arange(4 + n) for n in range(4)])
    with start_servers(two_teachers(policy, folders), policy, variables={}) as servers:
        servers.update(policy, version=3)
        samples, _ = servers.sample(prompts, TAUGHT, version=3)
        for process in engine_processes():
            process.kill()
        again, _ = servers.sample(prompts, TAUGHT, version=3)
        plain, _ = servers.sample(prompts, replace(TAUGHT, teacher_top_k=None), version=3)
    wait_until(lambda: not engine_processes())
    assert {sample.teacher_JL for sample in plain} == {None}
    rollouts = assemble_rollouts(prompts, samples, policy_version=3)
    repeated = assemble_rollouts(prompts, again, policy_version=3)
    assert rollouts.teacher_logprobs_BL is not None
    assert repeated.teacher_logprobs_BL is not None
    said = rollouts.teacher_logprobs_BL.values()
    assert torch.equal(repeated.teacher_logprobs_BL.values(), said)
    top, ids = rollouts.teacher_top_logprobs_BLK, rollouts.teacher_top_ids_BLK
    bare = assemble_rollouts(prompts, plain, policy_version=3)
    bare.teacher_B = prompts.teacher_P.repeat_interleave(2)
    bare.teacher_prompt_BN = jagged(
        [each for each in prompts.teacher_prompt_PN.unbind() for _ in range(2)]
    )
    bare.prompt_tokens_B = torch.tensor([3, 3, 6, 6, 5, 5, 2, 2])
    expected, batch = on_ranks(folders, bare)
    assert expected.teacher_logprobs_BL is not None
    assert (said != 0.0).sum() == 8 * 4
    torch.testing.assert_close(said, expected.teacher_logprobs_BL.values(), atol=1e-5, rtol=0)
    columns = (top, batch.teacher_top_logprobs_BLK, ids, batch.teacher_top_ids_BLK)
    found, likeliest, named, expected_ids = (c.values() for c in columns if c is not None)
    torch.testing.assert_close(found, likeliest, atol=1e-5, rtol=0)
    assert torch.equal(named, expected_ids)


class Silent(Sampler):
    """A teacher that scores nothing."""

    max_context_tokens = 9

    async def answer(self, _: SampleRequest) -> list[Sample]:
        return [Sample(torch.arange(3), torch.zeros(3), "stop", 0)]


class Told:
    """Hears of taught responses."""

    def __init__(self) -> None:
        self.has_heard = asyncio.Event()

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        assert sample.teacher_JL is not None
        self.has_heard.set()


def test_a_response_is_scored_while_others_are_sampled(tmp_path: Path) -> None:
    engine = ready_engine(make_tiny_model(tmp_path / "teacher"))
    teachers, told = ServedTeachers([]), Told()
    samples = [Sample(torch.arange(3 + n), torch.zeros(3 + n), "stop", 0) for n in range(2)]

    def make(_: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
        async def sample(sampler: Sampler) -> list[Sample]:
            assert sampling.reporter is not None
            sampling.reporter.report(1, 0, samples[1])
            await told.has_heard.wait()  # the other one ends after that
            sampling.reporter.report(0, 0, samples[0])
            return samples

        return sample

    async def program(sampler: Sampler) -> list[Sample]:
        teachers.samplers = [sampler]
        return await teachers.taught(make, PROMPTS, replace(TAUGHT, reporter=told))(sampler)

    taught = engine.run(program)
    assert [len(each.token_ids) for each in taught] == [3, 4]


def reports(samples: list[Sample], sampling: SamplingParams) -> Program[list[Sample]]:
    """Return a program that has these responses to the first prompts, one to each."""

    async def program(_: Sampler) -> list[Sample]:
        assert sampling.reporter is not None
        for index, sample in reversed(list(enumerate(samples))):
            sampling.reporter.report(index, 0, sample)
        return samples

    return program


def test_each_sequence_of_a_rewritten_conversation_is_scored_by_itself(tmp_path: Path) -> None:
    engine = ready_engine(make_tiny_model(tmp_path / "teacher"))
    tokens = torch.arange(10, 19)
    rewritten = Sample(tokens, torch.zeros(9), "stop", 0, context=tokens[:2], sequence_begins=(4,))
    empty = Sample(tokens[:0], torch.zeros(0), "length", 0)
    teachers = ServedTeachers([])

    async def program(sampler: Sampler) -> list[Sample]:
        teachers.samplers = [sampler]
        taught = await teachers.taught(
            lambda _, sampling: reports([rewritten, empty], sampling), PROMPTS, TAUGHT
        )(sampler)
        for context, begin in ((torch.cat([tokens[:2], tokens[:4]]), 2), (tokens[4:], 1)):
            scoring = Scoring(begin, K)
            request = SampleRequest(context, TAUGHT.request_params(), (0,), scoring=scoring)
            taught += await sampler.answer(request)
        return taught

    taught, nothing, first, second = engine.run(program)
    assert nothing.teacher_JL is not None
    assert nothing.teacher_JL.shape == (1 + 2 * K, 0)
    parts = [each.teacher_JL for each in (taught, first, second)]
    whole, first_JL, second_JL = (part for part in parts if part is not None)
    zero = torch.zeros(1 + 2 * K, 1)
    assert torch.equal(whole, torch.cat([first_JL, zero, second_JL], dim=1))


def test_an_engine_that_scores_nothing_ends_the_program_at_once(tmp_path: Path) -> None:
    engine = ready_engine(make_tiny_model(tmp_path / "teacher"))
    teachers = ServedTeachers([])
    sample = Sample(torch.arange(3), torch.zeros(3), "stop", 0)

    def make(_: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
        async def sample_on(sampler: Sampler) -> list[Sample]:
            await reports([sample], sampling)(sampler)
            try:
                return await asyncio.Future()  # other responses never end
            finally:  # but one that does just then: its lesson cannot begin
                await reports([sample], sampling)(sampler)

        return sample_on

    async def program(sampler: Sampler) -> list[Sample]:
        teachers.samplers = [Silent()]
        return await teachers.taught(make, PROMPTS, TAUGHT)(sampler)

    with pytest.raises(EngineError, match="did not score the tokens"):
        engine.run(program)
    gc.collect()  # a coroutine that nobody awaited would be an error
