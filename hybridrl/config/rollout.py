"""The ``rollout`` section: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.limits import Count, CountOrZero, Seconds, Within


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How responses are sampled. Mirrors hydra_configs/rollout/*.yaml key by key."""

    engine: Literal["hf"]
    """Rollout engine: ``hf`` is the embedded one, runs everywhere."""

    num_responses_per_prompt: Count
    """Group size G. Group-relative algorithms need G >= 2."""

    max_response_tokens: Count
    """Hard stop, in tokens. A response that reaches it is marked truncated."""

    temperature: Annotated[float, Within(above=0.0, usual=1.0)]
    """Divides the logits. Log-probs are computed at this same temperature. Greedy decoding is for
    evaluation alone: ``eval.temperature=0``."""

    top_p: Annotated[float, Within(above=0.0, at_most=1.0, usual=1.0)]
    """Nucleus: smallest set of tokens with at least this probability. 1 is off."""

    top_k: CountOrZero
    """Sample among the k likeliest tokens. 0 is off."""

    num_threads: CountOrZero
    """CPU threads while sampling; many small operations gain nothing from a second one. 0 is as
    many as ``cluster.num_threads_per_rank``."""

    num_slots: Count
    """Sequences that decode at the same time on a rank (rows of the KV cache)."""

    dtype: Literal["float32", "bfloat16"]
    """Type of the engine's weights and KV cache."""

    tensor_parallel_size: Count
    """Ranks that share one rollout engine; ``hf`` runs on one."""

    sleep: bool
    """Release weights, KV cache and graphs while training. False keeps them: more memory, less
    time."""

    backup_weights: Literal["ledger", "always"]
    """``ledger`` keeps a host copy of exactly the weights that no sync rewrites; ``always`` of
    all."""

    bucket_mib: CountOrZero
    """Size of one bucket of the weight stream, in MiB. 0 takes it from free memory."""

    skew_timeout_s: Seconds
    """Seconds that one rank may take longer to sample its responses than another."""

    drain_timeout_s: Seconds
    """Seconds a pausing engine may take to finish; then its requests are aborted."""

    stage_timeout_s: Seconds
    """Seconds all ranks may take for one stage of sleep or wake; then the run ends."""
