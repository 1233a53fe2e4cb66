"""What all tests share: the environment of child processes, one Ray cluster per session, and how
workers divide the tests.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

# Before torch and Ray are imported. Ray's workers inherit it, whatever folder they start in.
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    RAY_worker_niceness="0",
    TOKENIZERS_PARALLELISM="false",
    ONEDNN_PRIMITIVE_CACHE_CAPACITY="32",
    LRU_CACHE_CAPACITY="32",
    REPORTER_UPDATE_INTERVAL_MS="3600000",  # of Ray: no dashboard reads what it reports
)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest
import ray
import torch

from hybridrl.run.cluster import keep_token_private
from tests import not_run
from tests.drawn import register_profiles
from tests.durations import DurationsByFolder, folder_of
from tests.warm_workers.forking import workers_forked

register_profiles()


@pytest.fixture(autouse=True)
def a_closed_terminal_counts() -> Iterator[None]:
    """Under nohup the tests ignore SIGHUP, and all that they start would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray of eight logical CPUs that belongs to this session alone."""
    with workers_forked(tmp_path_factory.mktemp("workers")):
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 * 1024 * 1024,
        )
        yield
        ray.shutdown()


class _Ending:
    """Ends the process when all is reported, past the end of the interpreter.

    There the libraries of torch, gloo, Ray and SGLang are torn down in one process, in whatever
    order: seen to crash after a whole run had passed, which no test can be blamed for.
    """

    def __init__(self) -> None:
        self._status = 0

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        ray.shutdown()  # what else would be done then
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self._status)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Ending())
    config.pluginmanager.register(DurationsByFolder())
    config.pluginmanager.register(not_run)
    if not Path.home().joinpath(".ray", "auth_token").exists():
        keep_token_private()  # workers that began at once would each make one


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


_LONG = {
    *("tests/end_to_end", "tests/benchmarks", "tests/single_controller", "tests/run"),
    *("tests/contract", "tests/rehearsal", "tests/serving", "tests/workers"),
    *("tests/workers/sharding", "tests/workers/train/megatron"),
}
"""Folders whose files take long: they go first, so that no worker ends long after the other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: folder_of(item.nodeid) not in _LONG)


def pytest_collection_finish() -> None:
    """What is collected stays: no collection of garbage looks at it again (8 % of the CPU)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Divide the tests by file; see `tests/workers_share.py`."""
    return import_module("tests.workers_share").ByFile(config, log)  # xdist need not be installed


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, or several where there are fewer."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    several = item.get_closest_marker("gpus")
    num_devices = torch.cuda.device_count()
    if several and num_devices < several.args[0]:
        pytest.skip(f"needs {several.args[0]} CUDA devices, there are {num_devices}")
