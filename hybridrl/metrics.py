"""Metrics: values that merge rightly, and the one table that declares every name.

A name is ``area/thing_unit``, then ``/mean``, ``/max`` or ``/min`` if it was reduced.
``docs/metrics.md`` is this table: ``python -m hybridrl.metrics > docs/metrics.md`` writes it again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from math import isfinite, isnan
from typing import Any

from hybridrl.errors import MetricError, suggest_name


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be merged: it keeps the sum and the weight."""

    total: float
    count: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; not a number if nothing was counted."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum over everything merged; not a number as soon as one part is none."""

    value: float

    def __add__(self, other: Max) -> Max:
        return self if isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class Min:
    """A minimum over everything merged; not a number as soon as one part is none."""

    value: float

    def __add__(self, other: Min) -> Min:
        return self if isnan(self.value) or self.value <= other.value else other


@dataclass(frozen=True, slots=True)
class Last:
    """The last value: for numbers that change within a step and are equal on all ranks."""

    value: float

    def __add__(self, other: Last) -> Last:
        return other


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over everything merged, for counts and bytes."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


Metric = Mean | Max | Min | Last | Sum
Metrics = dict[str, Metric]


def format_value(value: float | None) -> str:
    """Write a number with about four digits."""
    if value is None:
        return "-"
    is_large = 1000 <= abs(value) < 1e15
    return f"{value:,.0f}" if is_large else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Write seconds as ``42 s``, ``3 min`` or ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Fold per-rank or per-microbatch metrics; a mean's parts weigh by their counts."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                metric = merged[name] + metric  # type: ignore[operator]  # one name, one type
            merged[name] = metric
    return merged


def to_json(metrics: Mapping[str, Metric]) -> dict[str, list[float | str]]:
    """Spell metrics as JSON has them; `from_json` gives the same ones back.

    JSON has no NaN or infinity: they become text, ``"nan"`` or ``"-inf"``.
    """
    return {
        name: [
            type(metric).__name__,
            *(number if isfinite(number) else str(number) for number in astuple(metric)),
        ]
        for name, metric in metrics.items()
    }


def from_json(values: Mapping[str, Sequence[Any]]) -> Metrics:
    """Read a value from `to_json`."""
    kinds = {kind.__name__: kind for kind in (Mean, Max, Min, Last, Sum)}
    return {
        name: kinds[kind](*(float(n) if isinstance(n, str) else n for n in numbers))
        for name, (kind, *numbers) in values.items()
    }


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of one metric."""

    name: str
    unit: str
    meaning: str


_TABLE = """
reward/mean | reward | mean over the responses of the step, as scored (before any KL charge)
reward/std | reward | standard deviation over the responses of the step
reward/max | reward | best response of the step
reward/min | reward | worst response of the step
reward/by_source/{source} | reward | mean over one data source, if the step has several
reward/zero_variance_group_fraction | 1 | groups whose responses all got one reward: no signal
reward/zero_variance_groups/{reward} | groups | of these by that reward; the 8 most frequent ones
reward/failed_fraction | 1 | responses that the reward function could not score, counted as 0
reward/left_out_fraction | 1 | responses not learned from: something broke that is not the policy
reward/unreadable_fraction | 1 | responses about which a judge gave no score
reward/early_fraction | 1 | responses that were scored before the last one ended
reward/{function}/mean | reward | the same of one of several functions, without its weight
reward/{function}/std | reward | standard deviation of its rewards over the responses of the step
reward/{function}/failed_fraction | 1 | responses that this function could not score
reward/{function}/zero_variance_group_fraction | 1 | groups in which it scored all responses equal
reward/kl_charge/mean | reward | mean charge per response for leaving the reference policy
reward/kl_nats/mean | nats | KL to the reference that responses are charged for, per token
reward/overlong_penalty/mean | reward | mean charge for responses near the length limit
reward/baseline/{name} | reward | mean reward so far of a player, by source and number, of rae
agent/turns/mean | turns | turns of the assistant in a conversation
agent/sampled_tokens/mean | tokens | tokens of the assistant's turns in a conversation
agent/appended_tokens/mean | tokens | tokens of tools and of the chat template in a conversation
agent/sequences/mean | 1 | sequences of a conversation: several where its history was rewritten
agent/tool_calls/mean | calls | calls of tools in a conversation, broken ones too
agent/tool_error_fraction | 1 | share of them that were answered with an error
agent/tool_s/mean | s | time of a call
agent/refused_requests | requests | requests of agent programs that were answered with an error
agent/ended_by_{limit}_fraction | 1 | share that a limit ended: turns, tokens, time, or an error
groups/sampled | groups | prompts that the step sampled, with a group filter
groups/kept_fraction | 1 | share of them that the group filter kept
groups/learned | groups | prompts that the step learned from
groups/surplus | groups | kept prompts beyond those that a step learns from
loss/policy | reward or 1 | clipped surrogate per token, tokens weighed as the loss weighs them
loss/kl | reward or 1 | KL penalty per token times its coefficient
loss/entropy | reward or 1 | entropy bonus per token times its coefficient, negative
loss/divergence | reward or 1 | divergence from a teacher per token times its coefficient
loss/value | reward^2 | critic: half the squared error of the value per token, clipped as PPO2 does
loss/supervised_nats | nats | negative log-likelihood per token, supervised fine-tuning
loss/preference | 1 | loss per preference pair, without the supervised term
preference/accuracy | 1 | pairs whose chosen answer has the higher reward; equal ones count a half
preference/margin/mean | reward | reward of the chosen less that of the rejected answer
preference/chosen_reward/mean | reward | of the chosen answer: with dpo beta times its log-ratio
preference/rejected_reward/mean | reward | the same of the rejected answer
preference/chosen_logprob_nats/mean | nats | log-prob of the chosen answer, sum over its tokens
preference/rejected_logprob_nats/mean | nats | log-prob of the rejected answer
policy/entropy_nats/mean | nats | entropy of the next-token distribution at response tokens
policy/kl_to_reference_nats/mean | nats | k3 estimate of KL(policy, reference) per token
policy/kl_to_old_nats/mean | nats | k3 estimate of KL(policy that sampled, policy now) per token
policy/ratio/mean | 1 | current over old probability of the sampled tokens
policy/ratio/max | 1 | largest current over old probability
policy/clip_low_fraction | 1 | tokens with negative advantage whose ratio lies below the clip range
policy/clip_high_fraction | 1 | tokens with positive advantage whose ratio lies above the clip range
policy/sampler_mismatch_nats/mean | nats | of log-probs, trainer to sampler, tokens of this version
policy/sampler_mismatch_nats/max | nats | the largest of these distances
policy/sampler_mismatch_nats/older_versions | nats | the mean, tokens that older weights sampled
policy/sampler_mismatch_nats/{depth} | nats | the mean, tokens that far into their rows
policy/sampler_kl_nats/mean | nats | KL(sampler || trainer), never negative (k3)
policy/sampler_ratio/mean | 1 | probability of the sampled tokens, trainer over sampler
policy/sampler_ratio/max | 1 | largest probability of a token, trainer over sampler
policy/sampler_chi_square/mean | 1 | mean square of the ratio of tokens, less 1; 0 where both agree
policy/effective_sample_fraction | 1 | share of the tokens that, unweighted, would estimate as well
policy/masked_token_fraction | 1 | response tokens that a token mask leaves out
policy/kl_coefficient | 1 | weight of the KL penalty, where it adapts to a target
policy/sampler_weight/mean | 1 | weight of tokens by the rollout correction
policy/grad_norm | 1 | global L2 norm of the gradient before clipping; largest of the step's updates
policy/lr | 1 | learning rate of the step's last update
policy/trained_parameters | 1 | numbers that learn, where only an adapter does
policy/updates | updates | optimizer steps taken in this step
policy/skipped_updates | updates | optimizer steps left out, their loss or gradient was not finite
policy/version | updates | updates since the run began, with those that were skipped
moe/load_balance_loss | 1 | experts x sum of route share x probability, 1 if even; mean of layers
moe/max_expert_load | 1 | most routes to one expert over the even share; worst layer
critic/explained_variance | 1 | share of the returns' variance over tokens that the values foretold
critic/value/mean | reward | value of the states before response tokens, before the update
critic/return/mean | reward | targets of those values: advantages plus values
critic/clip_fraction | 1 | tokens whose value moved too far in the step to be moved further
critic/grad_norm | 1 | global L2 norm of the critic's gradient before clipping; largest of the step
critic/lr | 1 | critic's learning rate of the step's last update
critic/updates | updates | the critic's optimizer steps taken in this step
critic/skipped_updates | updates | the critic's steps left out, loss or gradient was not finite
rollout/truncated_fraction | 1 | responses ended by the length limit
rollout/empty_fraction | 1 | responses without a token
rollout/repetition_fraction | 1 | responses whose last 512 tokens repeat, in periods of at most 128
rollout/draft_acceptance_fraction | 1 | drafted tokens that the model took (SGLang, speculation)
rollout/aborted_requests | requests | generation requests cut off when the engine was drained
rollout/retried_requests | requests | responses that were cut off and asked for again
rollout/interrupted_responses | responses | ended at a token on request, and were continued later
rollout/aborted_responses | responses | lost their tokens to new weights (on_update=abort)
rollout/aborted_tokens | tokens | that they lost; they began again
rollout/open_prompts | prompts | begun, and continued in the next phase (rollout.oversample)
rollout/interrupted_tokens | tokens | of them at that moment: they are prefilled again
rollout/staleness_steps/mean | steps | between the weights that sampled a token and its update
rollout/staleness_steps/max | steps | the most of all tokens
rollout/staleness_fraction/{steps} | 1 | tokens that were so many steps old: a histogram
rollout/open_groups | groups | sampled for later steps, when a batch was taken
rollout/waiting_groups | groups | of them, complete
rollout/lost_engines | engines | servers' engines that died or failed a request
rollout/replaced_engines | engines | new processes that serve in place of lost engines
rollout/repeated_requests | requests | responses sampled again, as their engine was lost
rollout/router_restarts | restarts | routers that died and were started again
rollout/routed_requests | requests | requests that the router passed to SGLang; one a response
rollout/unanswered_routed_requests | requests | of those, without an answer of status 200
rollout/prefix_cache_hit_fraction | 1 | prompt tokens that an engine had in its cache, of all sent
rollout/slot_occupancy | 1 | busy share of the engine's decoding slots
rollout/decode_steps | steps | forward passes of the engine that sampled a token for each busy slot
length/prompt_tokens/mean | tokens | prompt length
length/prompt_tokens/max | tokens | longest prompt
length/response_tokens/mean | tokens | response length
length/response_tokens/max | tokens | longest response
length/response_tokens/min | tokens | shortest response
time/step_s | s | the full step
time/generate_s | s | remote call that syncs weights and samples
time/sample_s | s | sampling alone, slowest rank
time/wait_for_groups_s | s | the trainer waits for a batch of responses (trainer.max_staleness)
time/engines_idle_s | s | since the last batch: no engine had a request (trainer.max_staleness)
time/update_engines_s | s | engines get no new request: they end or stop, and load new weights
time/routed_request_s | s | mean time of a request to the router, repeats included
time/replace_engine_s | s | from the loss of an engine to its replacement serving; the longest
time/reward_s | s | scoring the responses, beyond the time in which others were sampled
time/advantage_s | s | rewards to advantages, on the driver
time/logprobs_s | s | remote calls for old and reference log-probs, and with ppo for values
time/update_s | s | remote calls that take the optimizer steps, the critic's too
time/critic_values_s | s | computing values on the critic's ranks
time/critic_update_s | s | the critic's optimizer steps on its ranks
time/eval_s | s | evaluation
time/start_s | s | engines give their memory back once, at the start of the run
time/skew_s | s | ranks that have sampled wait for the last one
time/pause_s | s | engines admit no new request
time/drain_s | s | waiting for requests in flight
time/roll_back_s | s | after a failed drain: engines serve again
time/release_s | s | engines give all their memory back
time/release_cache_s | s | engines give KV cache and graphs back
time/onload_training_s | s | training state comes back to the device
time/offload_optimizer_s | s | optimizer state and gradients leave the device
time/resume_weights_s | s | engines allocate their weights again
time/sync_s | s | weights travel from trainer to engines
time/offload_parameters_s | s | training parameters leave the device
time/resume_cache_s | s | engines allocate KV cache and graphs again
time/continue_s | s | engines serve again
time/checkpoint_s | s | the step waits: ranks copy their state to the host, a former save ends
time/unwind_s | s | after a failed wake-up: engines release their memory again
time/server_start_s | s | a rollout server started, until it answered
time/restart_s | s | a broken engine is restarted
memory/{stage}_peak_bytes/max | bytes | peak in a stage, or in build, generate, values, update ...
memory/released_bytes | bytes | released by engines; on CUDA the rise of free memory
memory/unseen_release_bytes | bytes | on CUDA: reported as released, without a rise of free memory
memory/left_allocated_bytes/max | bytes | on CUDA: torch's own once training state has left
memory/unreclaimed_bytes | bytes | on CUDA: neither free nor torch's while the engine sleeps
memory/noop_releases | releases | releases that an engine answered without freeing memory
memory/synced_bytes | bytes | weights sent from trainer to engines
memory/weight_backup_bytes | bytes | weights copied to host memory because no sync rewrites them
memory/checkpoint_bytes | bytes | size of the checkpoint that was finished in this step
memory/weight_backup_saved_bytes | bytes | further bytes that a copy of all weights would have taken
throughput/tokens_per_s | tokens/s | prompt and response tokens of the step over its duration
throughput/response_tokens_per_s | tokens/s | response tokens over generate; sampled ahead: the step
throughput/tokens_per_device_s | tokens/s | the first, over the devices of all ranks and servers
throughput/longest_response_tokens_per_s | tokens/s | the longest response over the time of generate
throughput/longest_sampled_tokens_per_s | tokens/s | the same over the time of sampling alone
throughput/train_tokens_per_s | tokens/s | trained tokens over the time of update
data/epoch | epochs | passes over the prompts, with fraction
data/prompts | prompts | prompts drawn since the run began
data/train_tokens | tokens | tokens through the forward pass of the update, prompts included
data/loss_tokens | tokens | tokens that carry loss
data/microbatches | passes | forward and backward passes of all ranks
eval/reward/mean | reward | mean over the held-out responses; with several sets the mean of theirs
eval/reward/{source} | reward | the same over one data source
eval/length/response_tokens/mean | tokens | response length on held-out prompts
eval/length/response_tokens/median | tokens | half of the held-out responses are no longer
eval/length/response_tokens/min | tokens | shortest response to a held-out prompt
eval/length/response_tokens/max | tokens | longest response to a held-out prompt
eval/pass_at_{k} | 1 | probability that one of k responses is correct, unbiased estimate
eval/majority_at_{k} | 1 | groups of k responses whose most frequent answer is correct
eval/truncated_fraction | 1 | held-out responses ended by the length limit
eval/repetition_fraction | 1 | held-out responses that end in a loop
eval/zero_variance_group_fraction | 1 | held-out prompts whose responses all got one reward
eval/preference_loss | 1 | loss per held-out preference pair
eval/accuracy | 1 | held-out pairs whose chosen answer has the higher reward; equal ones half
eval/margin | reward | reward of the chosen less that of the rejected answer, held-out pairs
eval/chosen_reward | reward | of the chosen answer of held-out pairs
eval/rejected_reward | reward | of the rejected answer of held-out pairs
eval/loss_nats | nats | negative log-likelihood per token on held-out rows, supervised fine-tuning
"""


_ROWS = (line.split(" | ") for line in _TABLE.strip().splitlines())
DECLARATIONS = {name: Declaration(name, unit, meaning) for name, unit, meaning in _ROWS}
"""Every metric by name, in the order in which people read them."""

_PATTERNS = {
    name: re.compile(re.sub(r"{\w+}", r"[^/]+", name)) for name in DECLARATIONS if "{" in name
}


_OF_SET = re.compile(r"eval/(?!reward/|length/|agent/)[^/]+/")
_INTERVAL = re.compile(r"/(low|high)$")


def find_declaration(name: str) -> Declaration | None:
    """Return the declaration of a metric; a word in braces in the table stands for any word.

    A metric of a named evaluation set, and an end of an interval, have that of the metric itself;
    ``eval/agent/...`` has that of ``agent/...``.
    """
    if name.startswith("eval/"):
        name = _OF_SET.sub("eval/", _INTERVAL.sub("", name))
        name = name.removeprefix("eval/") if name.startswith("eval/agent/") else name
    if name in DECLARATIONS:
        return DECLARATIONS[name]
    matching = (wildcard for wildcard, pattern in _PATTERNS.items() if pattern.fullmatch(name))
    return next((DECLARATIONS[wildcard] for wildcard in matching), None)


def check_declared(names: Iterable[str]) -> None:
    """Reject a name that is not in the table."""
    for name in names:
        if find_declaration(name) is None:
            raise MetricError(
                f"metric {name!r} is not declared; {suggest_name(name, list(DECLARATIONS))} "
                "Declare a new one in hybridrl/metrics.py"
            )


def to_markdown() -> str:
    """Write the table as ``docs/metrics.md`` holds it."""
    lines = [
        "# Metrics",
        "",
        "Written by `python -m hybridrl.metrics > docs/metrics.md`; change the table there.",
        "",
        "A metric is logged only in steps that computed it. Seconds are the slowest rank's; bytes",
        "and counts are totals over all ranks; means are weighted by their number of samples.",
        "The cost of sampling is counted from one update to the next, with evaluations in between.",
        "With `eval.sets`, metrics of a set have its name after `eval/`: `eval/gsm8k/reward/mean`.",
        "`/low` and `/high` after one are the ends of its 95 % interval by bootstrap over prompts.",
        "Conversations of an evaluation have `eval/agent/...`, with the words of `agent/...`.",
    ]
    for area, rows in groupby(DECLARATIONS.values(), lambda row: row.name.partition("/")[0]):
        lines += ["", f"## {area}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.unit} | {row.meaning} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
