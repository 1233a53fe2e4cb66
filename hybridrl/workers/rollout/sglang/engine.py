"""SGLang as a ``RolloutEngine``: one server, which samples, sleeps and wakes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import torch

from hybridrl.config.rollout import ABORT_GRACE_S, FLUSH_TIMEOUT_S
from hybridrl.diagnostics import activity
from hybridrl.errors import DeadlineError, EngineError, ModelError, PhaseError
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.sampler import Program, Sampler, T
from hybridrl.workers.rollout.event_loop import run_program
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.request_gate import RequestGate
from hybridrl.workers.rollout.sglang.arguments import ServingSpec
from hybridrl.workers.rollout.sglang.elsewhere import AttachedServer
from hybridrl.workers.rollout.sglang.memory import held_bytes
from hybridrl.workers.rollout.sglang.pairing import PairedEndpoint
from hybridrl.workers.rollout.sglang.sampling import HttpSampler, ServedModel
from hybridrl.workers.rollout.sglang.server import StartedServer
from hybridrl.workers.rollout.sglang.weights import ADAPTER, ServedWeights

_LEAVE_S = 2.0
"""Seconds for open requests of a server that runs elsewhere, when the run ends."""


class SGLangEngine(ServedWeights):
    """A ``RolloutEngine`` over one SGLang server, which holds the devices of its ranks.

    Its weights are random until they are sent. Log-probs are those at the sampling temperature;
    with top-p or top-k they are not of the truncated distribution (SGLang gives no others).
    """

    def __init__(
        self,
        spec: ServingSpec,
        *,
        variables: Mapping[str, str],
        device: torch.device | None = None,
    ) -> None:
        """Start the server, with ``variables`` as its visible devices, or attach to it.

        ``device`` is that of this process; None is the first of its kind.
        """
        super().__init__(spec, device=device or torch.device(spec.device))
        self._variables = dict(variables)
        self._model = read_architecture(spec.model_folder)
        self._expert_shape = _expert_shape(self._model) if spec.rollout.routed_experts else None
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
        self._released = set()
        self._forget_weights()
        self._metrics = merge([self._metrics, {"time/server_start_s": Max(self._server.start_s)}])

    @property
    def url(self) -> str:
        """Of the server at present: it changes with a restart."""
        return self._server.client.base_url

    # -- sampling --------------------------------------------------------------------------------

    def run(self, program: Program[T]) -> T:
        """Run a program over this engine's sampler, in an event loop of this thread.

        A response is also cut (and truncated) where it and its context fill the context.

        Raises:
            EngineError: the server is gone, the program was aborted by ``drain``, or responses were
                cut off again and again.
            DeadlineError: no progress within ``rollout.request_timeout_s``.
        """
        with self._gate.admit() as call:
            self._require_resident("generate", *MemoryTag)
            self._require_adapter()
            model = ServedModel(
                max_context_tokens=self._spec.max_context_tokens,
                vocab_size=self._model.vocab_size,
                version=self.version,
                weight_version=self._server.version_name(self.version),
                adapter=None if self._spec.lora is None else ADAPTER,
                expert_shape=self._expert_shape,
            )
            client, prefills = self._server.client, self._spec.place.prefills
            endpoint = PairedEndpoint(client, prefills) if prefills else client
            timeout_s = self._spec.rollout.request_timeout_s
            sampler = HttpSampler(endpoint, model, call, timeout_s=timeout_s)

            async def connected(_: Sampler) -> T:
                async with sampler:
                    return await program(sampler)

            begin = time.perf_counter()
            with activity.gauge("rollout engine", sampler.describe):
                result = run_program(connected, sampler, call)
            seconds: Metrics = {"time/sample_s": Max(time.perf_counter() - begin)}
            self._metrics = merge([self._metrics, sampler.metrics(), seconds])
            return result

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

    # -- edges of its life -----------------------------------------------------------------------

    def pause(self) -> None:
        """Admit no new request: this process is the only one that sends any. Idempotent."""
        self._gate.pause()

    def interrupt(self) -> None:
        """End the open responses of this process's program, on whichever server they are."""
        self._gate.interrupt()

    def drain(self, *, timeout_s: float) -> int:
        """Wait until no request runs, abort the others at the deadline, and empty the server.

        Fails as ``ControlCalls.hold``.
        """
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


def _expert_shape(model: Architecture) -> tuple[int, int]:
    if model.experts is None:
        raise ModelError(
            f"rollout.routed_experts=true, and model_type={model.model_type!r} has no experts; "
            "set rollout.routed_experts=false"
        )
    return model.num_layers, model.experts.num_per_token
