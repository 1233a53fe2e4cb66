from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hybridrl.errors import EngineError, LedgerError
from hybridrl.serving.launching import start_servers
from hybridrl.workers.rollout.protocol import Receiver
from hybridrl.workers.rollout.sglang.broadcast import WeightGroup
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.weight_stream import buckets
from hybridrl.workers.train.protocol import WeightSet
from tests.config.values import config_of
from tests.sglang.engines import (
    kill_server,
    own_schedulers,
    running_engine,
    server_of,
    server_spec,
    stopped_server,
    weights_of,
)
from tests.sglang.weights import GREEDY, PROMPTS, assert_serves
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import greedy_of_hugging_face, stop, tokens_of
from tests.workers.sharding.managers import rank_of_servers
from tests.workers.sharding.recording import Journal, RecordingTrainEngine

CPU = torch.device("cpu")
BUCKET_BYTES = 2**18
STAGE_S = 6.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    # Buckets larger than the buffers of a socket: a member that is gone is missed at once.
    return [make_tiny_model(root / str(seed), seed=seed, hidden_size=256) for seed in (11, 12)]


@pytest.fixture(scope="module")
def survivor(folders: list[Path]) -> Iterator[SGLangEngine]:
    with running_engine(server_spec(folders[0])) as engine:
        yield engine


@pytest.fixture(scope="module")
def any_victim(folders: list[Path]) -> Iterator[SGLangEngine]:
    with running_engine(server_spec(folders[0])) as engine:
        yield engine


@pytest.fixture
def victim(any_victim: SGLangEngine) -> Iterator[SGLangEngine]:
    """A second server, which a test may kill or leave in a group that is lost."""
    if any_victim.has_died():
        any_victim.restart()
    yield any_victim


@pytest.fixture
def group() -> Iterator[WeightGroup]:
    group = WeightGroup(timeout_s=STAGE_S)
    yield group
    group.leave()
    assert not group._clients


def joining(*engines: SGLangEngine) -> Mapping[int, Receiver]:
    for engine in engines:
        stop(engine)
    return {index: engine.join() for index, engine in enumerate(engines)}


def send_all(group: WeightGroup, folder: Path) -> None:
    for bucket in buckets(weights_of(folder).items(), bucket_bytes=BUCKET_BYTES):
        group.send(bucket)
        group.wait_until_sent()
    group.finish()


def require_served(engine: SGLangEngine, folder: Path, *, version: int) -> None:
    """Bit for bit those of the files, and the engine answers with them."""
    engine.finish_update(version=version)
    engine.compare_with_files(folder)
    engine.continue_generation()
    assert_serves(engine, folder)


def begin_and_lose(group: WeightGroup, folder: Path) -> float:
    """Send the second bucket, which not all get; return how long that took."""
    begin = time.monotonic()
    with pytest.raises(EngineError, match="weights did not reach all servers"):
        send_all(group, folder)
    return time.monotonic() - begin


@pytest.mark.timeout(400)
@pytest.mark.shows("2.14")
def test_two_servers_get_the_same_bits_in_each_sync_and_keep_their_group(
    survivor: SGLangEngine, victim: SGLangEngine, group: WeightGroup, folders: list[Path]
) -> None:
    names = set()
    for version, folder in enumerate([*folders, folders[0]]):
        group.join(joining(survivor, victim), device=CPU)
        send_all(group, folder)
        names.add(group._name)
        for engine in (survivor, victim):
            require_served(engine, folder, version=version)
    assert len(names) == 1
    group.join(joining(survivor, victim), device=CPU)
    send_all(group, folders[1])
    survivor.finish_update(version=3)
    with pytest.raises(LedgerError, match="weights of the rollout engine are not the trainer's"):
        survivor.compare_with_files(folders[0])


@pytest.mark.timeout(400)
def test_a_server_that_refuses_a_bucket_is_at_fault_alone(
    survivor: SGLangEngine, victim: SGLangEngine, group: WeightGroup, folders: list[Path]
) -> None:
    group.join(joining(survivor, victim), device=CPU)
    server_of(victim).require_success("/end_weight_update")
    assert begin_and_lose(group, folders[0]) < STAGE_S
    assert group.failures.keys() == {1}
    assert "must run between begin_weight_update" in group.failures[1]
    group.join(joining(survivor), device=CPU)
    send_all(group, folders[0])
    require_served(survivor, folders[0], version=4)
    server_of(victim).require_success("/begin_weight_update")  # as its engine has it


@pytest.mark.shows("4.12")
@pytest.mark.parametrize(
    ("place", "stalls"),
    [
        pytest.param(0, False, id="killed at rank 1"),
        pytest.param(1, False, id="killed at rank 2", marks=pytest.mark.nightly),
        pytest.param(0, True, id="stalled until the deadline"),
    ],
)
def test_a_server_that_is_lost_in_a_transfer_costs_itself_alone(
    survivor: SGLangEngine,
    victim: SGLangEngine,
    group: WeightGroup,
    folders: list[Path],
    *,
    place: int,
    stalls: bool,
) -> None:
    engines = (survivor, victim) if place else (victim, survivor)
    pid = server_of(survivor).process.pid
    group.join(joining(*engines), device=CPU)
    send_all(group, folders[1])
    old_name = group._name
    if not stalls:
        group.send(list(weights_of(folders[0]).items())[:2])
        group.wait_until_sent()
        kill_server(victim)
    with stopped_server(victim) if stalls else nullcontext():
        seconds = begin_and_lose(group, folders[0])
    assert (STAGE_S - 1 < seconds < 2 * STAGE_S) if stalls else (seconds < STAGE_S)
    assert group.failures.keys() == {place}
    if stalls:
        kill_server(victim)
    group.join(joining(survivor), device=CPU)
    assert group._name != old_name
    send_all(group, folders[0])
    require_served(survivor, folders[0], version=5)
    assert server_of(survivor).process.pid == pid


@pytest.mark.timeout(400)
def test_a_server_that_never_joins_keeps_nobody_waiting(
    survivor: SGLangEngine, victim: SGLangEngine, group: WeightGroup, folders: list[Path]
) -> None:
    receivers = joining(survivor, victim)
    with (
        stopped_server(victim),
        pytest.raises(EngineError, match=r"it took over 6 s \(rollout\.stage_timeout_s\)"),
    ):
        group.join(receivers, device=CPU)
    assert group.failures.keys() == {1}
    kill_server(victim)
    begin = time.monotonic()
    with pytest.raises(EngineError, match="engine 1: "):
        group.join(receivers, device=CPU)
    assert time.monotonic() - begin < STAGE_S
    group.join(joining(survivor), device=CPU)
    send_all(group, folders[1])
    require_served(survivor, folders[1], version=7)


class FolderTrainer(RecordingTrainEngine):
    """Sends the weights of a folder; on their second bucket it may be told to do something."""

    folder: Path
    in_transfer: Callable[[], None] | None = None

    def full_weights(
        self, weight_set: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        num_bytes = 0
        for name, tensor in weights_of(self.folder).items():
            num_bytes += tensor.nbytes
            if num_bytes > 2**21 and self.in_transfer is not None:
                act, self.in_transfer = self.in_transfer, None
                act()
            yield name, tensor


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("2.14", "4.12")
def test_what_a_transfer_or_a_phase_loses_is_replaced_with_the_newest_weights(
    folders: list[Path],
) -> None:
    config = config_of(
        *("serving=own", "rollout=sglang", "serving.weights=broadcast", "rollout.bucket_mib=1"),
        *("data.max_prompt_tokens=36", "rollout.max_response_tokens=16"),
        *("rollout.stage_timeout_s=60", "cluster.call_timeout_s=300"),
    )
    trainer = FolderTrainer(Journal())
    with start_servers(config, folders[0], variables={}) as servers:
        rank = rank_of_servers(servers, config.rollout)
        rank.attach_policy(trainer.as_policy())

        def require_new(version: int) -> None:
            rank.weights_changed(version=version)
            trainer.folder = folders[version % 2]
            with rank.rollout_phase():
                require_sampled(version)

        def require_sampled(version: int) -> None:
            samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
            expected = greedy_of_hugging_face(folders[version % 2], PROMPTS, num_tokens=8)
            assert tokens_of(samples) == tokens_of(expected)
            assert {sample.weight_version for sample in samples} == {version}

        require_new(0)
        before = {each.pid for each in own_schedulers()}
        require_new(1)
        assert {each.pid for each in own_schedulers()} == before
        victim = own_schedulers()[1]
        trainer.in_transfer = victim.kill
        require_new(2)
        assert trainer.in_transfer is None
        after = {each.pid for each in own_schedulers()}
        assert len(after) == 2
        assert after & before == before - {victim.pid}
        [lost] = [each for each in own_schedulers() if each.pid in before]
        with rank.rollout_phase():
            lost.kill()  # the trainer is not asked: its weights may be others by now
            wait_until(lambda: len(own_schedulers()) == 1)
            require_sampled(2)
            wait_until(lambda: len(own_schedulers()) == 2, deadline_s=100)
            next(each for each in own_schedulers() if each.pid in after).kill()
            require_sampled(2)  # by what came in its place
        rank.shutdown()
