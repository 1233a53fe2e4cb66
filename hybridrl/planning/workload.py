"""How many tokens pass through the models at once: with the longest rows, or as in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridrl.config.experiment import ExperimentConfig

_PREFILL_TOKENS = 4096
"""Tokens of one prefill pass of the embedded engine, with padding (rollout/embedded/prefill.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One rank's share of a step. All rows are assumed equally long."""

    num_rows: int
    """Responses that the rank scores and trains on in a step."""

    num_rows_per_update: int
    """Those of them that belong to one optimizer step."""

    group_size: int
    """Responses to one prompt among the rows of an update: they may share the prompt's pass."""

    num_prompt_tokens: int
    num_response_tokens: int

    max_tokens_per_microbatch: int

    microbatch_tokens: int | None = None
    """Measured packed tokens of a micro-batch; None: as many as the budget and the rows allow."""

    @classmethod
    def longest(cls, config: ExperimentConfig) -> Workload:
        """Assume that every prompt and every response has the greatest length allowed."""
        num_ranks, minibatches = config.num_train_groups, config.algorithm.num_minibatches
        return cls(
            **_rows(config, num_ranks, minibatches),
            num_prompt_tokens=config.data.max_prompt_tokens,
            num_response_tokens=config.rollout.max_response_tokens,
            max_tokens_per_microbatch=config.actor.max_tokens_per_microbatch,
        )

    def of_critic(self, config: ExperimentConfig) -> Workload:
        """Return the critic's workload, with rows of the policy's lengths."""
        return replace(
            self,
            **_rows(config, config.num_critic_groups, config.critic.num_minibatches),
            max_tokens_per_microbatch=config.critic.max_tokens_per_microbatch,
            microbatch_tokens=None,
        )

    def sampling(self, config: ExperimentConfig) -> Workload:
        """Return the workload of one rank's rollout engine, with rows of these lengths."""
        return replace(self, **_rows(config, config.cluster.num_ranks, 1))

    def scoring(self) -> Workload:
        """Return the workload of a pass without gradients: the rows of all updates."""
        return replace(self, num_rows_per_update=self.num_rows, microbatch_tokens=None)

    def measured(
        self, *, prompt_tokens: float, response_tokens: float, microbatch_tokens: float
    ) -> Workload:
        """Return the same rows with the lengths of a step, all in tokens."""
        return replace(
            self,
            num_prompt_tokens=max(1, round(prompt_tokens)),
            num_response_tokens=max(1, round(response_tokens)),
            microbatch_tokens=max(1, round(microbatch_tokens)),
        )

    @property
    def num_row_tokens(self) -> int:
        """Tokens of a row."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of one pass of the embedded engine."""
        return max(self.num_prompt_tokens, min(_PREFILL_TOKENS, self.all_prompt_tokens))

    @property
    def all_prompt_tokens(self) -> int:
        """Tokens of the rank's distinct prompts."""
        return -(-self.num_rows // self.group_size) * self.num_prompt_tokens

    def microbatch(self, *, shares_prompts: bool) -> Microbatch:
        """Return the largest micro-batch of an update.

        Args:
            shares_prompts: responses to one prompt compute it once (workers/train/microbatcher.py).
        """
        group_size = self.group_size if shares_prompts else 1
        # The last token of a row is not computed: it predicts nothing.
        tail = self.num_response_tokens - 1
        if group_size == 1:
            prompt, tail = 0, tail + self.num_prompt_tokens
        else:
            prompt = self.num_prompt_tokens
        per_group = prompt + group_size * tail
        num_groups = self.num_rows_per_update / group_size
        num_microbatches = max(1, -(-per_group * num_groups // self.max_tokens_per_microbatch))
        num_tokens = self.microbatch_tokens or per_group * num_groups / num_microbatches
        num_tokens = max(num_tokens, prompt + tail)  # a single longer row runs alone
        num_groups = num_tokens / per_group
        num_rows = num_groups * group_size
        return Microbatch(
            num_tokens=round(num_tokens),
            num_scored=round(num_rows * self.num_response_tokens),
            num_key_slots=round(num_groups * prompt + num_rows * (prompt + tail)),
            num_mask_elements=round(num_rows * tail * (prompt + tail)) if prompt else 0,
            num_microbatches=round(num_microbatches),
        )


def _rows(config: ExperimentConfig, num_ranks: int, num_minibatches: int) -> dict[str, int]:
    """Return a rank's rows. A rank has a few rows of nearly every prompt (balance_over_ranks)."""
    num_rows = max(1, config.num_rows_per_step // num_ranks)
    return {
        "num_rows": num_rows,
        "num_rows_per_update": max(1, num_rows // num_minibatches),
        "group_size": max(1, config.rollout.num_responses_per_prompt // num_ranks),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Rows laid end to end that one forward and one backward pass compute."""

    num_tokens: int
    """Packed tokens T."""

    num_scored: int
    """Response tokens S whose log-probs are wanted."""

    num_key_slots: int
    """Keys that the padded kernel lays out; a shared prompt's keys once per response."""

    num_mask_elements: int
    """Elements of the visibility masks of rows that share a prompt."""

    num_microbatches: int
    """How many micro-batches the update has."""

    @property
    def is_only_one(self) -> bool:
        """Whether the update has no other micro-batch."""
        return self.num_microbatches == 1
