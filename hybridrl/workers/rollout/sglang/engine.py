"""SGLang as a ``RolloutEngine``: one server, which samples, sleeps and wakes."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.rollout import ABORT_GRACE_S, FLUSH_TIMEOUT_S
from hybridrl.diagnostics import activity
from hybridrl.errors import (
    DeadlineError,
    EngineError,
    LedgerError,
    ModelError,
    PhaseError,
    suggest_name,
)
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.models.architecture import read_architecture
from hybridrl.models.image_settings import read_image_settings
from hybridrl.models.load import DTYPES
from hybridrl.sampler import Program, Sampler, T
from hybridrl.workers.rollout.adapter_fit import (
    built_without_adapters,
    no_adapter_loaded,
    require_fit,
)
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket
from hybridrl.workers.rollout.event_loop import RequestGate, run_program
from hybridrl.workers.rollout.protocol import MemoryTag, Receiver, WeightMemory, mismatch
from hybridrl.workers.rollout.sglang.arguments import ServingSpec
from hybridrl.workers.rollout.sglang.client import Body, Endpoint, RefusedError, checksums_of
from hybridrl.workers.rollout.sglang.elsewhere import AttachedServer
from hybridrl.workers.rollout.sglang.memory import base_shapes, held_bytes, require_whole_vocabulary
from hybridrl.workers.rollout.sglang.pairing import EncodedEndpoint, PairedEndpoint
from hybridrl.workers.rollout.sglang.sampling import (
    BELOW_ADAPTERS,
    HttpSampler,
    ServedModel,
    adapter_name,
)
from hybridrl.workers.rollout.sglang.server import StartedServer
from hybridrl.workers.rollout.sglang.transports import build_transport, serialized

_TOWER = "visual."
_NO_SUCH_ADAPTER = "does not exist"

_LEAVE_S = 2.0
"""Seconds for open requests of a server that runs elsewhere, when the run ends."""


class SGLangEngine:
    """A ``RolloutEngine`` over one SGLang server, which holds the devices of its ranks.

    Its weights are random until they are sent. Log-probs are those at the sampling temperature;
    with top-p or top-k they are not of the truncated distribution (SGLang gives no others).
    """

    def __init__(
        self, spec: ServingSpec, *, variables: Mapping[str, str], device: torch.device | None = None
    ) -> None:
        """Start the server, with ``variables`` as its visible devices, or attach to it.

        An EngineError if it did not start, or cannot share memory with this process; a ModelError
        if the folder lacks weights, or has another vocabulary than its config.json.
        """
        self._spec = spec
        require_whole_vocabulary(spec.model_folder)
        self._shapes = base_shapes(spec.model_folder)
        self._adapter_shapes = {} if spec.lora is None else adapter_shapes(self._shapes, spec.lora)
        self.transport = build_transport(
            spec.rollout,
            device=device or torch.device(spec.device),
            is_sender=True,
            from_disk=spec.from_disk,
        )
        self._variables = dict(variables)
        self._model = read_architecture(spec.model_folder)
        self._expert_shape: tuple[int, int] | None = None
        if spec.returns_experts:
            if self._model.experts is None:
                raise ModelError(
                    f"actor.replay_routing=true, and model_type={self._model.model_type!r} has no "
                    "experts; set actor.replay_routing=false"
                )
            self._expert_shape = self._model.num_layers, self._model.experts.num_per_token
        self._images = read_image_settings(spec.model_folder)
        self._metrics: Metrics = {}
        self.frees_memory = spec.device == "cuda"
        self._boot()

    def _boot(self) -> None:
        elsewhere = self._spec.place.elsewhere
        self._server = (
            StartedServer(self._spec, variables=self._variables)
            if elsewhere is None
            else AttachedServer(self._spec, elsewhere)
        )
        self._gate = RequestGate()
        self._released: set[MemoryTag] = set()
        self._start = uuid.uuid4().hex
        self._is_updating = False
        self._adapters: set[int] = set()
        """Versions of those that the server has, or may have: an answer was lost."""
        self._recorded: dict[tuple[int, str], str] = {}
        """Checksums of what the weights are compared with."""
        self.version = -1
        self._metrics = merge([self._metrics, {"time/server_start_s": Max(self._server.start_s)}])

    @property
    def url(self) -> str:
        """Of the server at present: it changes with a restart."""
        return self._server.client.base_url

    # -- sampling --------------------------------------------------------------------------------

    def run(self, program: Program[T]) -> T:
        """See ``RolloutEngine``. A response that fills the context is cut, and truncated.

        An EngineError, too, if responses were cut off again and again; a DeadlineError without
        progress within ``rollout.request_timeout_s``.
        """
        with self._gate.admit() as call:
            self._require_resident("generate", *MemoryTag)
            if self._spec.lora is not None and not self._adapters:
                raise no_adapter_loaded()
            model = ServedModel(
                max_context_tokens=self._spec.max_context_tokens,
                vocab_size=self._model.vocab_size,
                version=self.version,
                weight_version=self._stamp,
                names_adapter=self._spec.lora is not None,
                expert_shape=self._expert_shape,
                images=self._images,
            )
            timeout_s = self._spec.rollout.request_timeout_s
            sampler = HttpSampler(self._endpoint(), model, call, timeout_s=timeout_s)

            async def connected(_: Sampler) -> T:
                async with sampler:
                    return await program(sampler)

            begin = time.perf_counter()
            with activity.gauge("rollout engine", sampler.describe):
                result = run_program(connected, sampler, call)
            seconds: Metrics = {"time/sample_s": Max(time.perf_counter() - begin)}
            self._metrics = merge([self._metrics, sampler.take_metrics(), seconds])
            return result

    def _endpoint(self) -> Endpoint:
        client, place = self._server.client, self._spec.place
        if place.prefills:
            return PairedEndpoint(client, place.prefills)
        has_encoders = self._spec.rollout.engine_args.get("language_only")
        return EncodedEndpoint(client) if has_encoders else client

    def progress(self) -> object:
        """Return the scheduler's last sign of life; not while it is paused."""
        return self._server.progress()

    def has_died(self) -> bool:
        """Whether the server is gone."""
        return self._server.has_died()

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last time, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def profile(self, stem: Path | None) -> None:
        """See ``ProfilesItself``; not of a server that others run."""
        if isinstance(self._server, StartedServer):
            self._server.profile(stem)

    # -- edges of its life -----------------------------------------------------------------------

    def pause(self) -> None:
        """Admit no new request: this process is the only one that sends any. Idempotent."""
        self._gate.pause()

    def interrupt(self) -> None:
        """End the open responses of this process's program, on whichever server they are."""
        self._gate.interrupt()

    def drain(self, *, timeout_s: float) -> int:
        """Let requests end, or abort them, and empty the server; see ``ControlCalls.hold``."""
        self._server.require_alive("drain")
        aborted = self._gate.drain(timeout_s, grace_s=ABORT_GRACE_S)
        self._server.hold(timeout_s=FLUSH_TIMEOUT_S)
        return aborted

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        """Free the memory of a tag. Tensors in ``backup`` survive if the server keeps a copy."""
        self._gate.require_idle(f"release of {part.name}")
        if part in self._released:
            raise PhaseError(f"{part.name} is released already")
        if backup and self.frees_memory and not self._spec.keeps_backup:
            raise EngineError(
                f"{len(backup)} weights must survive the release, and the server was started "
                "without a host copy; set lora.base=backup, or rollout.backup_weights=always"
            )
        self._server.post("/release_memory_occupation", tags=[part.value])
        self._released.add(part)

    def resume(self, part: MemoryTag) -> None:
        """Allocate a memory tag again."""
        if part not in self._released:
            raise PhaseError(f"{part.name} is resident; only what was released can be resumed")
        self._server.post("/resume_memory_occupation", tags=[part.value])
        self._released.remove(part)

    def continue_generation(self) -> None:
        """Admit requests again. Idempotent."""
        self._server.post("/continue_generation")
        self._gate.resume()

    def resident_bytes(self, part: MemoryTag) -> int:
        """Return at least how many bytes a tag holds; 0 if the server cannot free it."""
        if part in self._released or not self.frees_memory:
            return 0
        return held_bytes(self._server.info, part)

    def restart(self) -> None:
        """Kill the server and start another; its weights are random again."""
        self.shutdown()
        self._boot()

    def shutdown(self) -> None:
        """Kill the server with all its processes; one that runs elsewhere lives on. Idempotent."""
        self._gate.pause()
        if self._spec.place.elsewhere is not None:  # end the own requests, and no others
            self._gate.interrupt()
            with suppress(DeadlineError):  # its connections close, which ends them, too
                self._gate.drain(_LEAVE_S, grace_s=_LEAVE_S)
        self._server.end()
        self.transport.forget()

    # -- weights ---------------------------------------------------------------------------------

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List weights by their names in files, then the adapter's; not SGLang's own buffers."""
        itemsize = DTYPES[self._spec.rollout.dtype].itemsize
        return tuple(
            WeightMemory(name, math.prod(shape) * itemsize, is_buffer=False)
            for name, shape in {**self._shapes, **self._adapter_shapes}.items()
        )

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage a bucket; see ``WeightSender``."""
        for name, tensor in bucket:
            shape = self._shapes.get(name)
            if shape != tuple(tensor.shape):  # SGLang would end itself
                raise EngineError(
                    f"{name} of shape {list(tensor.shape)} was to be sent, and the files of "
                    f"{self._spec.model_folder} have "
                    + (f"{list(shape)}" if shape else suggest_name(name, list(self._shapes)))
                )
        return self.transport.stage(bucket)

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Let the server load a bucket; see ``RolloutEngine``."""
        self._open_update(in_session=self.transport.in_session)
        self.transport.load(self._server, staged, handles)

    def join(self) -> Receiver:
        """Open an update whose buckets another process sends; see ``WeightReceiver``."""
        self._open_update(in_session=True)
        client = self._server.client
        return Receiver(client.base_url, client.key, self._server.num_ranks, self._start)

    def _open_update(self, *, in_session: bool) -> None:
        self._require_loadable("load of weights")
        self._server.begin_update()
        if in_session and not self._is_updating:
            self._server.require_success("/begin_weight_update")
            self._is_updating = True

    def release_buffers(self) -> None:
        """Release all buffers. Idempotent."""
        self.transport.release_buffers()

    def finish_update(self, *, version: int) -> None:
        """Close the update, and stamp all later responses with ``version``."""
        self.transport.finish(self._server)
        if self._is_updating:
            self._server.require_success("/end_weight_update")
            self._is_updating = False
        self.version = version
        self._server.stamp(self._stamp)

    @property
    def _stamp(self) -> str:
        """The server's name of its weights; adapters have names of their own."""
        is_below = self._spec.lora is not None
        return BELOW_ADAPTERS if is_below else self._server.version_name(self.version)

    def load_adapter(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """See ``RolloutEngine``. EngineError, too, if the engine was built without adapters."""
        self._require_resident("load_adapter", MemoryTag.WEIGHTS)
        lora = self._spec.lora
        if lora is None:
            raise built_without_adapters(tensors)
        require_fit(tensors, self._adapter_shapes)
        # From the host: SGLang copies them there anyway (LoRAAdapter keeps its weights on the CPU),
        # and to open a handle of GPU 0 leaves each rank of a server a CUDA context on it.
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        num_ranks = self._spec.rollout.tensor_parallel_size
        self._adapters.add(version)  # even if the answer is lost
        self._server.require_success(
            "/load_lora_adapter_from_tensors",
            lora_name=adapter_name(version),
            config_dict={
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "use_rslora": lora.use_rslora,
                "target_modules": list(lora.modules),
                "bias": "none",
                "lora_dropout": 0.0,
            },
            serialized_named_tensors=[serialized(on_host) for _ in range(num_ranks)],
        )

    def unload_adapter(self, *, kept: Collection[int] = ()) -> None:
        """See ``RolloutEngine``."""
        for version in sorted(self._adapters.difference(kept)):
            name = adapter_name(version)
            try:
                self._server.require_success("/unload_lora_adapter", lora_name=name)
            except RefusedError as error:
                if _NO_SUCH_ADAPTER not in error.text:
                    raise
            self._adapters.remove(version)

    def load_reference_weights(self, folder: Path) -> None:
        """Load the weights of ``folder`` as SGLang loads any model's, copy them, scramble them."""
        self._require_loadable("load_reference_weights")
        self._server.begin_update()
        self._server.load_folder(folder, load_format="auto")
        self._record_weights()

    def compare_with_files(self, folder: Path) -> None:
        """Copy the weights, scramble them, load those of ``folder``, and compare."""
        self._record_weights()
        self._server.load_folder(folder, load_format="auto")
        self.verify_weights()

    def _record_weights(self) -> None:
        self._check_weights("snapshot")
        self._recorded = self._checksums()
        self._check_weights("reset_tensors")

    def _checksums(self) -> dict[tuple[int, str], str]:
        """Return checksums of the tensors of all ranks; of one rank none are needed.

        The server's own comparison knows its first rank alone.
        """
        if self._server.num_ranks == 1:
            return {}
        return checksums_of(self._check_weights("checksum"))

    def _check_weights(self, action: str) -> Body:
        # A table of the rotary embedding, which a server would scramble for good.
        skips: dict[str, object] = {"skip_tensor_list": ["axis_map"]} if self._images else {}
        return self._server.require_success("/weights_checker", action=action, **skips)

    def verify_weights(self) -> None:
        """Let the server compare its weights with the copy bitwise, in its own layout."""
        try:
            self._check_weights("compare")
        except RefusedError as error:
            names = re.findall(r"name=(\S+)", error.text)
            raise LedgerError(mismatch(names or [error.text])) from error
        sums = self._checksums()
        wrong = [at for at, value in self._recorded.items() if sums.get(at) != value]
        if wrong:
            raise LedgerError(mismatch([f"{name} (rank {rank})" for rank, name in wrong]))

    def _require_loadable(self, what: str) -> None:
        self._gate.require_idle(what)
        self._require_resident(what, MemoryTag.WEIGHTS)

    def _require_resident(self, what: str, *parts: MemoryTag) -> None:
        for part in parts:
            if part in self._released:
                raise PhaseError(f"{what} was refused: {part.name} is released; resume it first")


class EncoderEngine(SGLangEngine):
    """A server with the vision tower alone, which other servers ask, and no sampler.

    It answers the control calls of ``encoder_routes.py``.
    """

    def __init__(self, spec: ServingSpec, *, variables: Mapping[str, str], is_frozen: bool) -> None:
        """Start the server; see ``SGLangEngine``."""
        super().__init__(spec, variables=variables)
        self.is_frozen = is_frozen
        self._shapes = {n: s for n, s in self._shapes.items() if n.startswith(_TOWER)}

    def read_files(self, folder: Path) -> None:
        """Let the server load the tower, and forget what it made of images before."""
        self._require_loadable("read_files")
        self._server.load_folder(folder, load_format="safetensors")
