"""The embedded rollout engine: a Hugging Face causal model that samples in this process.

Runs everywhere, on one device. Random numbers do not depend on neighbours, slots or batch size.
Logits do, by rounding (about 1e-6 in float32), because matrix kernels are not batch-invariant. So
equal calls give bitwise identical results, and other batches the same tokens unless a random
number falls within that rounding of the border between two tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.diagnostics import activity
from hybridrl.errors import EngineError, LedgerError, PhaseError, suggest_name
from hybridrl.images import ImageSettings, require_images_fit
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.models.experts import StoredNames
from hybridrl.models.load import DTYPES, WeightFiles
from hybridrl.models.seeing import sees
from hybridrl.sampler import Program, Sample, Sampler, SampleRequest, T, interrupted_sample
from hybridrl.workers.rollout.adapter_fit import built_without_adapters
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.embedded.decoding import Decoding
from hybridrl.workers.rollout.embedded.fused_model import FusedForward, fuse
from hybridrl.workers.rollout.embedded.model import (
    Forward,
    LoadedAdapters,
    build_model,
    load_config,
    make_slots,
    seeing_forward,
    transformers_forward,
)
from hybridrl.workers.rollout.embedded.requests import Request, RolloutStats
from hybridrl.workers.rollout.embedded.tensor_memory import TensorMemory, checksum
from hybridrl.workers.rollout.event_loop import ProgramCall, RequestGate, run_program
from hybridrl.workers.rollout.protocol import MemoryTag, WeightMemory, mismatch
from hybridrl.workers.rollout.sampling import check_request


class HFRolloutEngine:
    """A ``RolloutEngine`` over a transformers causal model.

    Weights are NaN until they are sent: of the model folder only the configuration is read.
    """

    frees_memory = True
    url = None

    def __init__(
        self,
        model_folder: Path,
        *,
        config: RolloutConfig,
        max_context_tokens: int,
        device: torch.device,
        lora: LoraConfig | None = None,
    ) -> None:
        """Build the model and its KV cache: ``config.num_slots`` rows of ``max_context_tokens``.

        A ModelError if the folder's architecture is not supported, or has a shorter context.
        """
        self._folder = model_folder
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._device = device
        self._lora = lora
        self._metrics: Metrics = {}
        self._decoding: Decoding | None = None
        """Of the program that runs."""
        self._asked_at = 0.0
        """When it began, or was last asked for metrics; a ``time.perf_counter``."""
        self._expected: dict[str, int] = {}
        self.last_stats: RolloutStats | None = None
        """Counts of the last program that succeeded."""
        self.version = -1
        """Policy version of the weights, from the last ``finish_update``; -1 before the first."""
        self._boot()

    def _boot(self) -> None:
        model_config = load_config(self._folder, max_context_tokens=self._max_context_tokens)
        self._model = build_model(model_config, DTYPES[self._config.dtype], self._device)
        names = StoredNames(self._model.config.model_type)
        parameters = names.tensors(self._model)
        every_name = names.tensors(self._model, tied_again=True).keys()
        self._tied_names = every_name - parameters.keys()
        buffers = {names.stored(name): tensor for name, tensor in self._model.named_buffers()}
        self._buffer_names = frozenset(buffers)
        self._tensors: dict[str, Tensor] = parameters | buffers
        self._adapters = None if self._lora is None else LoadedAdapters(self._model, self._lora)
        adapted = {} if self._adapters is None else self._adapters.tensors
        self._fused = fuse(self._model)
        TensorMemory("new weights", parameters | adapted, lost_value=float("nan")).fill_lost()
        self._all_tensors = self._tensors | adapted
        self._slots = make_slots(
            self._model, self._folder, self._config.num_slots, self._max_context_tokens
        )
        states = {f"state {n}": tensor for n, tensor in enumerate(self._slots.states.tensors)}
        cache = {"kv": self._slots.kv_YSJCD} | states
        self._memory = {
            MemoryTag.WEIGHTS: TensorMemory("weights", self._all_tensors, lost_value=float("nan")),
            MemoryTag.KV_CACHE: TensorMemory("the KV cache", cache, lost_value=0.0),
            # No graphs are captured: a memory tag of no bytes, with the same rules as the others.
            MemoryTag.CUDA_GRAPH: TensorMemory("CUDA graphs", {}, lost_value=0.0),
        }
        self._gate = RequestGate()

    def run(self, program: Program[T]) -> T:
        """Run a program over this engine's sampler, in an event loop of this thread.

        The engine decodes while all tasks of the program wait. A response is also cut (and
        truncated) where it and its context fill ``max_context_tokens``. An EngineError if logits
        are not finite, or ``drain`` aborted the program.
        """
        with self._gate.admit() as call:
            self._require_resident("generate", *MemoryTag)
            if self._adapters is not None:
                self._adapters.of(None)  # refuses if there is none
            vocab_size = self._model.config.vocab_size
            forward: Forward = partial(transformers_forward, self._model)
            if sees(self._model):
                forward = partial(seeing_forward, self._model)
            elif self._fused is not None:
                forward = FusedForward(self._model, self._fused, self._max_context_tokens)
            version, adapters = self.version, self._adapters
            decoding = Decoding(
                forward, self._slots, vocab_size=vocab_size, version=version, adapters=adapters
            )
            sampler = EmbeddedSampler(
                decoding, call, self._max_context_tokens, vocab_size, self._slots.images
            )
            call.on_interrupt = decoding.interrupt
            self._decoding = decoding
            self._asked_at = time.perf_counter()
            try:
                with _one_thread(), activity.gauge("rollout engine", decoding.describe):
                    result = run_program(program, sampler, call, step=decoding.step)
            except BaseException:
                # After any error no NaN stays in a slot: see KVSlots.
                self._memory[MemoryTag.KV_CACHE].fill_lost()
                raise
            finally:
                self._decoding = None
            self.last_stats = decoding.stats
            self._metrics = merge([self._metrics, decoding.stats.metrics(), self._take_seconds()])
            return result

    def _take_seconds(self) -> Metrics:
        before, self._asked_at = self._asked_at, time.perf_counter()
        return {"time/sample_s": Max(self._asked_at - before)}

    def progress(self) -> object:
        """Return the time: what hangs in this process cannot answer."""
        return time.monotonic()

    def has_died(self) -> bool:
        """Return False: the engine has no process of its own."""
        return False

    def take_metrics(self) -> Metrics:
        """See ``RolloutEngine``. Of a running program it has what was counted up to now."""
        metrics, self._metrics = self._metrics, {}
        if self._decoding is None:
            return metrics
        return merge([metrics, self._decoding.take_stats().metrics(), self._take_seconds()])

    def _require_resident(self, what: str, *parts: MemoryTag) -> None:
        for part in parts:
            if not self._memory[part].is_resident:
                raise PhaseError(f"{what} was refused: {part.name} is released; resume it first")

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List parameters, tied ones once under their saved name, buffers, and the adapter."""
        return tuple(
            WeightMemory(name, tensor.nbytes, is_buffer=name in self._buffer_names)
            for name, tensor in self._all_tensors.items()
        )

    def checksums(self) -> dict[str, int]:
        """Return a CRC-32 of each tensor under the weights tag."""
        return {name: checksum(tensor) for name, tensor in self._all_tensors.items()}

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage the tensors by reference: they are loaded in this process."""
        return stage_by_reference(bucket)

    @torch.no_grad()
    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Copy a bucket of full tensors in, cast from any float type. All or nothing.

        EngineError for a name, shape or integer type that does not fit.
        """
        self._gate.require_idle("load of weights")
        self._require_resident("load of weights", MemoryTag.WEIGHTS)
        for name, tensor in staged.tensors:
            if name in self._tied_names:
                raise EngineError(f"weight {name!r} is tied to another; send that one alone")
            target = self._tensors.get(name)
            if target is None:
                raise EngineError(
                    f"the rollout model has no weight {name!r}: "
                    f"{suggest_name(name, list(self._tensors))}"
                )
            if target.shape != tensor.shape:
                raise EngineError(
                    f"weight {name!r} came with shape {list(tensor.shape)}, the rollout model has "
                    f"{list(target.shape)}; send full tensors of the model in {self._folder}"
                )
            if target.is_floating_point() != tensor.is_floating_point():
                raise EngineError(
                    f"weight {name!r} came as {tensor.dtype}, which does not cast to "
                    f"{target.dtype}; send it as a float type"
                )
        for name, tensor in staged.tensors:
            self._tensors[name].copy_(tensor)

    def release_buffers(self) -> None:
        """No buffers are held."""

    def load_adapter(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """See ``RolloutEngine``. EngineError, too, if the engine was built without adapters."""
        self._require_resident("load_adapter", MemoryTag.WEIGHTS)
        if self._adapters is None:
            raise built_without_adapters(tensors)
        self._adapters.load(tensors, version=version)

    def unload_adapter(self, *, kept: Collection[int] = ()) -> None:
        """See ``RolloutEngine``."""
        if self._adapters is not None:
            self._adapters.unload(kept=kept)

    def finish_update(self, *, version: int) -> None:
        """Note the version. Nothing is derived from weights, and no cache outlives a call."""
        self.version = version

    def load_reference_weights(self, folder: Path) -> None:
        """Note the sums of the weights in ``folder``, as they are in this engine's type."""
        files = WeightFiles(folder)
        self._expected = {
            name: checksum(files.read(name, shape=tensor.shape).to(tensor.dtype))
            for name, tensor in self._tensors.items()
            if name in files.names
        }

    def verify_weights(self) -> None:
        """See ``RolloutEngine``."""
        sums = self.checksums()
        wrong = [name for name, expected in self._expected.items() if sums[name] != expected]
        if wrong:
            raise LedgerError(mismatch(wrong))

    def pause(self) -> None:
        """See ``RolloutEngine``."""
        self._gate.pause()

    def interrupt(self) -> None:
        """End open responses between two decode steps; see ``RolloutEngine``."""
        self._gate.interrupt()

    def drain(self, *, timeout_s: float) -> int:
        """Wait until no program runs; at the deadline abort it, and return its open requests.

        The thread inside ``run`` gets an EngineError then, at its next decode step.
        """
        return self._gate.drain(timeout_s)

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        """Free the storages of a memory tag; tensors in ``backup`` are copied to the host first."""
        self._gate.require_idle(f"release of {part.name}")
        self._memory[part].release(backup)
        if part is MemoryTag.WEIGHTS and self._adapters is not None:
            self._adapters.lose_all_but(backup)

    def resume(self, part: MemoryTag) -> None:
        """Allocate a memory tag again; tensors with a backup return, lost weights become NaN."""
        self._memory[part].resume()

    def continue_generation(self) -> None:
        """See ``RolloutEngine``."""
        self._gate.resume()

    def resident_bytes(self, part: MemoryTag) -> int:
        """See ``RolloutEngine``."""
        return self._memory[part].resident_bytes()

    def restart(self) -> None:
        """Abort the running program, free everything and build it again; weights are NaN again."""
        self.shutdown()
        self.version = -1
        self._boot()

    def shutdown(self) -> None:
        """Abort the running program and free all memory; idempotent."""
        self.pause()
        self.drain(timeout_s=0.0)
        for memory in self._memory.values():
            memory.free()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of the process for CPU kernels in the block.

    Products of one token a row take 50 to 250 us; waking a sleeping thread takes as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class EmbeddedSampler(Sampler):
    """Queues requests for ``Decoding``, whose steps the event loop does while all tasks wait."""

    decoding: Decoding
    call: ProgramCall
    max_context_tokens: int
    vocab_size: int
    images: ImageSettings | None = None

    async def answer(self, request: SampleRequest) -> list[Sample]:
        """See ``Sampler``."""
        check_request(
            request, max_context_tokens=self.max_context_tokens, vocab_size=self.vocab_size
        )
        begins = require_images_fit(request.token_ids, request.images, self.images)
        if self.call.is_interrupted:
            return [interrupted_sample(self.decoding.version)] * len(request.keys)
        with self.call.request(len(request.keys)):
            if request.scoring is not None:
                return [self.decoding.score(request, request.scoring)]
            future: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
            self.decoding.submit(Request(request, future, begins))
            return await future
