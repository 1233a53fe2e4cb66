"""Real engines in processes of their own, on a CPU: what a rank asks of the servers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybridrl.errors import DriftError
from hybridrl.metrics import Sum
from hybridrl.sampler import Sample
from hybridrl.serving.launching import start_servers
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.manager_client import ManagerClient
from tests.config.values import config_of
from tests.serving.processes import engine_processes, wait_for_a_busy_process
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params, tokens_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

PROMPTS = make_prompts([3, 9, 5, 2] * 6)
SAMPLING = sampling_params(group=4, tokens=50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def servers(model: Path, ray_cluster: None) -> Iterator[ManagerClient]:
    config = config_of(
        *("serving=own", "rollout.num_slots=2", "rollout.drain_timeout_s=5"),
        *("data.max_prompt_tokens=12", "rollout.max_response_tokens=50"),
        "data.max_digits=11",
    )
    with start_servers(config, model, variables={}) as started:
        yield started
    wait_until(lambda: not engine_processes())


@cache
def expected(folder: Path) -> Sequence[Sample]:
    engine = ready_engine(folder, max_context_tokens=62)
    return engine.run(single_turn(PROMPTS, SAMPLING))


def changed_model(model: Path, folder: Path) -> Path:
    """The same model with other weights."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: 1.5 * tensor for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_model(model, tmp_path_factory.mktemp("changed") / "other")


@pytest.mark.shows("4.1", "4.12", "4.15")
def test_a_killed_engine_costs_no_sample_and_is_replaced(
    servers: ManagerClient, model: Path
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


def test_new_weights_are_sampled_with_and_versions_compared(
    servers: ManagerClient, other: Path
) -> None:
    servers.update(other, version=7)
    samples, _ = servers.sample(PROMPTS, SAMPLING, version=7)
    assert tokens_of(samples) == tokens_of(expected(other))
    assert {sample.weight_version for sample in samples} == {7}
    with pytest.raises(DriftError, match=r"sampled with weights of version \[7\]"):
        servers.sample(PROMPTS, SAMPLING, version=8)
