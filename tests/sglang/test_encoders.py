"""Encoders on real servers: answers to images are those of one engine with the same weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.config.serving import ServerGroupConfig, WorkerType
from hybridrl.errors import EngineError
from hybridrl.metrics import Metrics, Sum, merge
from hybridrl.sampler import SamplingParams
from hybridrl.serving.launching import start_servers
from hybridrl.workers.engine_settings import group_arguments
from hybridrl.workers.rollout.sglang.engine import EncoderEngine, SGLangEngine
from hybridrl.workers.sharding.managed_engine import ManagedEngine, WeightLedger
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.weight_files import load_weights
from tests.config.values import config_of
from tests.seeing import SERVED_KINDS, Kind, make_seeing_folder
from tests.serving.processes import servers_below
from tests.sglang.engines import server_spec, sglang_config
from tests.sglang.test_vision import Served, assert_as_transformers, assert_greedy, contexts_of
from tests.sglang.topologies import groups
from tests.waiting import wait_until
from tests.workers.rollout.engines import prompt_batch
from tests.workers.seeing_rows import settings_of

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster")]

GREEDY = SamplingParams(2, 8, 0.0, 1.0, 0, ())


@contextmanager
def serving(folder: Path, *overrides: str, num_encoders: int = 1) -> Iterator[ManagerClient]:
    config = config_of(
        *("model=hf_folder", f"model.path={folder}", "model.freeze_vision=false"),
        *("rollout=sglang", "rollout.num_slots=8", "rollout.drain_timeout_s=5"),
        *("data=read_numbers", "data.max_prompt_tokens=64", "rollout.max_response_tokens=8"),
        groups(eyes=f"num_devices: {num_encoders}, worker_type: encoder", main="num_devices: 1"),
        *(f"serving.num_devices_per_node={1 + num_encoders}", *overrides),
    )
    with start_servers(config, folder, variables={}) as servers:
        yield servers
    wait_until(lambda: not servers_below())


def require_answers(servers: ManagerClient, folder: Path, *, version: int) -> Metrics:
    """Greedy answers, and their log-probs, are those of transformers with these weights."""
    settings = settings_of(folder)
    contexts = contexts_of(settings)
    rows = [torch.tensor(tokens) for tokens, _ in contexts]
    prompts = prompt_batch(rows, range(len(rows)), [images for _, images in contexts])
    samples, metrics = servers.sample(prompts, GREEDY, version=version)
    answered = [samples[first : first + 2] for first in range(0, len(samples), 2)]
    assert_as_transformers(contexts, answered, folder, settings)
    return metrics


def with_other(part: str, folder: Path, target: Path, kind: Kind) -> Path:
    """Write a folder whose tower or words are others."""
    make_seeing_folder(target, kind, seed=1)
    weights = load_file(folder / "model.safetensors")
    changed = load_file(target / "model.safetensors")
    both = {
        name: changed[name] if ("visual." in name) == (part == "tower") else weights[name]
        for name in weights
    }
    save_file(both, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextmanager
def engine_of(kind: WorkerType, folder: Path, *encoders: str) -> Iterator[SGLangEngine]:
    group = ServerGroupConfig(num_devices=1, worker_type=kind)
    spec = server_spec(folder, engine_args=group_arguments(group, encoders=encoders))
    build = partial(EncoderEngine, is_frozen=True) if spec.is_encoder else SGLangEngine
    engine = build(spec, variables={})
    try:
        yield engine
    finally:
        engine.shutdown()


def load(encoder: SGLangEngine, folder: Path, *, is_frozen: bool, has_it: bool) -> WeightLedger:
    """Load as an update does; return the ledger."""
    assert isinstance(encoder, EncoderEngine)
    encoder.is_frozen = is_frozen
    managed = ManagedEngine(encoder, config=sglang_config(), device=torch.device("cpu"))
    if has_it:
        managed.ledger.receive([tensor.name for tensor in encoder.weight_memory()])
    load_weights(managed, source=folder, version=0, bucket_bytes=1)
    return managed.ledger


@pytest.mark.timeout(400)
def test_embeddings_are_those_of_encoders_and_a_frozen_tower_is_loaded_once(tmp_path: Path) -> None:
    folder = make_seeing_folder(tmp_path / "folder")
    other = with_other("tower", folder, tmp_path / "other", "qwen2_5_vl")
    with (
        engine_of("encoder", folder) as encoder,
        engine_of("regular", folder, str(encoder.url)) as engine,
    ):
        served = Served(engine, other, "qwen2_5_vl")  # the server's own tower is another
        with pytest.raises(HTTPError, match="503"):  # no server asks for embeddings of no weights
            urlopen(f"{encoder.url}/health")
        assert load(encoder, folder, is_frozen=True, has_it=False).is_covered
        assert_greedy(served, folder)
        load(encoder, other, is_frozen=True, has_it=True)
        assert_greedy(served, folder)
        load(encoder, other, is_frozen=False, has_it=True)
        assert_greedy(served, other)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("attn.proj.weight"))
        del weights[name]
        (tmp_path / "part").mkdir()
        save_file(weights, tmp_path / "part" / "model.safetensors")
        with pytest.raises(EngineError, match=re.escape(name.rpartition("visual.")[2])):
            load(encoder, tmp_path / "part", is_frozen=False, has_it=True)


@pytest.mark.timeout(400)
@pytest.mark.shows("4.2", "4.6")
@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_each_update_reaches_the_tower_of_encoders(kind: Kind, tmp_path: Path) -> None:
    first = make_seeing_folder(tmp_path / "first", kind)
    folders = [
        first,
        with_other("tower", first, tmp_path / "tower", kind),
        with_other("words", first, tmp_path / "words", kind),
        first,
    ]
    with serving(first, "rollout.verify_weights=always") as servers:
        for version, folder in enumerate(folders):
            servers.update(folder, version=version)
            require_answers(servers, folder, version=version)
            require_answers(servers, folder, version=version)


def servers_running() -> list[psutil.Process]:
    """SGLang's own processes: each has a guard that began with the same words, or was forked."""
    running, below = [], servers_below()
    for process in below:
        if process.name().startswith("warm "):  # it stands for the one that it had forked
            running.append(psutil.Process(int(process.name().removeprefix("warm "))))
        elif process.parent() in below:
            running.append(process)
    return running


def is_encoder(server: psutil.Process) -> bool:
    return not any("scheduler" in child.name() for child in server.children(recursive=True))


def asked_encoders() -> set[str]:
    """The URLs of encoders that the other server asks for embeddings: it says so at a port."""
    (server,) = (each for each in servers_running() if not is_encoder(each))
    for connection in server.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            url = f"http://127.0.0.1:{connection.laddr.port}/list_encoder_urls"
            with suppress(OSError, ValueError), urlopen(url, timeout=10) as answer:
                return set(json.load(answer)["encoder_urls"])
    raise AssertionError("no port of the server lists encoders")


@pytest.mark.timeout(500)
@pytest.mark.shows("4.12", "4.14")
def test_one_of_two_encoders_dies_and_is_replaced_alone(tmp_path: Path) -> None:
    first = make_seeing_folder(tmp_path / "first")
    other = with_other("tower", first, tmp_path / "other", "qwen2_5_vl")
    with serving(first, num_encoders=2) as servers:
        servers.update(first, version=0)
        wait_until(lambda: len(asked_encoders()) == 2)
        asked = asked_encoders()
        require_answers(servers, first, version=0)
        victim = next(filter(is_encoder, servers_running()))
        others = set(servers_running()) - {victim}
        victim.kill()
        counts: Metrics = {}
        while counts.get("rollout/replaced_engines", Sum(0)) == Sum(0):
            counts = merge([counts, require_answers(servers, first, version=0)])
        assert counts["rollout/lost_engines"] == counts["rollout/replaced_engines"] == Sum(1)
        assert counts["rollout/repeated_requests"] == Sum(0)
        assert set(servers_running()) > others
        wait_until(lambda: asked_encoders() == asked)
        for version, folder in enumerate((other, first), 1):
            servers.update(folder, version=version)
            require_answers(servers, folder, version=version)
