"""Which metrics share a plot, and what the plot is called.

What a metric means and its unit stand in ``hybridrl/metrics.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One plot."""

    section: str
    title: str
    lines: tuple[tuple[str, str], ...]
    """Patterns of metric names, each with the label of its line; ``*`` in a pattern stands for one
    word, and in a label for what that word was. The first line is the main one."""

    kind: Literal["lines", "stack"] = "lines"
    band: tuple[str, str] | None = None
    """Metrics between which the area is shaded, around the main line."""

    limit: str = ""
    """Configuration key of a limit, drawn dashed."""

    is_log: bool = False
    unit: str = ""
    """Instead of the unit of the main line."""

    about: str = ""
    """One sentence, where the meaning of the main line does not say what the plot shows."""


_LEARNING, _POLICY, _LENGTHS = "Learning", "Policy", "Responses"
_TIME, _MEMORY = "Time", "Memory"
REST = "Everything else"

PANELS = (
    Panel(
        section=_LEARNING,
        title="Reward",
        lines=(("reward/mean", "training"), ("eval/reward/mean", "held-out prompts")),
    ),
    Panel(
        section=_LEARNING,
        title="Reward by data source",
        lines=(("eval/reward/*", "*"),),
    ),
    Panel(
        section=_LEARNING,
        title="Prompts that teach nothing",
        lines=(
            ("reward/zero_variance_group_fraction", "all rewards equal"),
            ("reward/failed_fraction", "not scored"),
        ),
        unit="share of prompts or responses",
    ),
    Panel(
        section=_LEARNING,
        title="Loss",
        lines=(
            ("loss/policy", "policy"),
            ("loss/kl", "KL penalty"),
            ("loss/entropy", "entropy bonus"),
            ("loss/supervised_nats", "training"),
            ("eval/loss_nats", "held-out rows"),
            ("loss/*", "*"),
        ),
    ),
    Panel(section=_POLICY, title="Entropy", lines=(("policy/entropy_nats/mean", "entropy"),)),
    Panel(
        section=_POLICY,
        title="KL divergence",
        lines=(
            ("policy/kl_to_reference_nats/mean", "from the reference"),
            ("policy/kl_to_old_nats/mean", "from the policy that sampled"),
        ),
    ),
    Panel(
        section=_POLICY,
        title="Gradient norm",
        lines=(("policy/grad_norm", "before clipping"),),
        limit="actor.optimizer.max_grad_norm",
        is_log=True,
    ),
    Panel(
        section=_POLICY,
        title="Clipped tokens",
        lines=(
            ("policy/clip_low_fraction", "below the range"),
            ("policy/clip_high_fraction", "above the range"),
        ),
        unit="share of response tokens",
    ),
    Panel(
        section=_POLICY,
        title="Probability ratio",
        lines=(("policy/ratio/mean", "mean"), ("policy/ratio/max", "largest")),
        is_log=True,
        unit="current over old probability",
    ),
    Panel(
        section=_POLICY,
        title="Trainer against sampler",
        lines=(
            ("policy/sampler_mismatch_nats/mean", "mean distance"),
            ("policy/sampler_mismatch_nats/max", "largest distance"),
        ),
        is_log=True,
    ),
    Panel(
        section=_POLICY, title="Learning rate", lines=(("policy/lr", "learning rate"),), unit=" "
    ),
    Panel(
        section=_POLICY,
        title="Values of the critic",
        about="What the critic foretells before response tokens, and what came of it.",
        lines=(("critic/*/mean", "*"),),
    ),
    Panel(
        section=_POLICY,
        title="What the critic explains",
        about="1 foretells every return; 0 is no better than their mean, below 0 worse.",
        lines=(("critic/explained_variance", "explained variance"),),
    ),
    Panel(
        section=_POLICY,
        title="Loss of the critic",
        lines=(("loss/value", "value loss"),),
    ),
    Panel(
        section=_POLICY,
        title="Gradient norm of the critic",
        lines=(("critic/grad_norm", "before clipping"),),
        limit="critic.optimizer.max_grad_norm",
        is_log=True,
    ),
    Panel(
        section=_POLICY,
        title="Clipped values of the critic",
        lines=(("critic/clip_fraction", "moved too far"),),
        unit="share of response tokens",
    ),
    Panel(
        section=_POLICY,
        title="Updates left out",
        lines=(("policy/skipped_updates", "not finite"),),
    ),
    Panel(
        section=_LENGTHS,
        title="Response length",
        lines=(
            ("length/response_tokens/mean", "training"),
            ("eval/length/response_tokens/mean", "held-out prompts"),
        ),
        band=("length/response_tokens/min", "length/response_tokens/max"),
        limit="rollout.max_response_tokens",
    ),
    Panel(
        section=_LENGTHS,
        title="How responses end",
        lines=(
            ("rollout/truncated_fraction", "cut at the limit"),
            ("rollout/empty_fraction", "empty"),
            ("eval/truncated_fraction", "cut, held-out prompts"),
        ),
        unit="share of responses",
    ),
    Panel(
        section=_TIME,
        title="Where a step's time goes",
        about="Seconds of each phase of a step, on one another.",
        kind="stack",
        lines=(
            ("time/generate_s", "generate"),
            ("time/reward_s", "reward"),
            ("time/logprobs_s", "log-probs"),
            ("time/advantage_s", "advantages"),
            ("time/update_s", "update"),
            ("time/eval_s", "evaluation"),
        ),
        unit="s",
    ),
    Panel(
        section=_TIME,
        title="Inside generate: stages of the life cycle",
        about="Seconds of each stage that lends the device to the rollout engine and back.",
        kind="stack",
        lines=tuple(
            (f"time/{stage}_s", stage.replace("_", " "))
            for stage in (
                *(
                    "offload_optimizer",
                    "resume_weights",
                    "sync",
                    "offload_parameters",
                    "resume_cache",
                    "continue",
                ),
                *(
                    "sample",
                    "skew",
                    "pause",
                    "drain",
                    "release",
                    "release_cache",
                    "onload_training",
                ),
                *("roll_back", "unwind", "restart", "start"),
            )
        ),
        unit="s, slowest rank",
    ),
    Panel(
        section=_TIME,
        title="The critic's work",
        about="Seconds on the critic's ranks; with its own pool others work meanwhile.",
        lines=(("time/critic_values_s", "values"), ("time/critic_update_s", "update")),
        unit="s, slowest rank",
    ),
    Panel(
        section=_TIME,
        title="Throughput",
        about="Response tokens a second of sampling, tokens a second of training and of the step.",
        lines=(
            ("throughput/response_tokens_per_s", "sampling"),
            ("throughput/train_tokens_per_s", "training"),
            ("throughput/tokens_per_s", "whole step"),
        ),
    ),
    Panel(
        section=_TIME,
        title="Busy decoding slots",
        lines=(("rollout/slot_occupancy", "busy"),),
        unit="share of slots",
    ),
    Panel(
        section=_MEMORY,
        title="Peak memory by stage",
        about="The most memory in use during each stage, on the rank that had most.",
        lines=(("memory/*_peak_bytes/max", "*"),),
    ),
    Panel(
        section=_MEMORY,
        title="Memory moved in a step",
        about="Bytes that changed places so that trainer and sampler can share a device.",
        lines=(
            ("memory/synced_bytes", "weights sent to engines"),
            ("memory/released_bytes", "given back by engines"),
            ("memory/weight_backup_bytes", "copied to the host"),
        ),
    ),
)
"""In the order of the page."""
