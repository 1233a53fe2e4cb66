"""A look at what the policy writes: one response for each of the first prompts."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybridrl.data.tokenizer import decode_responses
from hybridrl.trainer.report import StepReport
from hybridrl.trainer.tracking import Sample


def take_samples(
    report: StepReport, tokenizer: PreTrainedTokenizerBase, *, num_samples: int
) -> list[Sample]:
    """Return the first response to each of the step's first ``num_samples`` prompts."""
    num_prompts = len(report.task.rows)
    num_responses = len(report.rollouts) // num_prompts
    rows = [prompt * num_responses for prompt in range(min(num_samples, num_prompts))]
    if not rows:
        return []
    texts = decode_responses(report.rollouts[rows], tokenizer)
    return [
        Sample(
            prompt=task.prompt_text,
            response=text,
            answer=task.row.answer,
            reward=float(report.scores.rewards_B[row]),
            is_truncated=bool(report.rollouts.is_truncated_B[row]),
        )
        for row, text, task in zip(rows, texts, report.task.rows, strict=False)
    ]
