"""The prompt of a teacher that sees more of a row than the policy does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridrl.data.prompts import TokenizedRow, render
from hybridrl.data.rows import Row
from hybridrl.data.tokenizing import RowEncoder


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
        chat, own = row.prompt, json.loads(row.own) if row.own else {}

        def informed(prompt: str) -> str:
            return self.template.format_map({**own, "prompt": prompt, "answer": row.answer})

        if isinstance(chat, str):
            return replace(row, prompt=informed(chat))
        last = replace(chat[-1], content=informed(chat[-1].content))
        return replace(row, prompt=(*chat[:-1], last))
