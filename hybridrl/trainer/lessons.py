"""Teachers of rows, and the prompts that these read. Legend: B rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.data.prompts import TokenizedRow, render
from hybridrl.data.rows import Row
from hybridrl.data.tokenizing import RowEncoder
from hybridrl.errors import DataError

_NOBODY = -1  # in place of the number of a teacher


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """Writes prompts from ``algorithm.teacher_prompt``, in all else as the policy's."""

    template: str
    encoder: RowEncoder  # of the policy's prompts

    def __call__(self, rows: Sequence[TokenizedRow]) -> list[Tensor]:
        """Return the tokens of each row's prompt, int64; DataError as of the policy's."""
        rendered = render(
            [self._informed(each.row) for each in rows],
            self.encoder.tokenizer,
            use_chat_template=self.encoder.use_chat_template,
            tools=self.encoder.tools,
        )
        return [torch.tensor(token_ids) for _, token_ids in rendered]

    def _informed(self, row: Row) -> Row:
        """Put the template's text in place of the prompt, or of its last message."""
        chat, own = row.prompt, row.columns

        def informed(prompt: str) -> str:
            return self.template.format_map({**own, "prompt": prompt, "answer": row.answer})

        if isinstance(chat, str):
            return replace(row, prompt=informed(chat))
        last = replace(chat[-1], content=informed(chat[-1].content))
        return replace(row, prompt=(*chat[:-1], last))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons:
    """The teacher of each row, and what it reads."""

    # of the teacher, by source of the row; of an empty one: of all others
    numbers: Mapping[str, int]
    # whether anything of a source's rows is compared with a teacher
    needs_teacher: Callable[[str], bool]
    # tokens of the teacher's prompt to each row; None: the policy's
    prompts_of: Callable[[Sequence[TokenizedRow]], list[Tensor]] | None

    def columns(self, rows: Sequence[TokenizedRow]) -> Mapping[str, Tensor]:
        """Return columns of ``PromptBatch`` by name; DataError for a row that has no teacher."""
        columns = {"teacher_P": torch.tensor([self._number_of(row) for row in rows])}
        if self.prompts_of is not None:
            columns["teacher_prompt_PN"] = jagged(self.prompts_of(rows))
        return columns

    def _number_of(self, row: TokenizedRow) -> int:
        if not self.needs_teacher(row.row.source):
            return _NOBODY
        number = self.numbers.get(row.row.source, self.numbers.get(""))
        if number is None:
            raise DataError(
                f"{row.row.origin}: a row of source {row.row.source!r}, for which "
                "algorithm.teacher_paths has no teacher; add it there, or set "
                "algorithm.teacher_path, which teaches all others"
            )
        return number


def with_lessons(rollouts: RolloutBatch, prompts: PromptBatch) -> RolloutBatch:
    """Give each row what teachers on ranks need, if there are any, from its prompt."""
    if prompts.teacher_P is None or rollouts.teacher_logprobs_BL is not None:
        return rollouts
    num_responses = len(rollouts) // len(prompts)
    rollouts.teacher_B = prompts.teacher_P.repeat_interleave(num_responses)
    if prompts.teacher_prompt_PN is not None:
        each = [p for p in prompts.teacher_prompt_PN.unbind() for _ in range(num_responses)]
        rollouts.teacher_prompt_BN = jagged(each)
        # Before anything is taken out of the mask: of rows, or of tokens.
        masks = rollouts.response_mask_BL.unbind()
        rollouts.prompt_tokens_B = torch.stack([mask_L.int().argmax() for mask_L in masks])
    return rollouts
