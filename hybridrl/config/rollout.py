"""The ``rollout`` section: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import Arguments, MebibytesOrZero, Ranks, Rows, Seconds, Tokens

COLDEST = 0.001
"""Lowest temperature: logits divided by a lower one would overflow."""

ABORT_GRACE_S = 10.0
"""Seconds that aborted requests of a draining server may take to end."""

FLUSH_TIMEOUT_S = 20.0
"""Seconds after that in which the server must show that it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How responses are sampled. Mirrors hydra_configs/rollout/*.yaml key by key."""

    engine: Literal["hf", "sglang"]
    """Rollout engine. ``hf`` is embedded in the worker process and runs everywhere; ``sglang`` is a
    server that each group of ``tensor_parallel_size`` ranks starts as its child."""

    num_responses_per_prompt: Rows
    """Group size G. Group-relative algorithms need G >= 2."""

    oversample: Annotated[float, Field(ge=1.0, le=100.0, examples=[1.5])]
    """Prompts that are begun, over those of a step. Above 1 a phase ends when the prompts of a step
    are complete; the others are interrupted at a token, and continue in the next phase with the
    tokens that they have. Engines of the ranks alone; needs a rollout correction."""

    max_response_tokens: Tokens
    """Length limit, in tokens. A response that reaches it is marked truncated."""

    temperature: Annotated[float, Field(ge=COLDEST, le=100.0, examples=[1.0])]
    """Divides the logits. Log-probs are computed at this same temperature. Greedy decoding is for
    evaluation alone: ``eval.temperature=0``."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0, examples=[1.0])]
    """Nucleus: smallest set of tokens with at least this probability. 1 is off. Without
    ``sampling_masks`` log-probs of either engine are those before top-p and top-k."""

    top_k: Annotated[int, Field(ge=0, le=2**24)]
    """Sample among the k likeliest tokens. 0 is off."""

    sampling_masks: bool
    """Learn with the distribution that top-p and top-k left: engines return the tokens that were
    left, and all log-probs, ratios, KL and entropies are those among these."""

    num_slots: Rows
    """Sequences that decode at the same time on a rank (rows of the KV cache)."""

    dtype: Literal["float32", "bfloat16"]
    """Type of the engine's weights and KV cache."""

    tensor_parallel_size: Ranks
    """Ranks of one node that share a rollout engine; ``hf`` runs on one."""

    engine_args: Arguments
    """Further arguments of SGLang by their Python names, as chunked_prefill_size; passed on
    unchanged. Arguments that have a hybridrl key are refused."""

    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.85])]
    """Share of the device that SGLang takes for weights and KV cache together."""

    transport: Literal["auto", "shared", "disk"]
    """How weights reach SGLang: ``shared`` through memory that both map (CUDA IPC on a GPU),
    ``disk`` through files. ``auto`` is shared."""

    sleep: bool
    """Release weights, KV cache and graphs while training. False keeps them: more memory, less
    time."""

    backup_weights: Literal["ledger", "always"]
    """``ledger`` keeps a host copy of exactly the weights that no sync rewrites; ``always`` of
    all weights."""

    verify_weights: Literal["never", "first", "always"]
    """Compare the weights of an engine, tensor by tensor, with the same weights loaded from files:
    ``first`` after its first sync since it started, ``always`` after each sync. Costs a copy of the
    model, in ``dtype``, in the temporary folder of each node with such an engine. Servers of a
    frozen model that run elsewhere are compared with each other at the start, with ``always``."""

    canary_max_drift_nats: Annotated[float, Field(gt=0.0, le=1000.0, examples=[0.1])] | None
    """The policy update compares the engine's log-probs of all sampled tokens with the trainer's,
    which costs nothing, and the run stops before an optimizer step if those of a micro-batch differ
    by more on average, as by 0.1. Null: it does not."""

    bucket_mib: MebibytesOrZero
    """Size of one bucket of the weight stream, in MiB. 0 derives it from free memory."""

    drain_timeout_s: Annotated[float, Field(gt=0.0, le=1e5, examples=[30.0])]
    """Seconds that a pausing engine may take to finish; then its requests are aborted."""

    stage_timeout_s: Seconds
    """Seconds that one stage of sleep or wake may take; then the engine is restarted. Ranks wait
    for each other half as long again; then the run ends."""

    start_timeout_s: Seconds
    """Seconds until an SGLang server must answer after a start or restart; it may compile kernels
    meanwhile. A load of all weights from files may take as long."""

    request_timeout_s: Seconds
    """Seconds in which the engine of a request must make progress: a token, or a part of a context,
    of whichever request. Else the request counts as lost. It may take any time otherwise."""

    dump: bool
    """Write all columns of all rollouts, with their scores, to ``<run_dir>/rollouts``: a file for
    each call, before the step learns from it. ``rollout.replay`` of another run reads them."""

    replay: str | None
    """Run folder whose rollouts replace sampling: no rollout engine starts, and training is that of
    the recorded run. With a smaller ``trainer.num_prompts_per_step`` the first and the last prompts
    of each step count, half of them each. Null: sample."""

    @property
    def captures_graphs(self) -> bool:
        """Whether SGLang captures CUDA graphs of decode steps, once, at start."""
        return not self.engine_args.get("disable_cuda_graph")
