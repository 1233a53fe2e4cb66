"""Rewards of rollouts: token ids become text, and the scorer sees it with the row's answer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RolloutBatch, response_lengths, row_sums
from hybridrl.data.source import PromptStep
from hybridrl.data.tokenizer import decode_responses
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer, Scores
from hybridrl.trainer.reward_models import ModelScores


@dataclass(frozen=True, slots=True)
class TextReward:
    """Decodes responses and scores their text."""

    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase

    models: ModelScores | None = None
    """Has reward models score, if there are any."""

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score B rows, the responses to a prompt adjacent."""
        num_responses = len(rollouts) // len(task.rows)
        rows = [row for row in task.rows for _ in range(num_responses)]
        inputs = RewardInputs(
            responses=decode_responses(rollouts, self.tokenizer),
            answers=[row.row.answer for row in rows],
            prompts=[row.prompt_text for row in rows],
            sources=[row.row.source for row in rows],
            lengths=response_lengths(rollouts.response_mask_BL).tolist(),
        )
        scores = {} if self.models is None else self.models(rows, inputs.responses)
        rewards_BL = rollouts.agent_rewards_BL
        agent_rewards = (
            [0.0] * len(rollouts) if rewards_BL is None else row_sums(rewards_BL).tolist()
        )
        return self.scorer.score(inputs, model_scores=scores, agent_rewards=agent_rewards)
