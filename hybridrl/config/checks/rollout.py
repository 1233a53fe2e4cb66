"""Rules about rollout engines, and the SGLang server that they may start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec

from hybridrl.config.architecture import Architecture, find_architecture
from hybridrl.config.checks.passed_arguments import refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.rollout import ABORT_GRACE_S, FLUSH_TIMEOUT_S
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

TYPED: Mapping[str, str] = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "random_seed": "seed",
    "device": "cluster.device",
    "dtype": "rollout.dtype",
    "tp_size": "rollout.tensor_parallel_size",
    "mem_fraction_static": "rollout.memory_fraction",
    "max_running_requests": "rollout.num_slots",
    "disable_cuda_graph": "rollout.cuda_graphs",
    "enable_return_routed_experts": "rollout.routed_experts",
    "enable_memory_saver": "rollout.sleep",
    "enable_weights_cpu_backup": "rollout.backup_weights, or lora.base=backup",
    "enable_lora": "lora.enabled",
    "lora_paths": "lora.init_from",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.target_modules",
}
"""Arguments of SGLang that follow from a hybridrl key."""

TAKEN: Mapping[str, str] = {
    "host": "the server listens on its own machine alone",
    "port": "each server looks for a free one",
    "served_model_name": "it identifies the server on its port",
    "load_format": "weights are sent by the trainer, not read",
    "skip_tokenizer_init": "requests carry token ids in both directions",
    "max_loras_per_batch": "there is one adapter",
    "max_loaded_loras": "there is one adapter",
    "dp_size": "each group of rollout.tensor_parallel_size ranks has a server of its own",
    "pp_size": "a server is tensor-parallel alone",
    "nnodes": "it follows from the devices of the engine",
    "node_rank": "it follows from the devices of the engine",
    "dist_init_addr": "engines look for free ports",
    "nccl_port": "engines look for free ports",
    "disaggregation_mode": "worker_type of a group decides it",
    "disaggregation_bootstrap_port": "engines look for free ports",
    "api_key": "each server gets a random one, which its engine alone knows",
    "admin_api_key": "each server gets a random key, which its engine alone knows",
}
"""Arguments of SGLang that users may not choose, and why."""


_GRAPH_BACKENDS = ("cuda_graph_backend_prefill", "cuda_graph_backend_decode")
_IN_PIECES = "breakable"
_FLOAT32_ATTENTION = ("triton", "torch_native", "flex_attention")
"""Backends of SGLang in Triton or plain torch, for any number type."""


def check_engine_args(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Arguments with a hybridrl key are set by that key alone: else two keys could disagree."""
    rollout = config.rollout
    if rollout.engine_args and rollout.engine != "sglang":
        reset = resetting("rollout.engine_args", rollout.engine_args, {})
        yield ConfigError(
            "rollout.engine_args",
            dict(rollout.engine_args),
            f"would be ignored: they are arguments of SGLang, and rollout.engine={rollout.engine}",
            remedies=[reset],
            fix=f"{instruction(reset)}, or set rollout=sglang",
        )
        return
    yield from refuse_own_arguments(
        rollout.engine_args, "rollout.engine_args", typed=TYPED, taken=TAKEN
    )


def check_graphs_can_be_released(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang captures graphs in pieces only if their memory is never released."""
    rollout = config.rollout
    releases_graphs = rollout.sleep and rollout.cuda_graphs and config.cluster.device == "cuda"
    if rollout.engine != "sglang" or not releases_graphs:
        return
    for name in _GRAPH_BACKENDS:
        if rollout.engine_args.get(name) == _IN_PIECES:
            key = f"rollout.engine_args.{name}"
            yield ConfigError(
                key,
                _IN_PIECES,
                "SGLang does not start with it and rollout.sleep=true: the memory of graphs that "
                "are captured in pieces cannot be released",
                remedies=[(f"~{key}",), ("rollout.sleep=false",)],
            )


def check_server_computes_in(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang's default attention on a GPU does not support float32."""
    rollout = config.rollout
    is_on_gpu = rollout.engine == "sglang" and config.cluster.device == "cuda"
    if not is_on_gpu or rollout.dtype == "bfloat16":
        return
    if rollout.engine_args.get("attention_backend") not in _FLOAT32_ATTENTION:
        yield ConfigError(
            "rollout.dtype",
            rollout.dtype,
            "FlashAttention and FlashInfer, which SGLang takes on a GPU by itself, compute in "
            "bfloat16",
            remedies=[("rollout.dtype=bfloat16",)],
            fix="set rollout.dtype=bfloat16, or rollout.engine_args.attention_backend=triton",
        )


def check_sglang_is_installed(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang is an extra: a missing one is reported here and not by the workers."""
    if config.samples and config.rollout.engine == "sglang" and find_spec("sglang") is None:
        yield ConfigError(
            "rollout.engine",
            "sglang",
            "SGLang is not installed",
            fix="pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), or set "
            "rollout.engine=hf",
            remedies=[("rollout.engine=hf",)],
        )


def check_drain_fits_its_stage(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks wait for an engine that drains no longer than for any stage."""
    rollout = config.rollout
    after_s = ABORT_GRACE_S + FLUSH_TIMEOUT_S
    needed_s = rollout.drain_timeout_s + after_s
    if rollout.engine != "sglang" or rollout.stage_timeout_s >= needed_s:
        return
    remedies = [(f"rollout.stage_timeout_s={math.ceil(needed_s)}",)]
    if rollout.stage_timeout_s > after_s:
        remedies.append((f"rollout.drain_timeout_s={rollout.stage_timeout_s - after_s:g}",))
    yield ConfigError(
        "rollout.stage_timeout_s",
        rollout.stage_timeout_s,
        f"to drain SGLang may take rollout.drain_timeout_s={rollout.drain_timeout_s:g} and, until "
        f"aborted requests have ended and the server has shown that it is idle, {after_s:g} s more",
        remedies=remedies,
    )


_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def check_server_computes_the_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang (seen with 0.5.17, 0.5.21 and 0.5.23) ignores some settings of config.json."""
    model = find_architecture(config.model)
    if config.rollout.engine != "sglang" or model is None:
        return
    for rule, fix in _ignored_by_sglang(config, model):
        yield ConfigError("model.path", config.model.path, rule, fix=fix)
    if model.model_type == "mixtral" and config.rollout.routed_experts:
        yield ConfigError(
            "rollout.routed_experts",
            got=True,
            rule="SGLang before 0.5.23 gives routers of mixtral no layer number, so its server "
            "ends when it records the experts of a layer",
            remedies=[("rollout.routed_experts=false", "megatron.replay_routing=false")],
        )


def _ignored_by_sglang(config: ExperimentConfig, model: Architecture) -> Iterator[tuple[str, str]]:
    """Yield settings that SGLang would ignore, each with what to do."""
    is_mixture = model.model_type in _MIXTURES
    if is_mixture and model.is_tied:
        yield (
            "its output embedding is tied (tie_word_embeddings), and SGLang does not tie that of "
            f"{model.model_type}: it would sample from a random one",
            "untie it: save lm_head.weight, and tie_word_embeddings=false in config.json",
        )
    if is_mixture and model.has_dense_layers:
        yield (
            "some of its layers have no experts (decoder_sparse_step, mlp_only_layers), and SGLang "
            f"gives all layers of {model.model_type} random ones",
            "set model.path to a model with experts in each layer",
        )
    if model.window is not None and config.max_row_tokens > model.window:
        yield (
            f"its attention reaches back {model.window} tokens (sliding_window), and that of "
            f"SGLang over all of a row, {config.max_row_tokens} tokens with data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} and rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}",
            "set these to fit into the window, or rollout=hf",
        )


def check_transport(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Weights travel only to an engine in another process."""
    key, transport = "rollout.transport", config.rollout.transport
    if config.rollout.engine == "hf" and transport != "auto":
        yield ConfigError(
            key,
            transport,
            "would be ignored: rollout.engine=hf has its weights in the trainer's process",
            remedies=[(f"{key}=auto",)],
        )


def check_rollout_engine(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The embedded engine runs on one rank."""
    size = config.rollout.tensor_parallel_size
    if config.rollout.engine == "hf" and size != 1:
        yield ConfigError(
            "rollout.tensor_parallel_size",
            size,
            "rollout.engine=hf runs on one rank",
            remedies=[("rollout.tensor_parallel_size=1",)],
        )


READ_BY: Mapping[str, tuple[str, str | int | float | bool]] = {
    "num_threads": ("hf", 1),
    "memory_fraction": ("sglang", 0.85),
    "cuda_graphs": ("sglang", True),
    "routed_experts": ("sglang", False),
    "start_timeout_s": ("sglang", 600.0),
    "request_timeout_s": ("sglang", 600.0),
}
"""Keys of ``rollout`` that only one engine reads, with their defaults in hydra_configs."""

_READ_BY_SERVERS = ("start_timeout_s", "request_timeout_s")
"""Those that rollout servers read, too, whatever engine they run."""


def check_rollout_keys_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Keys of the other rollout engine keep their defaults: else a setting would be ignored."""
    engine, values = config.rollout.engine, asdict(config.rollout)
    for name, (reader, usual) in READ_BY.items():
        if reader == engine or values[name] == usual:
            continue
        if config.has_servers and name in _READ_BY_SERVERS:
            continue
        reset = f"rollout.{name}={str(usual).lower()}"
        yield ConfigError(
            f"rollout.{name}",
            values[name],
            f"would be ignored: rollout.engine={reader} alone reads it, and this is {engine}",
            remedies=[(reset,)],
            fix=f"set {reset}, or rollout={reader}",
        )


RULES = (
    check_rollout_engine,
    check_rollout_keys_are_read,
    check_transport,
    check_sglang_is_installed,
    check_engine_args,
    check_graphs_can_be_released,
    check_server_computes_in,
    check_drain_fits_its_stage,
    check_server_computes_the_model,
)
