"""An SGLang server without SGLang: it answers in this process, holds bytes, and refuses as SGLang.

It stands at the seam of HTTP (``ControlClient``): arguments, life cycle, weight buckets and
requests above it are the product's own.
"""

from __future__ import annotations

import sys
import weakref
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.errors import DriftError, EngineError
from hybridrl.metrics import Metrics
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import WeightFiles
from hybridrl.network import LOOPBACK
from hybridrl.rehearsal.device import GPU, Block
from hybridrl.rehearsal.gpu import FakeGpu
from hybridrl.rehearsal.model_folder import HollowFile
from hybridrl.sampler import NO_VERSION, Sample, SamplingParams
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.buckets import Bucket, TensorSpan
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.arguments import ServingSpec, build_arguments
from hybridrl.workers.rollout.sglang.client import ControlCalls, ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.server import TESTED_VERSIONS, require_as_asked
from hybridrl.workers.sharding.manager_client import NOBODY, Lent, ManagerClient
from hybridrl.workers.sharding.weight_files import WeightSource

Body = dict[str, Any]

_USES = {
    MemoryTag.WEIGHTS: "rollout weights",
    MemoryTag.KV_CACHE: "KV cache",
    MemoryTag.CUDA_GRAPH: "SGLang's graphs",
}
_REFUSED = 400
_HEAD = "lm_head.weight"


def stand_in_for_package() -> None:
    """Let ``workers.rollout.sglang.transports`` be imported without SGLang, whose import takes 5 s.

    The real names are those that it imports; handles and adapters are not serialised here.
    """
    names: dict[str, dict[str, object]] = {
        "sglang.srt.utils": {
            "MultiprocessingSerializer": _Serializer,
            "init_custom_process_group": None,
        },
        "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": None},
        "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorMetadata": None},
    }
    for path, members in names.items():
        parents = path.split(".")
        for length in range(1, len(parents) + 1):
            name = ".".join(parents[:length])
            sys.modules.setdefault(name, ModuleType(name))
        vars(sys.modules[path]).update(members)


class _Serializer:
    @staticmethod
    def serialize(payload: Mapping[str, Tensor], output_str: bool) -> str:  # noqa: FBT001
        """Take the tensors of an adapter, which come from the host."""
        if any(tensor.is_cuda for tensor in payload.values()):
            raise EngineError("tensors of an adapter were to be sent from the GPU")
        return f"{len(payload)} tensors" if output_str else ""


class Handles:
    """Handles of CUDA IPC: each keeps its memory until it is opened, which happens once."""

    def __init__(self) -> None:
        self.unopened: dict[str, tuple[Tensor, Sequence[TensorSpan]]] = {}
        """Memory of handles that nobody opened: it stays."""
        self._num_made = 0
        self._last: Callable[[], object] = lambda: None

    def make(self, flat: Tensor, spans: Sequence[TensorSpan]) -> str:
        """Take the place of ``transports.encode``."""
        if not flat.is_cuda:
            raise EngineError("a handle of CUDA IPC was asked for memory of the host")
        storage = flat.untyped_storage()
        if self._last() is storage:
            raise EngineError("a buffer was filled again while the server may still read it")
        self._last = weakref.ref(storage)
        self._num_made += 1
        name = f"handle {self._num_made}"
        self.unopened[name] = (flat, spans)
        return name

    def open(self, name: str) -> Sequence[TensorSpan]:
        """Open memory in the server, and close it: its owner may use it again."""
        if name not in self.unopened:
            raise EngineError(f"{name} is opened twice, or was never made")
        flat, spans = self.unopened.pop(name)
        if flat.untyped_storage().nbytes() < len(flat):
            raise EngineError(f"the memory of {name} was freed before it was opened")
        return spans


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a server."""

    path: str
    tags: tuple[str, ...]
    """Of a release or resume."""

    allocated: int
    """Bytes that this process's tensors had on the GPU then."""


class RehearsedServer(ControlCalls):
    """Takes the place of ``StartedServer``; has ``sizes`` bytes of this rank's device by tag."""

    def __init__(
        self,
        spec: ServingSpec,
        *,
        handles: Handles,
        sizes: Mapping[MemoryTag, int],
        gpu: FakeGpu,
        variables: Mapping[str, str],
    ) -> None:
        arguments = build_arguments(spec, name="rehearsal", port=1, key="rehearsal")
        self.key, self.start_s = "rehearsal", 0.0
        self.num_ranks = spec.rollout.tensor_parallel_size
        self._spec = spec
        model = read_architecture(spec.model_folder)
        self._num_layers, self._experts = model.num_layers, model.experts
        self._timeout_s = spec.rollout.stage_timeout_s
        self._start_timeout_s = spec.rollout.start_timeout_s
        names = {"weight": MemoryTag.WEIGHTS, "kvcache": MemoryTag.KV_CACHE}
        names |= {"graph": MemoryTag.CUDA_GRAPH}
        usage = {name: sizes[tag] / 2**30 for name, tag in names.items()}
        self.info = {
            **arguments,
            "version": TESTED_VERSIONS[0],
            "internal_states": [{"memory_usage": usage}],
        }
        require_as_asked(arguments, self.info)
        self.client = RehearsedClient(self)
        self.process = SimpleNamespace(pid=0)
        self._handles, self._sizes, self._gpu = handles, sizes, gpu
        self._blocks = {tag: Block(0, GPU, _USES[tag]) for tag in MemoryTag}
        self._resident: set[MemoryTag] = set()
        for tag in MemoryTag:
            self._hold(tag)
        self._is_updating, self._is_paused = False, False
        self._version = ""
        self._numbers = count()
        self._files = WeightFiles(spec.model_folder)
        self._loaded: set[str] = set()
        self.asked: list[Call] = []

    def _hold(self, tag: MemoryTag) -> None:
        self._resident.add(tag)
        self._gpu.hold(self._blocks[tag], self._sizes[tag])

    def _free(self, tag: MemoryTag) -> None:
        self._resident.discard(tag)
        self._gpu.hold(self._blocks[tag], 0)

    def has_died(self) -> bool:
        """It lives."""
        return False

    def require_alive(self, what: str) -> None:
        """It lives."""

    def end(self) -> None:
        """Give all memory back."""
        for tag in MemoryTag:
            self._free(tag)
        self.client.close()

    # -- answers ---------------------------------------------------------------------------------

    def answer(self, path: str, body: Body) -> Any:  # noqa: ANN401, C901, PLR0912 - a case a route
        """Answer a call as SGLang would; ``RefusedError`` where it would refuse."""
        route = path.partition("?")[0]
        tags = tuple(body.get("tags", ()))
        self.asked.append(Call(route, tags, self._gpu.torch.allocated))
        match route:
            case "/release_memory_occupation":
                self._release(body["tags"])
            case "/resume_memory_occupation":
                self._resume(body["tags"])
            case "/begin_weight_update":
                self._is_updating = True
            case "/end_weight_update":
                self._is_updating = False
            case "/update_weights_from_tensor":
                self._load(body)
            case "/update_weights_from_disk":
                self._require(MemoryTag.WEIGHTS)
                for file in Path(body["model_path"]).glob("*.safetensors"):
                    self._take(HollowFile(file, self._gpu).shapes())
            case "/weights_checker" if body["action"] == "reset_tensors":
                self._loaded.clear()
            case "/weights_checker" if body["action"] == "checksum":
                return {"success": True, "ranks": []}
            case "/update_weight_version":
                self._version = body["new_version"]
            case "/pause_generation":
                self._is_paused = True
            case "/continue_generation":
                self._is_paused = False
            case "/load_lora_adapter_from_tensors":
                self._require(MemoryTag.WEIGHTS)
            case "/v1/loads":
                return {"loads": [{"timestamp": len(self.asked)}]}
            case "/generate":
                return self._generate(body)
        return {"success": True}

    def _refuse(self, why: str) -> None:
        raise RefusedError(self.asked[-1].path, _REFUSED, why)

    def _require(self, *tags: MemoryTag) -> None:
        for tag in tags:
            if tag not in self._resident:
                self._refuse(f"the memory of {tag.value} is released")

    def _release(self, names: Sequence[str]) -> None:
        for tag in map(MemoryTag, names):
            self._require(tag)
            self._free(tag)
            if tag is MemoryTag.WEIGHTS and not self._spec.keeps_backup:
                self._loaded.clear()

    def _resume(self, names: Sequence[str]) -> None:
        for tag in map(MemoryTag, names):
            if tag in self._resident:
                self._refuse(f"the memory of {tag.value} is resident")
            self._hold(tag)

    def _load(self, body: Body) -> None:
        self._require(MemoryTag.WEIGHTS)
        if not self._is_updating:
            self._refuse("no weight update was begun")
        names = body["serialized_named_tensors"]
        if len(names) != self.num_ranks:
            self._refuse(f"{len(names)} handles for {self.num_ranks} ranks")
        self._take({span.name: tuple(span.shape) for span in self._handles.open(names[0])})

    def _take(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            is_tied = name == _HEAD and _HEAD not in self._files.names
            if not is_tied and name not in self._files.names:
                self._refuse(f"the model has no {name}")
            if not is_tied and shape != self._files.shape_of(name):
                self._refuse(f"{name} is {shape} and not {self._files.shape_of(name)}")
        self._loaded |= shapes.keys()

    def _generate(self, body: Body) -> Any:  # noqa: ANN401 - a response, or a list of them
        self._require(*MemoryTag)
        if self._is_paused:
            self._refuse("a request while generation is paused")
        if "rid" not in body:
            return {}
        if lost := sorted(self._files.names - self._loaded):
            self._refuse(f"{len(lost)} weights were lost, {lost[0]} among them")
        return [
            self._response(len(context), params["max_new_tokens"])
            for context, params in zip(body["input_ids"], body["sampling_params"], strict=True)
        ]

    def _response(self, num_before: int, num_tokens: int) -> Body:
        tokens = _words(next(self._numbers), num_tokens)
        meta: Body = {
            "finish_reason": {"type": "length"},
            "weight_version": self._version,
            "output_token_logprobs": [(-1.0, token, None) for token in tokens],
        }
        if self._spec.returns_experts and self._experts is not None:
            size = self._num_layers * self._experts.num_per_token
            experts = torch.arange(size, dtype=torch.int32) % self._experts.num_experts
            routes = experts.repeat(num_before + num_tokens - 1)
            meta["routed_experts"] = b64encode(routes.numpy().tobytes()).decode()
        return {"output_ids": tokens, "meta_info": meta}


class RehearsedClient(ControlClient):
    """A client whose server is an object."""

    def __init__(self, server: RehearsedServer) -> None:
        super().__init__("http://rehearsal", name="SGLang")
        self._server = server

    async def request(self, path: str, body: Body | None = None, **_: Any) -> Any:  # noqa: ANN401
        """Answer at once."""
        return self._server.answer(path, body or {})


class RehearsedManager(ManagerClient):
    """Rollout servers beside the ranks: they read the names of what is published, and answer."""

    timeout_s = 60.0

    def __init__(self) -> None:
        self._version = NO_VERSION

    @property
    def host(self) -> str:
        """See ``ManagerClient``."""
        return LOOPBACK

    def need_weights(self, *, version: int) -> bool:
        """Whether the weights are older."""
        return version != self._version

    def update(self, source: WeightSource, *, version: int) -> None:
        """Read the headers of the files; a broadcast gathers the same buckets."""
        if isinstance(source, Path):
            WeightFiles(source)
        self._version = version

    def update_adapter(self, base: Path, adapter: Bucket, *, version: int) -> None:
        """Read the headers of the files below the adapter."""
        self.update(base, version=version)

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        lent: Lent = NOBODY,
    ) -> tuple[list[Sample], Metrics]:
        """Answer with responses of full length."""
        if version != self._version and not lent:  # ranks bring their engines the weights
            raise DriftError(f"asked for version {version}, and the weights are {self._version}")
        num_rows = len(prompts) * sampling.num_responses_per_prompt
        return full_samples(num_rows, sampling, version=version), {}

    def lost_engines(self) -> Mapping[str, Collection[int]]:
        """None."""
        return {}

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> tuple[Answered, Metrics]:
        """Answer the prompts that are admitted now."""
        if prompts is None:
            raise EngineError("no prompt was admitted")
        samples, metrics = self.sample(prompts, sampling, version=version)
        return Answered(prompts, samples), metrics


def full_samples(num_rows: int, sampling: SamplingParams, *, version: int) -> list[Sample]:
    """Return responses of full length, with what a served teacher says of them."""
    num_tokens, top_k = sampling.max_response_tokens, sampling.teacher_top_k
    logprobs = torch.full((num_tokens,), -1.0)
    taught = None if top_k is None else torch.zeros(1 + 2 * top_k, num_tokens)
    rows = [torch.tensor(_words(number, num_tokens)) for number in range(num_rows)]
    return [Sample(tokens, logprobs, "length", version, teacher_JL=taught) for tokens in rows]


def _words(number: int, num_tokens: int) -> list[int]:
    """Write a response that begins as no other does: what two begin with is computed once."""
    first = [1 + number % 50, 1 + number // 50 % 50]
    return [*first, *[1] * (num_tokens - 2)][:num_tokens]
