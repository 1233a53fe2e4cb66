"""Samples of the policy's text: one response for each of the first prompts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.trajectory import ASSISTANT, FAILURE, turns_of
from hybridrl.batch import RolloutBatch, row_offsets
from hybridrl.data.pixels import thumbnail
from hybridrl.data.source import PromptStep
from hybridrl.data.tokenizer import decode_responses
from hybridrl.rewards.scorer import Scores
from hybridrl.run.run_folder import SampleRow, SampleTurn
from hybridrl.trainer.evaluate import EvalReport

_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class SampleTaker:
    """Takes the first response to each of the first prompts of a rollout."""

    tokenizer: PreTrainedTokenizerBase
    num_samples: int
    split: Literal["train", "eval"]
    _texts: dict[int, str] = field(default_factory=dict)

    def take_report(self, report: EvalReport) -> list[SampleRow]:
        """Return one sample per prompt of an evaluation set."""
        samples = self.take(report.task.task, report.rollouts, report.scores)
        return [replace(sample, eval_set=report.task.settings.name) for sample in samples]

    def take(self, task: PromptStep, rollouts: RolloutBatch, scores: Scores) -> list[SampleRow]:
        """Return one sample per prompt, at most ``num_samples``.

        Of P prompts there are P * G rows, the responses to the same one adjacent.
        """
        num_responses = len(rollouts) // len(task.rows)
        rows = [prompt * num_responses for prompt in range(min(self.num_samples, len(task.rows)))]
        if not rows:
            return []
        texts = decode_responses(rollouts[rows], self.tokenizer)
        samples = []
        for row, text, prompt in zip(rows, texts, task.rows, strict=False):
            tokens, logprobs = self._tokens_of(rollouts, row)
            images = () if rollouts.images_B is None else rollouts.images_B[row]
            samples.append(
                SampleRow(
                    prompt=prompt.prompt_text,
                    response=text,
                    answer=prompt.row.answer,
                    reward=float(scores.rewards_B[row]),
                    is_truncated=bool(rollouts.is_truncated_B[row]),
                    split=self.split,
                    tokens=tokens,
                    logprobs=logprobs,
                    turns=self._turns_of(rollouts, row),
                    images=tuple(thumbnail(image.fetch()) for image in images),
                )
            )
        return samples

    def _tokens_of(
        self, rollouts: RolloutBatch, row: int
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Return the first response tokens of a row as text, and their log-probs."""
        begin, end = row_offsets(rollouts.token_ids_BL)[row : row + 2].tolist()
        mask_L = rollouts.response_mask_BL.values()[begin:end]
        token_ids, logprobs = (
            column_BL.values()[begin:end][mask_L][:_MAX_TOKENS].tolist()
            for column_BL in (rollouts.token_ids_BL, rollouts.sampler_logprobs_BL)
        )
        return (
            tuple(self._text_of(token_id) for token_id in token_ids),
            tuple(round(logprob, 3) for logprob in logprobs),
        )

    def _turns_of(self, rollouts: RolloutBatch, row: int) -> tuple[SampleTurn, ...]:
        """Return the turns behind the prompt; none of a row with a single one."""
        tokens_T, placed = rollouts.token_ids_BL.values(), list(turns_of(rollouts, row))
        rewards = [0.0] * len(placed)
        if rollouts.agent_rewards_BL is not None:
            rewards_T = rollouts.agent_rewards_BL.values()
            rewards = [float(rewards_T[at.start : at.stop].sum()) for _, at in placed]
        gave_rewards = any(rewards)
        turns = tuple(
            SampleTurn(
                turn.role,
                turn.messages[0].content  # a reason, which no token has
                if turn.role == FAILURE
                else self.tokenizer.decode(tokens_T[at.start : at.stop].tolist()),
                turn.num_tokens,
                turn.calls,
                reward if turn.role == ASSISTANT and gave_rewards else None,
            )
            for (turn, at), reward in zip(placed, rewards, strict=True)
        )
        return turns if len(turns) > 1 else ()

    def _text_of(self, token_id: int) -> str:
        """Decode one token; an incomplete character shows as its replacement sign."""
        if token_id not in self._texts:
            self._texts[token_id] = self.tokenizer.decode([token_id])
        return self._texts[token_id]
