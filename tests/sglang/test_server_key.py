"""Who does not know a server's key gets nothing from it, though he can reach its port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.strangers import server_of


@contextmanager
def stranger(engine: SGLangEngine, key: str) -> Iterator[ControlClient]:
    """Somebody else on this machine who found the port."""
    server = server_of(engine)
    url = f"http://127.0.0.1:{server.info['port']}"
    client = ControlClient(url, name="it", require_alive=server.process.require_alive, key=key)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("key", ["", "guessed"])
@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/server_info", "GET"),
        ("/generate", "POST"),
        ("/update_weights_from_disk", "POST"),
        ("/load_lora_adapter_from_tensors", "POST"),
        ("/release_memory_occupation", "POST"),
    ],
)
def test_a_server_serves_nobody_without_its_key(
    engine: SGLangEngine, key: str, path: str, method: str
) -> None:
    with stranger(engine, key) as client, pytest.raises(RefusedError) as refused:
        client.call(path, {}, timeout_s=10.0, method=method)
    assert refused.value.status == 401


def test_a_servers_key_is_not_on_its_command_line(engine: SGLangEngine) -> None:
    process = psutil.Process(server_of(engine).process.pid)
    commands = [each.cmdline() for each in (process, *process.children(recursive=True))]
    key = server_of(engine).client.key
    assert len(key) >= 32
    assert not [command for command in commands if any(key in word for word in command)]
