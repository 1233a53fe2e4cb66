"""From the rollout section to the arguments of SGLang, which this file does not import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serving import WeightRoute
from hybridrl.json_text import to_json_text
from hybridrl.models.families import FAMILIES, is_recurrent_kind, layer_kinds
from hybridrl.models.model_folder import is_mxfp4, read_settings, text_folder, vision_settings
from hybridrl.network import Door, host_and_port

if TYPE_CHECKING:  # mode=check builds arguments too, and imports no torch
    import torch

Arguments = dict[str, object]

_CPU: Arguments = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # else an idle scheduler keeps a core busy while the trainer works
}
"""Arguments that SGLang needs without a GPU; measured to work."""

CONTEXT_SLACK = 8
"""SGLang ends a response some tokens before its context limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedAddress:
    """Where other processes of the run reach a server."""

    host: str
    port: int
    key: str = field(repr=False)
    bootstrap_port: int | None = None  # of a prefill server: where decode servers ask for entries

    @property
    def url(self) -> str:
        """Base URL of HTTP."""
        return f"http://{host_and_port(self.host, self.port)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A server that others started and that outlives the run."""

    url: str  # as ``http://HOST:PORT``
    key: str = field(repr=False)  # that it requires; empty: it requires none
    section: str  # configuration key of its model, as ``serving.models.policy``
    weights: WeightRoute  # how they reach it; see ``serving.weights``


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlace:
    """Devices of a server, and servers around it."""

    gpus: tuple[str, ...] = ()  # of all ranks that share it (``device_name``); "" on a CPU
    address: KeyedAddress | None = None  # where it listens; None: at the door, on a free port
    door: Door = field(default_factory=Door)
    prefills: tuple[KeyedAddress, ...] = ()  # of a decode server: those it shares requests with
    elsewhere: Elsewhere | None = None  # a server that runs already; None: one is started


_ANYWHERE = LaunchPlace()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpec:
    """Model and device of one server."""

    model_folder: Path  # Hugging Face folder; none of its weights is used, they are sent
    rollout: RolloutConfig
    lora: LoraConfig | None  # the adapters of the requests; None: there are none
    max_context_tokens: int  # longest prompt plus response
    seed: int
    device: str  # cpu or cuda
    num_adapters: int = 1  # that it has at the same time, of several versions
    place: LaunchPlace = _ANYWHERE
    returns_experts: bool = False  # whether responses come with the experts of their tokens

    @property
    def by_broadcast(self) -> bool:
        """Whether weights reach a server that others run through a process group."""
        elsewhere = self.place.elsewhere
        return elsewhere is not None and elsewhere.weights == "broadcast"

    @property
    def from_disk(self) -> bool:
        """Whether the server reads weights from files, where they do not come through a group."""
        return self.place.elsewhere is not None or self.rollout.transport == "disk"

    @property
    def is_encoder(self) -> bool:
        """Whether the server has the vision tower alone."""
        return bool(self.rollout.engine_args.get("encoder_only"))

    @property
    def saves_memory(self) -> bool:
        """Whether the server runs under torch_memory_saver."""
        return self.rollout.sleep and self.device == "cuda"

    @property
    def keeps_backup(self) -> bool:
        """Whether a host copy of the weights survives a release: of frozen ones, or on demand."""
        adapter_sleeps = self.lora is not None and self.lora.base == "backup"
        return self.rollout.sleep and (adapter_sleeps or self.rollout.backup_weights == "always")


def server_spec(
    config: ExperimentConfig, model_folder: Path, place: LaunchPlace = _ANYWHERE
) -> ServingSpec:
    """Return the server spec of this configuration."""
    return ServingSpec(
        model_folder=model_folder,
        rollout=config.rollout,
        lora=config.lora if config.lora.sends_adapters else None,
        max_context_tokens=config.max_context_tokens,
        seed=config.seed,
        device=config.cluster.device,
        num_adapters=config.num_adapters,
        place=place,
        returns_experts=config.returns_experts,
    )


def build_arguments(spec: ServingSpec, *, name: str, port: int, key: str) -> Arguments:
    """Return the arguments of a server, which is recognised by ``name`` and opened by ``key``."""
    rollout = spec.rollout
    arguments: Arguments = {
        "model_path": str(text_folder(spec.model_folder)),
        "served_model_name": name,
        "host": (spec.place.address or spec.place.door).host,
        "port": port,
        "api_key": key,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": rollout.dtype,
        "random_seed": spec.seed % 2**31,
        "context_length": spec.max_context_tokens + CONTEXT_SLACK,
        "tp_size": rollout.tensor_parallel_size,
        "max_running_requests": rollout.num_slots,
        "mem_fraction_static": rollout.memory_fraction,
        "disable_cuda_graph": spec.device == "cpu",
        "grammar_backend": "none",
        "log_level": "warning",
        "enable_return_routed_experts": spec.returns_experts,
        "enable_memory_saver": spec.saves_memory,
        "enable_weights_cpu_backup": spec.keeps_backup and spec.device == "cuda",
    }
    if spec.saves_memory:
        # On CUDA SGLang captures prefill graphs by default, in pieces (``breakable``), and the
        # class that does so refuses to be made where the memory of graphs can be released
        # (model_executor/runner_backend/breakable_cuda_graph_backend.py, 0.5.21 to 0.5.23).
        arguments["cuda_graph_backend_prefill"] = "disabled"
    if spec.device == "cpu":
        arguments |= _CPU | {
            "max_total_tokens": rollout.num_slots * (spec.max_context_tokens + CONTEXT_SLACK),
            "mem_fraction_static": 0.6,  # less fails beside others; the line above sets the limit
        }
    if vision_settings(spec.model_folder) is not None:
        # Else each response of a group cuts its images again.
        arguments["mm_preprocess_cache_size_mb"] = 256
        arguments |= {"mm_attention_backend": "sdpa"} if spec.device == "cpu" else {}
    if overrides := _overrides(read_settings(spec.model_folder)):
        arguments["json_model_override_args"] = to_json_text(overrides)
    if spec.lora is not None:
        arguments |= _adapter_arguments(spec.lora, spec)
    # JSON, and SGLang, have no tuples.
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in rollout.engine_args.items()
    }
    return arguments | given


def _overrides(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return settings of config.json that SGLang needs otherwise than they are."""
    family = FAMILIES[settings["model_type"]]
    overrides = {n: value for n, value in family.for_sglang.items() if n not in settings}
    if is_mxfp4(settings):  # the trainer sends bfloat16
        overrides["quantization_config"] = None
    kinds = layer_kinds(settings, family)
    if any(map(is_recurrent_kind, kinds)):  # transformers writes the list in its place
        attends = next(n for n, kind in enumerate(kinds, 1) if not is_recurrent_kind(kind))
        overrides["full_attention_interval"] = attends
    return overrides


def environment(spec: ServingSpec) -> Mapping[str, str]:
    """Return the variables that every server needs beside its arguments."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the slack, which no token fills
        # Else log-probs are those at temperature 1, which do not match the trainer's.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_MAMBA_CONV_DTYPE": spec.rollout.dtype,  # bfloat16 by default: .09 nats in float32
        # Of what a tower made of images: it outlives updates of the tower's weights. Encoders empty
        # it (encoder_routes.py), and are asked for an image once for each response.
        "SGLANG_VLM_CACHE_SIZE_MB": "4096" if spec.is_encoder else "0",
        # A server asks no encoder that is gone, and asks it again when it is back.
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL": "1",
        "SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL": "0",
    }
    if spec.device == "cpu":
        # 30 times slower with as many threads as cores: they spin (measured, 2 cores).
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        ranks = [str(rank) for rank in range(spec.rollout.tensor_parallel_size)]
        # With several ranks SGLang requires a core for each as an argument.
        return variables | ({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(ranks)} if ranks[1:] else {})
    return variables | {
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true" if spec.rollout.sleep else "false",
        "NCCL_GRAPH_REGISTER": "0",  # registered buffers hang once their memory was unmapped
        "PYTORCH_CUDA_ALLOC_CONF": "",  # expandable segments slip past torch_memory_saver
        "PYTORCH_ALLOC_CONF": "",
    }


def device_name(device: torch.device) -> str:
    """Return the node's name of this process's GPU, which Ray shows alone; empty on a CPU."""
    if device.type != "cuda":
        return ""
    listed = [name for name in env.get("CUDA_VISIBLE_DEVICES").split(",") if name]
    index = device.index or 0
    return listed[index] if listed else str(index)


def show_devices(names: Sequence[str]) -> Mapping[str, str]:
    """Return the variable that shows a server the GPUs of its ranks alone; nothing on a CPU."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}


def _adapter_arguments(lora: LoraConfig, spec: ServingSpec) -> Arguments:
    arguments: Arguments = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.modules),
        "max_loras_per_batch": spec.num_adapters,
        "max_loaded_loras": spec.num_adapters,
    }
    return arguments | ({"lora_backend": "torch_native"} if spec.device == "cpu" else {})
