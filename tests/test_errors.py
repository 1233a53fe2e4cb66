from __future__ import annotations

import pickle

import pytest
from ray.exceptions import RayTaskError

from hybridrl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    EngineError,
    ExternalServersError,
    HybridRLError,
    ModelError,
    RemoteCallError,
    RewardError,
    RunFolderError,
    ServerDiedError,
    TrainingError,
    WorkerDiedError,
    WorkerGroupError,
    is_restartable,
    suggest_name,
)
from hybridrl.single_controller.failures import FailedCall


class DistBackendError(RuntimeError):
    """Named as torch's, which this module does not import."""


class StageError(EngineError):
    """Quotes what other ranks raised."""


def _remote(cause: Exception) -> RemoteCallError:
    """What the driver raises when a rank raised ``cause``."""
    failures: dict[int, Exception] = {0: RayTaskError("update", "traceback text", cause)}
    error = FailedCall("update", ["host-a"], failures, late=[]).error()
    assert isinstance(error, RemoteCallError)
    return error


def _from(cause: Exception, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError(rank=1, host="a", method="update", cause="gone", traceback="..."),
        DeadlineError("ranks [1] of 2 have not answered update() within 600 s"),
        _remote(DeadlineError("sync: not all 2 ranks answered within 6 s")),
        _remote(DistBackendError("NCCL communicator was aborted on rank 1")),
        _remote(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]")),
        _remote(RuntimeError("Read error [127.0.0.1]:3804: Connection reset by peer")),
        _remote(RuntimeError("Timed out waiting 1000ms for recv operation to complete")),
        _remote(StageError("sync failed on rank 1: RuntimeError: Connection closed by peer")),
        _remote(StageError("drain failed on engine 0: ServerDiedError: SGLang was killed")),
        _remote(ServerDiedError("/generate: SGLang was killed by SIGKILL")),
        _remote(_from(RuntimeError("Broken pipe"), CheckpointError("could not be gathered"))),
        ServerDiedError("start: the rollout manager is gone"),  # on the driver
        StageError("start failed on engine 0: ServerDiedError: the process is gone"),
    ],
)
def test_a_death_a_hang_and_their_consequences_are_restartable(error: HybridRLError) -> None:
    assert is_restartable(error)
    assert is_restartable(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize(
    "error",
    [
        _remote(ValueError("Connection closed by peer")),
        _remote(ConnectionError("Connection reset by peer")),  # of the user's own sockets
        _remote(RuntimeError("The size of tensor a (3) must match")),
        _remote(EngineError("prompt 3 is empty: it needs at least 1 token")),
        _remote(EngineError("it did not start: SGLang ended with status 3")),
        EngineError("prompt 3 is empty"),
        _from(DeadlineError("late"), ExternalServersError("http://judge:1: it gives no checksums")),
        StageError("start failed on engine 0: EngineError: SGLang ended with status 3"),
        ConfigError("a.b", 1, rule="must be 2", fix="set a.b=2"),
        RewardError("it raised"),
        DataError("rows.jsonl:2"),
        ModelError("no such folder"),
        TrainingError("not finite"),
        RunFolderError("exists"),
        WorkerGroupError("was stopped"),
        KeyboardInterrupt(),
        TypeError("a bug of ours"),
    ],
)
def test_what_the_same_code_would_do_again_is_not(error: BaseException) -> None:
    assert not is_restartable(error)


def test_near_names_are_proposed_and_long_lists_end() -> None:
    assert suggest_name("temprature", ["temperature", "top_p"]) == "did you mean 'temperature'?"
    assert suggest_name("GRPO", ["grpo", "ppo"]) == "did you mean 'grpo' or 'ppo'?"
    assert suggest_name("x", ["beta", "alpha"]) == "known: alpha, beta"
    many = suggest_name("x", [f"name_{number:03}" for number in range(500)])
    assert many.endswith("name_039 and 460 more")
