"""What is to be proved, and from where on it counts as reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu_parts.result import PASSED, Result


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of one part, and its limit."""

    part: str
    figure: str
    text: str
    limit: float
    unit: str
    is_at_most: bool = True

    @property
    def rule(self) -> str:
        """The limit in words."""
        if self.unit == "yes":
            return "yes"
        unit = "" if self.unit == "1" else f" {self.unit}"
        return f"{'at most' if self.is_at_most else 'at least'} {self.limit:g}{unit}"

    def is_reached(self, value: float) -> bool:
        """Return whether ``value`` keeps the limit."""
        return value <= self.limit if self.is_at_most else value >= self.limit

    def state(self, results: Mapping[str, Result]) -> str:
        """Say where it stands: reached, missed, or why nothing is known."""
        result = results.get(self.part)
        if result is None or result.is_dry:
            return "unproved"
        if self.figure in result.figures:
            value = float(result.figures[self.figure][0])
            return "**reached**" if self.is_reached(value) else "**missed**"
        return "unproved" if result.status == PASSED else f"unproved: {result.status}"


def _yes(part: str, figure: str, text: str) -> Goal:
    return Goal(part, figure, text, 1, "yes", is_at_most=False)


_TEN = "of ten whole cycles"
GOALS = (
    _yes("checks", "all_passed", "every test marked `gpu`"),
    _yes("cycle_0_5b", "tokens_equal", f"0.5B: greedy tokens {_TEN} are equal"),
    Goal("cycle_0_5b", "logprob_difference_nats", f"0.5B: log-probs {_TEN} differ", 0.0, "nats"),
    Goal("cycle_0_5b", "graph_captures", "0.5B: captures of CUDA graphs over ten cycles", 1, "1"),
    Goal("cycle_0_5b", "free_spread_mib", "0.5B: free memory after each cycle varies", 64, "MiB"),
    _yes("cycle_7b", "tokens_equal", f"7B: greedy tokens {_TEN} are equal"),
    Goal("cycle_7b", "logprob_difference_nats", f"7B: log-probs {_TEN} differ", 0.0, "nats"),
    Goal("cycle_7b", "graph_captures", "7B: captures of CUDA graphs over ten cycles", 1, "1"),
    Goal("cycle_7b", "free_spread_mib", "7B: free memory after each cycle varies", 64, "MiB"),
    Goal("cycle_7b", "wake_s", "7B: resume weights + sync + resume KV", 0.6, "s"),
    Goal("cycle_7b", "drain_release_s", "7B: drain and release, idle", 0.3, "s"),
    Goal(
        *("cycle_7b", "offload_share", "7B: optimizer and masters to the host, share of pinned"),
        *(0.8, "1"),
        is_at_most=False,
    ),
    Goal(
        *("cycle_7b", "restore_share", "7B: optimizer and masters back, share of pinned"),
        *(0.8, "1"),
        is_at_most=False,
    ),
    Goal(
        *("cycle_7b", "overhead_share", "7B: neither generates nor trains, of a step of 120 s"),
        *(0.05, "1"),
    ),
    Goal("sync_8b", "sync_s", "8B bf16: full sync", 0.25, "s"),
    Goal("lora_backup", "adapter_sync_s", "7B, LoRA rank 32, base in host copy: sync", 0.3, "s"),
    _yes("lora_backup", "tokens_equal", f"LoRA with a copy: greedy tokens {_TEN} are equal"),
    Goal("lora_resident", "adapter_sync_s", "7B, LoRA rank 32, base resident: sync", 0.3, "s"),
    _yes("lora_resident", "tokens_equal", f"LoRA, base resident: greedy tokens {_TEN} are equal"),
    _yes("lora_garbage", "garbage_seen", "LoRA without copy, guard off, on purpose: garbage"),
    _yes("lora_garbage", "refused_with_guard", "the same with the guard on is refused or mended"),
    _yes("wake", "single_stage_fails", "7B, fraction 0.9: waking in a single stage does not fit"),
    Goal("fraction_90", "steps", "7B GRPO steps at fraction 0.9", 10, "1", is_at_most=False),
    Goal("fraction_95", "steps", "7B GRPO steps at fraction 0.95", 10, "1", is_at_most=False),
    Goal(
        *("rollout", "share_of_sglang", "7B: rollout tokens/s, share of SGLang alone"),
        *(0.97, "1"),
        is_at_most=False,
    ),
    Goal("mfu_8b", "mfu", "8B: training MFU, packs of 8k tokens, 6ND", 0.45, "1", is_at_most=False),
    Goal(
        *("megatron_mfu_3b", "mfu", "megatron-core, 3B: training MFU, packs of 8k tokens, 6ND"),
        *(0.45, "1"),
        is_at_most=False,
    ),
    Goal(
        *(
            "megatron_mfu_8b_lora",
            "mfu",
            "megatron-core, 8B with LoRA: the same, 4ND",
        ),
        *(0.45, "1"),
        is_at_most=False,
    ),
    Goal("megatron_offload", "left_bytes", "megatron-core: bytes left while away", 0, "bytes"),
    Goal(
        *("megatron_offload", "offload_share", "megatron-core, 3B: to the host, share of pinned"),
        *(0.8, "1"),
        is_at_most=False,
    ),
    _yes("learn", "learns", "GRPO from end to end learns the default task"),
)
"""In the order of the table."""
