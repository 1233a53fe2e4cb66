from __future__ import annotations

import resource
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor
from torch.multiprocessing import reductions

from hybridrl.batch import PromptBatch
from hybridrl.errors import PhaseError
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, tensors_in
from hybridrl.workers.rollout.sglang import transports
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.transports import SharedTransport, Transport, build_transport
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import buckets, stream_weights
from tests.sglang.engines import send, sglang_config, weights_of
from tests.sglang.weights import (
    BUCKET_BYTES,
    assert_serves,
    broken_off,
    send_folder,
    stream,
    use_transport,
)
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import (
    greedy_of_hugging_face,
    make_prompts,
    sampling_params,
    stop,
    tokens_of,
)

TRANSPORTS = ["shared", "disk"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / str(seed), seed=seed) for seed in (11, 12)]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, engine: SGLangEngine) -> Iterator[str]:
    use_transport(engine, request.param)
    yield request.param
    use_transport(engine, "shared")


@pytest.mark.usefixtures("transport")
def test_after_each_stream_the_server_answers_as_hugging_face(
    engine: SGLangEngine, folders: list[Path], scratch: Path
) -> None:
    for version, folder in enumerate([*folders, folders[0]]):
        report = send_folder(engine, folder, version=version)
        num_bytes = sum(t.nbytes for t in weights_of(folder).values())
        assert report.num_bytes == num_bytes > 2 * BUCKET_BYTES
        assert engine.version == version
        assert_serves(engine, folder)
    assert not list(scratch.glob("hybridrl-weights-*"))


def test_a_stream_that_broke_off_is_sent_completely_next_time(
    engine: SGLangEngine, folders: list[Path]
) -> None:
    for version, folder in enumerate(folders):
        stop(engine)
        report = stream(engine, broken_off(folder, after=12))
        assert report.failures == {0: "OSError: gathering failed"}
        send_folder(engine, folder, version=version)
        assert_serves(engine, folder)


@pytest.mark.parametrize("transport", ["shared"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_status_400_in_a_stream_leaves_nobody_waiting(
    engine: SGLangEngine, folders: list[Path]
) -> None:
    num_loaded = 0

    def after_the_update_was_closed(staged: StagedBucket, handles: Sequence[str]) -> None:
        nonlocal num_loaded
        num_loaded += 1
        if num_loaded == 2:
            engine._server.require_success("/end_weight_update")
        engine.load(staged, handles)

    for version, folder in enumerate(folders):
        num_loaded = 0
        report = stream(engine, iter(weights_of(folder).items()), load=after_the_update_was_closed)
        assert num_loaded == 2
        (first, *_) = buckets(weights_of(folder).items(), bucket_bytes=BUCKET_BYTES)
        assert report.num_bytes == sum(tensor.nbytes for _, tensor in first)
        assert "status 400" in report.failures[0]
        assert "must run between begin_weight_update" in report.failures[0]
        engine._server.require_success("/begin_weight_update")
        send_folder(engine, folder, version=version)
        assert_serves(engine, folder)


@pytest.mark.parametrize("transport", ["disk"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_full_disk_is_a_named_error_and_the_next_stream_arrives(
    engine: SGLangEngine, folders: list[Path], scratch: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for version, folder in enumerate(folders):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            report = stream(engine, iter(weights_of(folder).items()))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "set TMPDIR to a disk with room for the model" in report.failures[0]
        assert report.failures[0].endswith(", or rollout.transport=shared")
        assert not list(scratch.glob("hybridrl-weights-*"))
        send_folder(engine, folder, version=version)
        assert_serves(engine, folder)


def test_weights_do_not_change_under_running_requests(
    engine: SGLangEngine, folders: list[Path]
) -> None:
    prompts = make_prompts(tuple(2 + n % 20 for n in range(20)))
    for version, folder in enumerate(folders):
        send_folder(engine, folder, version=version)
        answers: list[list[int]] = []
        thread = threading.Thread(target=_answer, args=(engine, prompts, answers))
        thread.start()
        norm = weights_of(folder)["model.norm.weight"]
        num_refused = 0
        while thread.is_alive():
            try:  # what would ruin the answers comes only once the engine is seen to be busy
                send(engine, [("model.norm.weight", norm * (num_refused == 0))])
            except PhaseError:
                num_refused += 1
            thread.join(0.005)
        assert num_refused
        thread.join()
        expected = greedy_of_hugging_face(folder, prompts, num_tokens=12)
        assert answers == [tokens for tokens in tokens_of(expected) for _ in range(2)]


def _answer(engine: SGLangEngine, prompts: PromptBatch, answers: list[list[int]]) -> None:
    greedy = sampling_params(group=2, tokens=12, temperature=0.0)
    answers.extend(tokens_of(engine.run(single_turn(prompts, greedy))))


def _build_on_gpu() -> None:
    cuda = torch.device("cuda")
    build_transport(sglang_config(), device=cuda, is_sender=True, from_disk=False)


def test_a_rank_with_a_gpu_names_its_host_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Adapters are in it, and a server's ranks, no children of ours, cannot take a descriptor.
    prepared: list[str] = []
    patch = "monkey_patch_torch_reductions"
    monkeypatch.setattr(transports, patch, lambda: prepared.append("ipc"))
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        _build_on_gpu()
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
    finally:
        torch.multiprocessing.set_sharing_strategy("file_system")
    assert prepared == ["ipc"]


def test_host_memory_has_handles_where_gpus_have_serial_numbers() -> None:
    # With SGLang's own patch, which build_transport applies where there is a GPU.
    kept = {name: getattr(reductions, name) for name in ("reduce_tensor", "rebuild_cuda_tensor")}
    _build_on_gpu()
    try:
        sent = {"lora": torch.arange(6.0).view(2, 3)}
        text = MultiprocessingSerializer.serialize(sent, output_str=True)
        got = MultiprocessingSerializer.deserialize(text)
        assert torch.equal(got["lora"], sent["lora"])
    finally:
        for name, function in kept.items():
            setattr(reductions, name, function)
        for name in ("_reduce_tensor_original", "_rebuild_cuda_tensor_original"):
            delattr(reductions, name)
        reductions.init_reductions()


NUM_BUCKETS = 6


class LateReader:
    """A server whose ranks read as late as they may.

    The first has read a bucket when it answers: here, when the next one has been packed. The others
    have read it when the first answers the bucket after it.
    """

    def __init__(self, transport: Transport, *, num_ranks: int) -> None:
        self._transport = transport
        self._num_ranks = num_ranks
        self._num_packed = 0
        self._packed = threading.Condition()
        self._loaded: list[StagedBucket] = []
        self.read: list[list[list[float]]] = [[] for _ in range(num_ranks)]

    def stage(self, bucket: Bucket) -> StagedBucket:
        staged = self._transport.stage(bucket)
        with self._packed:
            self._num_packed += 1
            self._packed.notify_all()
        return staged

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self._loaded.append(staged)
        number = len(self._loaded)
        with self._packed:
            is_packed = self._packed.wait_for(
                lambda: self._num_packed >= min(number + 1, NUM_BUCKETS), timeout=20.0
            )
        assert is_packed
        self._read(0, staged)
        if self._num_ranks > 1 and number > 1:
            self._read(1, self._loaded[-2])

    def release_buffers(self) -> None:
        self._transport.release_buffers()

    def _read(self, rank: int, staged: StagedBucket) -> None:
        assert staged.flat is not None
        (values,) = tensors_in(staged.flat, staged.spans).values()
        self.read[rank].append(values.tolist())


def _weights() -> Iterator[tuple[str, Tensor]]:
    for number in range(NUM_BUCKETS):
        yield f"w{number}", torch.full((8,), float(number))


@pytest.mark.shows("5.8")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bucket_is_whole_for_the_last_who_reads_it(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    # Handles that nobody opens would keep their memory.
    monkeypatch.setattr(transports, "encode", lambda flat, spans: "")
    transport = SharedTransport(
        device=torch.device("cpu"),
        num_ranks=num_ranks,
        dtype=torch.float32,
    )
    reader = LateReader(transport, num_ranks=num_ranks)
    control = ControlGroup(timeout_s=20.0)
    report = stream_weights(
        _weights(), reader.load, sender=reader, bucket_bytes=32, control=control
    )
    assert not report.failures
    sent = [[float(number)] * 8 for number in range(NUM_BUCKETS)]
    assert reader.read[0] == sent
    assert reader.read[1:] == [sent[:-1]] * (num_ranks - 1)
