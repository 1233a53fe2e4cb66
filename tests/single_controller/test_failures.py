from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, OutOfDiskError, OutOfMemoryError, RayTaskError

from hybridrl.errors import DispatchError, RemoteCallError, WorkerDiedError, WorkerGroupError
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.single_controller.failures import FailedCall
from tests.single_controller.workers import Scaler
from tests.waiting import wait_until_gone


def test_an_exception_names_its_rank_and_the_group_goes_on(four_ranks: RayWorkerGroup) -> None:
    for rank in (0, 3):
        with pytest.raises(RemoteCallError, match=f"KeyError: 'rank {rank} is unhappy'") as caught:
            four_ranks.raise_on(rank)
        error = caught.value
        assert (error.rank, error.method) == (rank, "raise_on")
        assert error.host == four_ranks.hosts[rank]
        assert "workers.py" in error.remote_traceback
        assert isinstance(error.__cause__, KeyError)
        assert pickle.loads(pickle.dumps(error)).remote_traceback == error.remote_traceback
    assert four_ranks.raise_on(9) == [0, 1, 2, 3]


def test_a_failed_future_fails_the_calls_that_take_it(four_ranks: RayWorkerGroup) -> None:
    broken = four_ranks.scale_later(["not", "a", "number", "!"])
    with pytest.raises(RemoteCallError, match=r"scale\(\) failed: TypeError"):
        four_ranks.scale(broken)
    with pytest.raises(RemoteCallError, match=r"scale_later\(\) failed: TypeError"):
        broken.get()


def test_ranks_that_do_not_return_after_a_failure_are_stopped(ray_cluster: None) -> None:
    pool = RayResourcePool([2], num_cpus_per_rank=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler), grace_s=0.5) as two_ranks:
        pids = [place["pid"] for place in two_ranks.describe()]
        with pytest.raises(RemoteCallError, match="KeyError: 'rank 1 is unhappy'") as caught:
            two_ranks.raise_while_others_wait(1)
        [note] = caught.value.__notes__
        assert re.fullmatch(
            r"ranks \[0\] did not return and were stopped\n"
            r"  rank 0 \(.*, sleeping\): raise_while_others_wait\(\) for .* s, "
            r"at raise_while_others_wait \(workers.py:\d+\)",
            note,
        )
        wait_until_gone(pids)
        with pytest.raises(WorkerGroupError, match=r"raise_while_others_wait\(\) failed on rank 1"):
            two_ranks.describe()


RESET = RayTaskError("reduce", "traceback text", ConnectionError("reset by peer"))


@pytest.mark.shows("R7.4")
@pytest.mark.parametrize(
    ("death", "told"),
    [
        (ActorDiedError(), ["rank 1 on host-b"]),
        (
            OutOfMemoryError("8.1GB used / 8GB"),
            ["rank 1 on host-b: reduce() failed: Ray's memory monitor killed", "8.1GB used / 8GB"],
        ),
    ],
)
def test_a_death_is_the_root_and_the_others_are_noted(death: Exception, told: list[str]) -> None:
    # The collectives of rank 0 break before it is known that rank 1 died.
    failed = FailedCall("reduce", ["host-a", "host-b", "host-c"], {0: RESET, 1: death}, late=[2])
    assert failed.dead == [1]
    error = failed.error()
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.host) == (1, "host-b")
    assert all(words in str(error) for words in told)
    assert error.__notes__ == [
        "rank 0 on host-a failed too: ConnectionError: reset by peer",
        "ranks [2] did not return and were stopped",
    ]


def test_a_module_that_a_node_lacks_is_named(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here_alone.py").write_text(
        "from hybridrl.single_controller import Worker\nclass Lonely(Worker): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lonely = importlib.import_module("here_alone").Lonely
    with pytest.raises(RemoteCallError, match=r"no Python module 'here_alone'.*--working-dir"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(lonely))


def test_an_argument_that_cannot_be_pickled_calls_no_rank(four_ranks: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"argument of take_whole\(\) of type lock"):
        four_ranks.take_whole(threading.Lock())
    of_constructor = r"arguments of a constructor cannot be pickled: .*lock"
    with pytest.raises(DispatchError, match=of_constructor):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Scaler, threading.Lock()))


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank(
    four_ranks: RayWorkerGroup,
) -> None:
    with pytest.raises(RemoteCallError, match=r"return_lock\(\) failed: TypeError: .*pickle"):
        four_ranks.return_lock()
    assert four_ranks.scale(np.ones(4)).tolist() == [3.0] * 4


def test_a_result_without_a_place_names_the_variable_of_the_store() -> None:
    full = RayTaskError("make", "traceback text", OutOfDiskError("Local disk is full"))
    error = FailedCall("make", ["host-a"], {0: full}, late=[]).error()
    assert "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION=0.5" in str(error)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "environment", "words"),
    [
        ("memory", {"RAY_memory_usage_threshold": "0.01"}, "WorkerDiedError: rank 0 on"),
        ("argument", {"RAY_local_fs_capacity_threshold": "0.0001"}, "ResourceError: an argument"),
        ("result", {"RAY_local_fs_capacity_threshold": "0.0001"}, "RemoteCallError: rank 0 on"),
        ("spilled", {}, "[209715200]"),
    ],
)
def test_what_a_real_ray_says_is_understood(
    case: str, environment: dict[str, str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.single_controller.memory_faults", case],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert words in done.stdout, done.stdout + done.stderr
    remedies = {"memory": "rollout.num_slots", "spilled": ""}
    assert remedies.get(case, "OBJECT_STORE_MEMORY_PROPORTION") in done.stdout
