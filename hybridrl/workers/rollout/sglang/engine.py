"""SGLang as a ``RolloutEngine``: a server of its own process. The only module that imports sglang.

``python -m hybridrl.workers.rollout.sglang.engine ARGUMENTS.json`` is that process.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.config.architecture import Architecture, read_architecture
from hybridrl.config.rollout import ABORT_GRACE_S, FLUSH_TIMEOUT_S, RolloutConfig
from hybridrl.diagnostics import activity
from hybridrl.errors import EngineError, LedgerError, ModelError, PhaseError, suggest_name
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.workers.rollout.adapter_fit import require_fit
from hybridrl.workers.rollout.protocol import (
    Bucket,
    MemoryTag,
    Response,
    SamplingParams,
    StagedBucket,
    TensorSpan,
    WeightMemory,
    WeightSender,
    mismatch,
)
from hybridrl.workers.rollout.request_gate import GenerateCall, RequestGate
from hybridrl.workers.rollout.sampling import check_prompts, check_sampling
from hybridrl.workers.rollout.sglang.arguments import ServerSpec
from hybridrl.workers.rollout.sglang.capabilities import Capability
from hybridrl.workers.rollout.sglang.client import ServerError
from hybridrl.workers.rollout.sglang.memory import (
    adapter_shapes,
    base_shapes,
    held_bytes,
    list_weights,
    require_whole_vocabulary,
)
from hybridrl.workers.rollout.sglang.process import end_with_parent
from hybridrl.workers.rollout.sglang.requests import ExpertShape, build_groups
from hybridrl.workers.rollout.sglang.sampling import GroupSampler, Terms
from hybridrl.workers.rollout.sglang.server import Server, refusal_of
from hybridrl.workers.rollout.sglang.start import load_server_args, unknown_names
from hybridrl.workers.rollout.sglang.weight_senders import (
    FollowerSender,
    SGLangHooks,
    build_transport,
)

try:
    from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
except ImportError as err:
    raise ImportError(
        "rollout=sglang needs SGLang: pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), "
        "or use rollout=hf"
    ) from err

log = logging.getLogger(__name__)

ADAPTER = "policy"
"""What our one adapter is called at the server."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_STATUS_REFUSED = 3
_NO_SUCH_ADAPTER = "does not exist"


class SGLangEngine:
    """A ``RolloutEngine`` over one SGLang server, which holds the devices of its ranks.

    Its weights are random until they are sent. Log-probs are those at the sampling temperature;
    with top-p or top-k they are not of the truncated distribution (SGLang gives no others).
    """

    def __init__(
        self, spec: ServerSpec, *, variables: Mapping[str, str], device: torch.device | None = None
    ) -> None:
        """Start the server.

        Args:
            spec: what it serves.
            variables: environment of the server, as the devices that it may see.
            device: of this process; None is the first of its kind.

        Raises:
            EngineError: it did not start, or its process cannot share memory with it.
            DeadlineError: not in time.
            ConfigErrors: ``rollout.engine_args`` names an argument that SGLang does not have.
            ModelError: the folder has no weights, a broken file, or another vocabulary than it
                says.
        """
        self._spec = spec
        self._variables = dict(variables)
        self._num_ranks = spec.rollout.tensor_parallel_size
        require_whole_vocabulary(spec.model_folder)
        self._shapes = base_shapes(spec.model_folder)
        self._adapter_shapes = adapter_shapes(self._shapes, spec.lora)
        self._weights = list_weights(
            {**self._shapes, **self._adapter_shapes}, itemsize=_ITEMSIZE[spec.rollout.dtype]
        )
        self._model = read_architecture(spec.model_folder)
        self._experts = _expert_shape(self._model) if spec.rollout.routed_experts else None
        self.transport = build_transport(
            spec.rollout, HOOKS, device=device or torch.device(spec.device), leads=True
        )
        self._metrics: Metrics = {}
        self.frees_memory = spec.device == "cuda"
        self._boot()

    def _boot(self) -> None:
        self._server = Server(self._spec, variables=self._variables)
        self._gate = RequestGate()
        self._released: set[MemoryTag] = set()
        self._is_updating = False
        self._has_adapter = self._may_have_adapter = False
        self.version = -1
        self._metrics = merge([self._metrics, {"time/server_start_s": Max(self._server.start_s)}])

    # -- sampling --------------------------------------------------------------------------------

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> list[Response]:
        """Sample; returns P * G responses on the CPU, siblings adjacent, in prompt order.

        A response is also cut (and truncated) where it and its prompt fill the context.

        Raises:
            PhaseError: paused, already generating, or a part of the memory is released.
            EngineError: a prompt or parameter is refused; the server is gone; the call was aborted
                by ``drain``; or responses were cut off again and again.
            DeadlineError: a request took longer than ``rollout.request_timeout_s``.
        """
        with self._gate.admit(len(prompts) * sampling.num_responses_per_prompt) as ticket:
            self._require_resident("generate", *MemoryTag)
            self._require_adapter()
            vocab_size = self._model.vocab_size
            check_sampling(sampling, vocab_size=vocab_size)
            limit = self._spec.max_context_tokens
            check_prompts(prompts, max_context_tokens=limit, vocab_size=vocab_size)
            sampler = self._sampler(sampling, ticket)
            begin = time.perf_counter()
            with activity.watching("rollout engine", sampler.describe):
                sampled = sampler.run(build_groups(prompts, sampling))
            seconds: Metrics = {"time/sample_s": Max(time.perf_counter() - begin)}
            self._metrics = merge([self._metrics, sampled.metrics, seconds])
            return sampled.responses

    def _sampler(self, sampling: SamplingParams, ticket: GenerateCall) -> GroupSampler:
        fields: dict[str, object] = {}
        if self._spec.lora is not None:
            fields["lora_path"] = ADAPTER
        if self._experts is not None:
            fields["return_routed_experts"] = True
        terms = Terms(
            sampling=sampling,
            max_context_tokens=self._spec.max_context_tokens,
            weight_version=str(self.version),
            timeout_s=self._spec.rollout.request_timeout_s,
            fields=fields,
            experts=self._experts,
        )
        return GroupSampler(self._server.client, terms, on_cut_off=ticket.check)

    def take_metrics(self) -> Metrics:
        """Return what happened since the last time, and start anew."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _require_resident(self, what: str, *parts: MemoryTag) -> None:
        for part in parts:
            if part in self._released:
                raise PhaseError(f"{what} was refused: {part.name} is released; resume it first")

    def _require_adapter(self) -> None:
        if self._spec.lora is not None and not self._has_adapter:
            raise EngineError(
                "generate was refused: no adapter is loaded, and the frozen model alone is not the "
                "policy; sync weights first, or set lora.sync=merged"
            )

    # -- weights ---------------------------------------------------------------------------------

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List weights by the names in the model's files, tied ones once, then the adapter's."""
        return self._weights

    def update_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hand a bucket of full tensors over, by HF name, all of it from this process.

        Raises:
            PhaseError: the weights are released, or requests are running.
            EngineError: the server has no such tensor, or cannot take it.
        """
        offer = self.offer(tensors)
        others = (self.transport.handle(offer) for _ in range(1, self._num_ranks))
        try:
            self.deliver(offer, [offer.handle, *others])
        finally:
            self.release_buffers()

    def offer(self, bucket: Bucket) -> StagedBucket:
        """Make a bucket ready, as the leader; see ``WeightSender``."""
        for name, tensor in bucket:
            shape = self._shapes.get(name)
            if shape != tuple(tensor.shape):  # told it, SGLang would end itself
                raise EngineError(
                    f"{name} of shape {list(tensor.shape)} was to be sent, and the files of "
                    f"{self._spec.model_folder} have "
                    + (f"{list(shape)}" if shape else suggest_name(name, list(self._shapes)))
                )
        return self.transport.offer(bucket)

    def deliver(self, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Have the server load a bucket; see ``WeightSender``."""
        self._gate.require_idle("update_weights")
        self._require_resident("update_weights", MemoryTag.WEIGHTS)
        has_sessions = self._server.capabilities.can(Capability.UPDATE_SESSION)
        if has_sessions and self.transport.in_session and not self._is_updating:
            self._server.require_success("/begin_weight_update")
            self._is_updating = True
        self.transport.deliver(self._server, offer, handles)

    def release_buffers(self) -> None:
        """Let go of all buffers. Idempotent."""
        self.transport.free()

    def finish_update(self, *, version: int) -> None:
        """Close the update, and stamp all later responses with ``version``."""
        self.transport.finish(self._server)
        if self._is_updating:
            self._server.require_success("/end_weight_update")
            self._is_updating = False
        self._server.post(
            "/update_weight_version", new_version=str(version), abort_all_requests=False
        )
        self.version = version

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the whole adapter; every request names it from here on.

        Raises:
            PhaseError: the weights are released, or requests are running.
            EngineError: the engine was built without adapters, the adapter does not fit its layers,
                or the server cannot load it.
        """
        self._gate.require_idle("load_adapter")
        self._require_resident("load_adapter", MemoryTag.WEIGHTS)
        lora = self._spec.lora
        if lora is None:
            raise EngineError(
                f"an adapter of {len(tensors)} tensors came, and this engine was built without; "
                "set lora.enabled=true and lora.sync=adapter"
            )
        require_fit(tensors, self._adapter_shapes)
        # From the host: SGLang copies them there anyway (LoRAAdapter keeps its weights on the CPU),
        # and to open a handle of GPU 0 leaves each rank of a server a CUDA context on it.
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._may_have_adapter = True  # also should the answer be lost
        self._server.require_success(
            "/load_lora_adapter_from_tensors",
            lora_name=ADAPTER,
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
            serialized_named_tensors=[_serialized(on_host) for _ in range(self._num_ranks)],
        )
        self._has_adapter = True

    def unload_adapter(self) -> None:
        """Forget the adapter, if there is one. Idempotent."""
        self._has_adapter = False
        if not self._may_have_adapter:
            return
        try:
            self._server.require_success("/unload_lora_adapter", lora_name=ADAPTER)
        except ServerError as error:
            if _NO_SUCH_ADAPTER not in error.text:
                raise
        self._may_have_adapter = False

    def load_reference_weights(self, folder: Path) -> None:
        """Load the weights of ``folder`` as SGLang loads any model's, copy them, scramble them.

        Raises:
            PhaseError: the weights are released, or requests are running.
            EngineError: the server cannot load them.
        """
        self._gate.require_idle("load_reference_weights")
        self._require_resident("load_reference_weights", MemoryTag.WEIGHTS)
        self._server.require_success(
            "/update_weights_from_disk",
            model_path=str(folder),
            load_format="auto",
            flush_cache=False,
        )
        for action in ("snapshot", "reset_tensors"):
            self._server.require_success("/weights_checker", action=action)

    def verify_weights(self) -> None:
        """Let the server compare its weights with the copy, bit by bit, in its own layout.

        Raises:
            LedgerError: names the tensors that differ, fused and cut as the server has them.
        """
        try:
            self._server.require_success("/weights_checker", action="compare")
        except ServerError as error:
            names = re.findall(r"name=(\S+)", error.text)
            raise LedgerError(mismatch(names or [error.text])) from error

    # -- edges of its life -----------------------------------------------------------------------

    def pause(self) -> None:
        """Admit no new request: this process is the only one that sends any. Idempotent."""
        self._gate.pause()

    def drain(self, *, timeout_s: float) -> int:
        """Wait until nothing runs, abort what is left at the deadline, and empty the server.

        Raises:
            EngineError: the server is gone.
            DeadlineError: it stays busy; how many requests run and wait.
        """
        self._server.require_alive("drain")
        aborted = self._gate.drain(timeout_s, abort=self._cut_off, grace_s=ABORT_GRACE_S)
        self._server.hold(timeout_s=FLUSH_TIMEOUT_S)
        return aborted

    def _cut_off(self) -> None:
        """End our requests, also those that the server does not answer or does not know yet."""
        self._server.client.cut_off(after_s=ABORT_GRACE_S / 2)
        self._server.abort_all()

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        """Free a part's memory. What ``backup`` names survives where the server keeps a copy.

        Raises:
            PhaseError: the part is released already, or requests are running.
            EngineError: the server keeps no copy and one is asked for; nothing was freed.
        """
        self._gate.require_idle(f"release of {part.name}")
        if part in self._released:
            raise PhaseError(f"{part.name} is released already")
        if backup and self.frees_memory and not self._spec.keeps_backup:
            raise EngineError(
                f"{len(backup)} weights must survive the release, and the server was started "
                "without a host copy; set lora.base=backup, or rollout.backup_weights=always"
            )
        if self._can_release(part):
            self._server.release_memory(part.value)
        self._released.add(part)

    def resume(self, part: MemoryTag) -> None:
        """Allocate a part again.

        Raises:
            PhaseError: the part is not released.
            EngineError: there is no room, or the server is gone.
        """
        if part not in self._released:
            raise PhaseError(f"{part.name} is resident; only what was released can be resumed")
        if self._can_release(part):
            self._server.resume_memory(part.value)
        self._released.remove(part)

    def _can_release(self, part: MemoryTag) -> bool:
        """Whether a part survives its release: older servers lose what captured graphs read."""
        is_graph = part is MemoryTag.CUDA_GRAPH
        return not is_graph or self._server.capabilities.can(Capability.KEEP_CUDA_GRAPHS)

    def continue_generation(self) -> None:
        """Admit requests again. Idempotent."""
        self._server.continue_generation()
        self._gate.resume()

    def resident_bytes(self, part: MemoryTag) -> int:
        """Return at least how many bytes a part holds; 0 where the server cannot free it."""
        if part in self._released or not self.frees_memory or not self._can_release(part):
            return 0
        return held_bytes(self._server.info, part)

    def restart(self) -> None:
        """Kill the server and start another; its weights are random again.

        Raises:
            EngineError: it did not start, or is of another version than the one before.
        """
        self.shutdown()
        before = self._server.capabilities
        self._boot()
        try:
            before.require_same_version(self._server.info)
        except EngineError:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Kill the server with all that it runs; idempotent."""
        self._gate.pause()
        self._server.end()
        self.transport.forget()


def weight_sender(
    engine: SGLangEngine | None, *, rollout: RolloutConfig, device: torch.device
) -> WeightSender:
    """Return this rank's end of the weight stream: the engine itself where there is one."""
    return engine or FollowerSender(build_transport(rollout, HOOKS, device=device, leads=False))


def _handle(flat: Tensor, slots: Sequence[TensorSpan]) -> str:
    metadata = [
        FlattenedTensorMetadata(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=slot.dtype,
            start_idx=slot.begin,
            end_idx=slot.end,
            numel=slot.end - slot.begin,
        )
        for slot in slots
    ]
    return _serialized({"flattened_tensor": flat, "metadata": metadata})


def _expert_shape(model: Architecture) -> ExpertShape:
    if model.experts is None:
        raise ModelError(
            f"rollout.routed_experts=true, and model_type={model.model_type!r} has no experts; "
            "set rollout.routed_experts=false"
        )
    return ExpertShape(model.num_layers, model.experts.num_per_token)


def _serialized(payload: object) -> str:
    text: str = MultiprocessingSerializer.serialize(payload, output_str=True)
    return text


HOOKS = SGLangHooks(
    encode=_handle, join=init_custom_process_group, prepare_ipc=monkey_patch_torch_reductions
)
"""What transports of weights need of SGLang."""


def serve(file: Path) -> None:
    """Be a server with the arguments in ``file``, until the parent is gone."""
    end_with_parent()
    # By name: these take seconds and prepare a process to serve, which a client must not be.
    run_server = import_module("sglang.launch_server").run_server
    server_args = load_server_args()
    arguments = json.loads(file.read_text(encoding="utf-8"))
    if unknown := unknown_names(server_args, arguments):
        for refusal in unknown:
            sys.stderr.write(refusal_of(refusal.names[0], refusal.fix) + "\n")
        raise SystemExit(_STATUS_REFUSED)
    run_server(server_args(**arguments))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
