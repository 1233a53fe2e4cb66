"""One SGLang server for as many tests as can share it: a forked one takes 1 s of CPU to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl import env
from hybridrl.workers.rollout.sglang.arguments import environment
from tests.sglang import warm
from tests.sglang.engines import MortalEngine, make_ready, running_engine, server_spec
from tests.sglang.lora_device import ForgetfulEngine, wake_up
from tests.sglang.warm import PRELOADED, SOCKET
from tests.tiny_models import make_tiny_model
from tests.warm_workers.forking import forks_served
from tests.workers.train.lora_engines import LORA

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; the first test that needs a server waits for it."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session", autouse=True)
def warm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that this process and Ray's workers start are forked; those of commands are not."""
    folder = tmp_path_factory.mktemp("warm")
    with (
        forks_served(folder, SOCKET, *PRELOADED, variables=environment(server_spec(folder))),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("hybridrl.workers.rollout.sglang.server._CHILD", warm.__name__)
        yield


BY_ITSELF = """
import runpy, sys
from importlib import import_module
try:
    runpy.run_module("hybridrl.workers.rollout.sglang.child", run_name="__main__")
except SystemExit as refused:
    print(refused)
import_module("sglang.srt.debug_utils.dumper")  # which imports megatron-core
print("hook_mode:", import_module("torch_memory_saver").torch_memory_saver.hook_mode)

# Triton's interpreter runs SGLang's kernel on a CPU.
import sgl_kernel, torch, triton
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel as kernel
seeds = torch.tensor([0, 1, 2**40 + 7, 2**63 - 1], dtype=torch.uint64)
positions, columns = torch.tensor([0, 5, 70000, 3]), torch.arange(300)
expected = torch.empty(4, 300, dtype=torch.uint32)
kernel[(4, 1)](seeds, positions, columns, expected, 4, 300, BLOCK_SIZE=1024)
found = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, positions, columns)
print("hashes:", int((found != expected).sum()), len(set(found.flatten().tolist())))
try:
    sgl_kernel.fp8_blockwise_scaled_mm(1)
except NotImplementedError:
    print("raised")
"""


@pytest.fixture(scope="session")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """What a process says that imports SGLang as a server does that nothing forks: takes 9 s."""
    folder = tmp_path_factory.mktemp("by_itself")
    (folder / "torch_memory_saver.py").write_text(
        "class Saver: hook_mode = 'preload'\ntorch_memory_saver = Saver()\n"
    )
    (folder / "arguments.json").write_text('{"chunked_prefil_size": 512, "wrap_speed": 9}')
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BY_ITSELF, folder / "arguments.json"],
        env=env.everything()
        | {"PYTHONPATH": f"{folder}{os.pathsep}{env.python_path()}", "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,  # it ends with it
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        return process.stdout.read().splitlines()


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def shared_engine(served_model: Path) -> Iterator[MortalEngine]:
    """An engine that lives as long as the session, in whatever state a test left it."""
    with running_engine(server_spec(served_model)) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: MortalEngine, served_model: Path) -> MortalEngine:
    """The shared engine: awake, with the weights of ``served_model`` as version 0.

    A test may sync, put it to sleep, and kill its server if it has started another at its end.
    """
    make_ready(shared_engine, served_model)
    shared_engine.take_metrics()
    return shared_engine


@pytest.fixture(scope="session")
def shared_lora_engine(served_model: Path) -> Iterator[ForgetfulEngine]:
    spec = replace(server_spec(served_model), lora=LORA, num_adapters=2)
    engine = ForgetfulEngine(spec, variables={})
    engine.forget_journal()
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture
def lora_engine(shared_lora_engine: ForgetfulEngine) -> ForgetfulEngine:
    """The shared engine that takes adapters: awake, with none, its weights not to be trusted."""
    wake_up(shared_lora_engine)
    shared_lora_engine.forget_journal()
    shared_lora_engine.take_metrics()
    return shared_lora_engine
