"""The weights of a server: buckets, adapters and the comparison of the first sync.

The only module that imports sglang, for handles and groups that a server understands.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import EngineError, LedgerError, PhaseError, suggest_name
from hybridrl.models.dtypes import DTYPES
from hybridrl.workers.rollout.adapter_fit import (
    built_without_adapters,
    no_adapter_loaded,
    require_fit,
)
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, TensorSpan
from hybridrl.workers.rollout.protocol import MemoryTag, Receiver, WeightMemory, mismatch
from hybridrl.workers.rollout.request_gate import RequestGate
from hybridrl.workers.rollout.sglang.arguments import ServingSpec
from hybridrl.workers.rollout.sglang.client import RefusedError
from hybridrl.workers.rollout.sglang.memory import (
    adapter_shapes,
    base_shapes,
    require_whole_vocabulary,
)
from hybridrl.workers.rollout.sglang.server import ControlCalls
from hybridrl.workers.rollout.sglang.transports import DiskTransport, SharedTransport, Transport

try:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
except ImportError as err:
    raise ImportError(
        "rollout=sglang needs SGLang: pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), "
        "or use rollout=hf"
    ) from err

ADAPTER = "policy"
"""Name of the only adapter at the server."""

_NO_SUCH_ADAPTER = "does not exist"


class ServedWeights:
    """Sends weights to a server. ``SGLangEngine`` starts that server, and generates with it."""

    _server: ControlCalls
    _gate: RequestGate
    _released: set[MemoryTag]

    def __init__(self, spec: ServingSpec, *, device: torch.device) -> None:
        """Read names and shapes of the model's weights.

        Raises:
            EngineError: this process cannot share memory with a server.
            ModelError: the folder lacks weights, or has another vocabulary than its config.json.
        """
        self._spec = spec
        require_whole_vocabulary(spec.model_folder)
        self._shapes = base_shapes(spec.model_folder)
        self._adapter_shapes = adapter_shapes(self._shapes, spec.lora)
        self.transport = build_transport(
            spec.rollout, device=device, is_sender=True, from_disk=spec.from_disk
        )
        self._forget_weights()

    def _forget_weights(self) -> None:
        """A server has just started."""
        self._start = uuid.uuid4().hex
        self._is_updating = False
        self._has_adapter = self._may_have_adapter = False
        self.version = -1

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List weights by the names in the model's files, tied ones once, then the adapter's.

        Buffers (rotary tables, scales) are not listed: SGLang itself copies them before its weights
        are released and restores them afterwards.
        """
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
        self._server.finish_update(version)
        self.version = version

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a complete adapter; every request names it from here on.

        An EngineError if the engine was built without adapters, or it does not fit its layers.
        """
        self._require_loadable("load_adapter")
        lora = self._spec.lora
        if lora is None:
            raise built_without_adapters(tensors)
        require_fit(tensors, self._adapter_shapes)
        # From the host: SGLang copies them there anyway (LoRAAdapter keeps its weights on the CPU),
        # and to open a handle of GPU 0 leaves each rank of a server a CUDA context on it.
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        num_ranks = self._spec.rollout.tensor_parallel_size
        self._may_have_adapter = True  # even if the answer is lost
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
            serialized_named_tensors=[_serialized(on_host) for _ in range(num_ranks)],
        )
        self._has_adapter = True

    def unload_adapter(self) -> None:
        """Forget the adapter, if there is one. Idempotent."""
        self._has_adapter = False
        if not self._may_have_adapter:
            return
        try:
            self._server.require_success("/unload_lora_adapter", lora_name=ADAPTER)
        except RefusedError as error:
            if _NO_SUCH_ADAPTER not in error.text:
                raise
        self._may_have_adapter = False

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
        for action in ("snapshot", "reset_tensors"):
            self._server.require_success("/weights_checker", action=action)

    def verify_weights(self) -> None:
        """Let the server compare its weights with the copy bitwise, in its own layout."""
        try:
            self._server.require_success("/weights_checker", action="compare")
        except RefusedError as error:
            names = re.findall(r"name=(\S+)", error.text)
            raise LedgerError(mismatch(names or [error.text])) from error

    def _require_loadable(self, what: str) -> None:
        self._gate.require_idle(what)
        self._require_resident(what, MemoryTag.WEIGHTS)

    def _require_resident(self, what: str, *parts: MemoryTag) -> None:
        for part in parts:
            if part in self._released:
                raise PhaseError(f"{what} was refused: {part.name} is released; resume it first")

    def _require_adapter(self) -> None:
        if self._spec.lora is not None and not self._has_adapter:
            raise no_adapter_loaded()


def build_transport(
    rollout: RolloutConfig, *, device: torch.device, is_sender: bool, from_disk: bool
) -> Transport:
    """Make the transport of one rank of an engine; those that do not own it (send) only stage.

    Raises:
        EngineError: this process cannot share its memory.
    """
    # Handles of host memory are names then, which a server's ranks can open although they are not
    # children of this process: buckets on a CPU, adapters everywhere.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        _name_gpus_by_serial_number()
    num_ranks, dtype = rollout.tensor_parallel_size, DTYPES[rollout.dtype]
    if from_disk:
        return DiskTransport(is_sender=is_sender, dtype=dtype)
    return SharedTransport(device=device, num_ranks=num_ranks, encode=encode, dtype=dtype)


def _name_gpus_by_serial_number() -> None:
    """Let handles of GPU memory do so: a server numbers only its visible GPUs.

    SGLang's patch takes every tensor for one on a GPU, and raises IndexError for an adapter, which
    is sent from the host.
    """
    functions: Any = reductions
    if hasattr(functions, "_reduce_tensor_original"):
        return
    of_host = functions.reduce_tensor
    monkey_patch_torch_reductions()
    of_gpus = functions.reduce_tensor
    functions.reduce_tensor = lambda tensor: (of_gpus if tensor.is_cuda else of_host)(tensor)
    functions.init_reductions()


def encode(flat: Tensor, spans: Sequence[TensorSpan]) -> str:
    """Make the handle with which one rank of a server, and only one, opens a flat buffer, once."""
    metadata = [
        FlattenedTensorMetadata(
            name=span.name,
            shape=torch.Size(span.shape),
            dtype=span.dtype,
            start_idx=span.begin,
            end_idx=span.end,
            numel=span.end - span.begin,
        )
        for span in spans
    ]
    return _serialized({"flattened_tensor": flat, "metadata": metadata})


def _serialized(payload: object) -> str:
    text: str = MultiprocessingSerializer.serialize(payload, output_str=True)
    return text
