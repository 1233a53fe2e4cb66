"""Rewards of rollouts: token ids become text, and the scorer sees it with the row's answer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.turn_records import failure_of
from hybridrl.batch import RolloutBatch, row_sums
from hybridrl.data.source import PromptStep
from hybridrl.errors import AgentError
from hybridrl.rewards.scorer import RewardScorer, Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.early_rewards import EarlyRewards, reward_inputs
from hybridrl.trainer.judges import JudgeAnswers
from hybridrl.trainer.reward_models import ModelScores


@dataclass(frozen=True, slots=True)
class TextReward:
    """Decodes responses and scores their text."""

    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase

    models: ModelScores | None = None
    """Has reward models score, if there are any."""

    early: EarlyRewards | None = None
    """Scores responses while others are sampled."""

    judges: JudgeAnswers | None = None
    """Asks judges, if there are any."""

    max_failed_fraction: float = 1.0
    """Of conversations that broke off; see ``agent.max_failed_fraction``."""

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses to ``task`` in the block; they are to be sampled with what it gives."""
        return nullcontext(sampling) if self.early is None else self.early.scoring(task, sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score B rows, the responses to a prompt adjacent.

        Raises:
            AgentError: more conversations broke off than may.
            RewardError: see `RewardScorer.score`.
        """
        self._require_conversations(rollouts)
        num_responses = len(rollouts) // len(task.rows)
        rows = [row for row in task.rows for _ in range(num_responses)]
        inputs = reward_inputs(rollouts, rows, self.tokenizer)
        by_models = {} if self.models is None else self.models(rows, inputs.responses)
        early = None if self.early is None else self.early.take(inputs)
        by_token_BL = rollouts.agent_rewards_BL
        scores = self.scorer.score(
            inputs,
            model_scores=by_models,
            judge_answers={} if self.judges is None else self.judges(inputs),
            agent_rewards=[0.0] * len(rows)
            if by_token_BL is None
            else row_sums(by_token_BL).tolist(),
            early=early,
        )
        if rollouts.is_failed_B is None:
            return scores
        is_left_out_B = rollouts.is_failed_B
        if scores.is_left_out_B is not None:
            is_left_out_B = is_left_out_B | scores.is_left_out_B
        return replace(scores, is_left_out_B=is_left_out_B)

    def _require_conversations(self, rollouts: RolloutBatch) -> None:
        if rollouts.is_failed_B is None:
            return
        num_failed, limit = int(rollouts.is_failed_B.sum()), self.max_failed_fraction
        if num_failed > limit * len(rollouts):
            raise AgentError(
                f"{num_failed} of {len(rollouts)} conversations broke off, the last with: "
                f"{failure_of(rollouts)}; correct the tool, environment or program, or raise "
                f"agent.max_failed_fraction={limit:g}"
            )
