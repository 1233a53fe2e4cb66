from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DriftError
from hybridrl.metrics import Sum
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.frozen import ApiKeys, FrozenModel
from hybridrl.serving.launching import start_servers
from hybridrl.serving.manager import RolloutManager
from hybridrl.serving.plan import PlannedDevices, plan_own_engines
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.manager_client import Answer, ManagerClient
from tests.config.values import config_of
from tests.serving.engines import RecordingHandle, weights_in
from tests.serving.processes import engine_processes, wait_for_a_busy_process
from tests.serving.test_recovery import AnsweringHandle
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params, tokens_of
from tests.workers.sharding.recording import WEIGHTS, Journal, Policy

PROMPTS = make_prompts([3, 9, 5, 2] * 6)
SAMPLING = sampling_params(group=4, tokens=50)


@pytest.fixture(scope="module")
def servers(model: Path, ray_cluster: None) -> Iterator[ManagerClient]:
    config = config_of(
        *("serving=own", "rollout.num_slots=2", "rollout.drain_timeout_s=5"),
        *("data.max_prompt_tokens=12", "rollout.max_response_tokens=50"),
    )
    with start_servers(config, model, variables={}) as started:
        yield started
    wait_until(lambda: not engine_processes())


@cache
def expected(folder: Path) -> Sequence[Sample]:
    engine = ready_engine(folder, max_context_tokens=62)
    return engine.run(single_turn(PROMPTS, SAMPLING))


def changed_model(model: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: 1.5 * tensor for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.shows("4.1", "4.12", "4.15")
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_engine_costs_no_sample_and_new_weights_are_sampled_with(
    servers: ManagerClient, model: Path, tmp_path: Path
) -> None:
    assert servers.need_weights(version=0)
    servers.update(model, version=0)
    assert not servers.need_weights(version=0)
    before = {process.pid for process in engine_processes()}
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(servers.sample, PROMPTS, SAMPLING, version=0)
        wait_for_a_busy_process(engine_processes).kill()
        samples, metrics = sampling.result()
    assert metrics["rollout/lost_engines"] == Sum(1)
    assert metrics["rollout/repeated_requests"].value > 0
    assert tokens_of(samples) == tokens_of(expected(model))  # each exactly once, in order
    assert {sample.weight_version for sample in samples} == {0}
    assert not servers.need_weights(version=0)  # the replacement has those of the others
    wait_until(lambda: len(engine_processes()) == 2)
    samples, metrics = servers.sample(PROMPTS, SAMPLING, version=0)
    assert metrics["rollout/lost_engines"] == Sum(0)
    assert tokens_of(samples) == tokens_of(expected(model))
    assert len({process.pid for process in engine_processes()} - before) == 1
    other = changed_model(model, tmp_path / "other")
    servers.update(other, version=7)
    samples, _ = servers.sample(PROMPTS, SAMPLING, version=7)
    assert tokens_of(samples) == tokens_of(expected(other))
    assert {sample.weight_version for sample in samples} == {7}
    with pytest.raises(DriftError, match=r"sampled with weights of version \[7\]"):
        servers.sample(PROMPTS, SAMPLING, version=8)


GREEDY = RequestParams(max_new_tokens=20, temperature=0.0)
CONTEXTS = list(PROMPTS.token_ids_PL.unbind())


def two_models(judge: Path) -> ExperimentConfig:
    return config_of(
        "serving.models={policy: {groups: {m: {num_devices: 1}}}, "
        f"judge: {{path: '{judge}', max_context_tokens: 30, groups: {{m: {{num_devices: 1}}}}}}}}",
        *("serving.num_devices_per_node=2", "rollout.num_slots=2", "reward.function=judge"),
        "reward.args={model: judge, template: '{response}'}",
        *("data.max_prompt_tokens=6", "rollout.max_response_tokens=4"),
    )


def with_tokenizer(folder: Path) -> Path:
    build_starter_tokenizer().save_pretrained(folder)
    return folder


class RecordingLaunch:
    def __init__(self) -> None:
        self.launched: list[RecordingHandle] = []

    def __call__(self, engine: PlannedDevices) -> RecordingHandle:
        self.launched.append(RecordingHandle(engine.first_device, Journal()))
        return self.launched[-1]


@pytest.mark.shows("4.1", "4.11")
def test_only_the_policy_gets_weights_of_the_trainer(tmp_path: Path) -> None:
    launches = {"policy": RecordingLaunch(), "judge": RecordingLaunch()}
    launched = {model: launch.launched for model, launch in launches.items()}
    judge = with_tokenizer(make_tiny_model(tmp_path / "judge"))
    config = two_models(judge)
    weights_in(judge, 7)
    old, new = weights_in(tmp_path / "old", 0), weights_in(tmp_path / "new", 1)
    manager = RolloutManager(config, judge, launches, ApiKeys("a-key"))
    manager.start()
    for version, folder in enumerate((old, new)):
        assert manager.need_weights(version)
        manager.update(folder, version)
    launched["judge"][0].kill()
    assert manager.ask("judge", [], GREEDY, 5.0) == []  # whose engine is replaced before
    wait_until(lambda: len(launched["judge"]) == 2)
    successor = launched["judge"][1].engine
    wait_until(lambda: successor.version == 0 and successor.is_admitting)
    truths = {m: [each.engine.serve() for each in engines] for m, engines in launched.items()}
    for name in WEIGHTS:
        assert [t[name].tolist() for t in truths["policy"]] == [Policy.WHOLE.truth(name, 1)]
        assert [t[name].tolist() for t in truths["judge"]] == 2 * [Policy.WHOLE.truth(name, 7)]
    assert launched["policy"][0].loads == [(old, 0), (new, 1)]
    assert [each.loads for each in launched["judge"]] == [[(judge, 0)], [(judge, 0)]]
    manager.shutdown()


@pytest.mark.shows("4.14")
def test_a_frozen_engine_is_watched_while_it_is_asked(tmp_path: Path) -> None:
    judge = with_tokenizer(make_tiny_model(tmp_path / "judge"))
    config = two_models(judge)
    config = replace(config, serving=replace(config.serving, health_timeout_s=0.2))
    weights_in(judge, 7)
    launched: list[AnsweringHandle] = []

    def launch(engine: PlannedDevices) -> AnsweringHandle:
        """The first keeps its requests open; the second one answers."""
        launched.append(AnsweringHandle(0, Journal(), process=len(launched)))
        launched[-1].is_open = len(launched) == 2
        return launched[-1]

    plan = next(each for each in plan_own_engines(config) if each.model == "judge")
    model = FrozenModel(config, plan, launch, key="")
    model.start()
    assert model.ask([], GREEDY, timeout_s=60) == []
    num_probes = len(launched[0].probes)
    time.sleep(0.2)
    assert len(launched[0].probes) == num_probes  # nobody asks
    answers = model.ask([torch.tensor([1, 2])], GREEDY, timeout_s=60)  # the first engine hangs
    assert tokens_in(answers) == [[1]]
    assert [each.is_alive() for each in launched] == [False, True]
    model.shutdown()


def answers_of(folder: Path) -> list[list[int]]:
    engine = ready_engine(folder, max_context_tokens=30)
    samples: list[Sample] = engine.run(
        single_turn(PROMPTS, sampling_params(group=1, tokens=20, temperature=0.0))
    )
    return [sample.token_ids.tolist() for sample in samples]


def tokens_in(answers: Sequence[Answer]) -> list[list[int]]:
    return [[] if isinstance(each, str) else each.token_ids.tolist() for each in answers]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.1", "4.11")
def test_a_frozen_engine_comes_back_from_its_folder(tmp_path: Path) -> None:
    policy = make_tiny_model(tmp_path / "policy")
    judge = with_tokenizer(changed_model(policy, tmp_path / "judge"))
    too_long = torch.zeros(31, dtype=torch.int64)
    with start_servers(two_models(judge), policy, variables={}) as servers:
        servers.update(policy, version=3)
        *answers, refused = servers.ask("judge", [*CONTEXTS, too_long], GREEDY, timeout_s=60)
        assert tokens_in(answers) == answers_of(judge) != answers_of(policy)
        assert "judge refused the request: the prompt of a request has 31 tokens" in str(refused)
        for process in engine_processes():  # of the policy, too, which the judge does without
            process.kill()
        again = servers.ask("judge", CONTEXTS, GREEDY, timeout_s=60)
        assert tokens_in(again) == answers_of(judge)
        late = servers.ask("judge", CONTEXTS, GREEDY, timeout_s=1e-3)
        assert set(late) == {"judge did not answer within reward.timeout_s=0.001 s"}
    wait_until(lambda: not engine_processes())
