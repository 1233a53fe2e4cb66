"""Rules about rollout engines, open responses (docs/asynchronous.md) and recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.messages import error, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import flaw_of_folder
from hybridrl.config.rollout import ABORT_GRACE_S, FLUSH_TIMEOUT_S
from hybridrl.config.topology import Attached, Own
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import find_architecture

_FLOAT32_ATTENTION = ("triton", "torch_native", "flex_attention")
"""Backends of SGLang in Triton or plain torch, for any number type."""

_MASK_TOKENS = 4096
"""Tokens of the largest sampling mask that SGLang returns (sampling_mask_max_tokens, 0.5.23)."""

_STALENESS = "trainer.max_staleness"
_OVERSAMPLE = "rollout.oversample"
_WEIGHED = "algorithm.rollout_correction=importance"
_CLIPPED = "algorithm.old_logprobs=sampler"
_MASK = "off_policy_mask"
_MASKED = f"algorithm.token_mask={_MASK}"

_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def check_sglang_is_installed(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang is an extra: a missing one is reported here and not by the workers."""
    if config.samples and config.rollout.engine == "sglang" and find_spec("sglang") is None:
        fix = "pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), or set rollout.engine=hf"
        yield error(
            config, "rollout.engine", "SGLang is not installed", "rollout.engine=hf", fix=fix
        )


def check_sglang(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Settings with which SGLang does not start, or is given up while it drains."""
    rollout, is_cuda = config.rollout, config.cluster.device == "cuda"
    if rollout.engine != "sglang":
        return
    yield from refuse_own_arguments(config, "rollout.engine_args")
    attention = rollout.engine_args.get("attention_backend")
    if is_cuda and rollout.dtype != "bfloat16" and attention not in _FLOAT32_ATTENTION:
        key = "rollout.dtype"
        rule = (
            "FlashAttention and FlashInfer, which SGLang takes on a GPU by itself, compute in "
            "bfloat16"
        )
        fix = "set rollout.dtype=bfloat16, or rollout.engine_args.attention_backend=triton"
        yield error(config, key, rule, f"{key}=bfloat16", fix=fix)
    after_s = ABORT_GRACE_S + FLUSH_TIMEOUT_S
    if rollout.stage_timeout_s < rollout.drain_timeout_s + after_s:
        key, drain_s = "rollout.stage_timeout_s", rollout.drain_timeout_s
        rule = (
            f"to drain SGLang may take rollout.drain_timeout_s={drain_s:g} and, until aborted "
            f"requests have ended and the server has shown that it is idle, {after_s:g} s more"
        )
        shorter_s = rollout.stage_timeout_s - after_s
        shorter = f"rollout.drain_timeout_s={shorter_s:g}" if shorter_s > 0 else ""
        yield error(config, key, rule, f"{key}={math.ceil(drain_s + after_s)}", shorter)


def check_sglang_computes_the_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """SGLang (seen with 0.5.17, 0.5.21 and 0.5.23) ignores some settings of config.json."""
    model = find_architecture(config.model)
    if config.rollout.engine != "sglang" or model is None:
        return
    if model.model_type in _MIXTURES and model.is_tied:
        rule = (
            "its output embedding is tied (tie_word_embeddings), and SGLang does not tie that of "
            f"{model.model_type}: it would sample from a random one"
        )
        fix = "untie it: save lm_head.weight, and tie_word_embeddings=false in config.json"
        yield error(config, "model.path", rule, fix=fix)
    if model.model_type in _MIXTURES and model.has_dense_layers:
        rule = (
            "some of its layers have no experts (decoder_sparse_step, mlp_only_layers), and SGLang "
            f"gives all layers of {model.model_type} random ones"
        )
        fix = "set model.path to a model with experts in each layer"
        yield error(config, "model.path", rule, fix=fix)
    if model.window is not None and config.max_context_tokens > model.window:
        limits = " and ".join(f"{key}={limit}" for key, limit in config.response_limits.items())
        rule = (
            f"its attention reaches back {model.window} tokens (sliding_window), and that of "
            f"SGLang over all of a row, {config.max_context_tokens} tokens with "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and {limits}"
        )
        fix = "set these to fit into the window, or rollout=hf"
        yield error(config, "model.path", rule, fix=fix)
    if model.model_type == "mixtral" and config.returns_experts:
        rule = (
            "SGLang before 0.5.23 gives routers of mixtral no layer number, so its server ends "
            "when it records the experts of a layer"
        )
        yield error(config, "actor.replay_routing", rule, "actor.replay_routing=false")


def check_what_engines_return(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A replay of routes needs experts, and an engine that records them.

    SGLang returns masks of a limited size, which top_p alone does not bound.
    """
    model, rollout, key = find_architecture(config.model), config.rollout, "actor.replay_routing"
    if config.returns_experts and model is not None and model.experts is None:
        yield error(config, key, "the model has no experts to route tokens to", f"{key}=false")
    elif config.returns_experts and rollout.engine != "sglang":
        rule = f"rollout.engine={rollout.engine} does not return the experts that it used"
        yield error(config, key, rule, "rollout=sglang", f"{key}=false")
    key = "rollout.sampling_masks"
    if not rollout.sampling_masks or rollout.engine != "sglang":
        return
    most = rollout.engine_args.get("sampling_mask_max_tokens", _MASK_TOKENS)
    if isinstance(most, int) and not 1 < rollout.top_k <= most:
        rule = (
            f"SGLang returns masks if 1 < rollout.top_k <= {most}, and it is {rollout.top_k}; "
            "top_p may cut further"
        )
        top_k = f"rollout.top_k={most if rollout.top_k > most else min(most, 1024)}"
        yield error(config, key, rule, top_k, f"{key}=false")


def check_replayed_run(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The recorded run has rollouts, and is not deleted by the run that replays them."""
    replay, trainer = config.rollout.replay, config.trainer
    if replay is None or config.mode == "eval":
        return
    if flaw := flaw_of_folder(Path(replay) / "rollouts"):
        rule = f"no rollouts there: {flaw}; a run writes them with rollout.dump=true"
        yield error(config, "rollout.replay", rule, "rollout.replay=null")
    elif trainer.overwrite and Path(replay).resolve() == Path(trainer.run_dir).resolve():
        key = "trainer.overwrite"
        rule = f"would delete the rollouts to replay: rollout.replay={replay} is trainer.run_dir"
        yield error(config, key, rule, f"{key}=false")


def check_sampling_ahead(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only engines on devices of their own sample while the trainer learns.

    Only a single response begins again as a unit: earlier turns of a conversation stay.
    """
    off = f"{_STALENESS}=0"
    if not config.trainer.max_staleness:
        return
    if config.rollout.replay is not None:
        yield error(config, _STALENESS, "rollout.replay samples nothing", off)
    elif not isinstance(config.topology, Own | Attached):
        rule = "the ranks of the policy have the rollout engines, which sleep while the ranks learn"
        yield error(config, _STALENESS, rule, off, f"serving=own rollout.sleep=false {_WEIGHED}")
    if config.rollout.dump:
        rule = "rollout.dump has all prompts of a call in one file, and here a call answers others"
        yield error(config, _STALENESS, rule, off)
    key, on_update = "serving.on_update", config.serving.on_update
    if on_update == "abort" and config.samples_ahead and not config.agent.is_single_turn:
        rule = (
            f"agent.loop={config.agent.loop} holds conversations, whose earlier turns and calls of "
            "tools cannot begin again"
        )
        yield error(config, key, rule, f"{key}=interrupt")


def check_oversampling(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Open responses stay with the engines of the ranks, which ask for single responses."""
    rollout, off = config.rollout, f"{_OVERSAMPLE}=1"
    if not config.oversamples:
        return
    if not config.agent.is_single_turn:
        rule = (
            f"agent.loop={config.agent.loop}: conversations are not interrupted; with "
            "rollout.oversample every response is a single turn"
        )
        yield error(config, _OVERSAMPLE, rule, off)
    if config.has_servers:
        rule = (
            "serving.models has rollout engines on devices of their own: they need not stop for "
            "the longest response; set trainer.max_staleness instead"
        )
        yield error(config, _OVERSAMPLE, rule, off)
    if config.returns_experts:
        rule = "actor.replay_routing=true: the experts of interrupted tokens are not kept"
        yield error(config, _OVERSAMPLE, rule, off)
    if rollout.dump or rollout.replay is not None:
        rule = (
            "rollout.dump and rollout.replay have all prompts of a call in one file, and here a "
            "call answers some of them"
        )
        yield error(config, _OVERSAMPLE, rule, off)


def check_stale_tokens(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Tokens of earlier weights are corrected for, or it is said that they are not."""
    algorithm = config.algorithm
    if algorithm.rollout_correction is not None or algorithm.old_logprobs == "sampler":
        return
    if algorithm.token_mask in (_MASK, "binary_kl_mask", "second_moment_mask"):
        return
    causes = [f"{_OVERSAMPLE}={config.rollout.oversample:g}"] if config.oversamples else []
    causes += [f"{_STALENESS}={config.trainer.max_staleness}"] if config.samples_ahead else []
    for cause in causes:
        rule = f"{cause} learns from tokens of earlier weights, and nothing corrects for it"
        fix = (
            f"set {_CLIPPED}, {_MASKED} or {_WEIGHED}; to leave them uncorrected, "
            f"{_WEIGHED} algorithm.rollout_correction_args.level=none"
        )
        key = "algorithm.rollout_correction"
        yield error(config, key, rule, _CLIPPED, _MASKED, _WEIGHED, fix=fix)
