"""Prompts with their answers as tokens: for supervised fine-tuning, and pairs of answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import PreferenceBatch, SupervisedBatch, jagged
from hybridrl.data.images import num_repeats
from hybridrl.data.prompts import Overlong, TokenizedRow, render_chat, tokenize_answers
from hybridrl.data.source import images_column
from hybridrl.errors import DataError

log = logging.getLogger(__name__)


def build_supervised_batch(
    rows: Sequence[TokenizedRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    learns_all_turns: bool = False,
) -> SupervisedBatch:
    """Put B >= 1 rows, as `lay_out` returns them, into a batch, and begin to load their images."""
    laid_out = lay_out(rows, tokenizer, learns_all_turns=learns_all_turns)
    tokens, masks = zip(*laid_out, strict=True)
    return SupervisedBatch(
        token_ids_BL=jagged(tokens),
        response_mask_BL=jagged(masks),
        images_B=images_column(rows),
        batch_size=[len(rows)],
    )


def lay_out(
    rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase, *, learns_all_turns: bool
) -> list[tuple[Tensor, Tensor]]:
    """Lay prompt, answer and end-of-sequence token of each row end to end; tokens, and their mask.

    The loss is taken on the answer and on the end-of-sequence token; with ``learns_all_turns`` also
    on the assistant's turns in the prompts: see `assistant_mask`, whose errors it raises.
    """
    answers = tokenize_answers([row.row.answer for row in rows], tokenizer)
    laid_out = []
    for row, answer in zip(rows, answers, strict=True):
        target = torch.tensor(answer)
        in_prompt = torch.zeros(len(row.token_ids), dtype=torch.bool)
        if learns_all_turns:
            in_prompt = assistant_mask(row, tokenizer)
        mask = torch.cat([in_prompt, torch.ones(len(target), dtype=torch.bool)])
        laid_out.append((torch.cat([row.token_ids, target]), mask))
    return laid_out


def assistant_mask(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Mark the tokens that the assistant wrote, with the end-of-sequence token of each turn.

    A turn is the text that the chat template adds for its message, up to that token. The tokens are
    those of the full prompt, which may have lost its first ones: nothing is tokenized apart.
    bool [L]; all False for a prompt that is text.

    Raises:
        DataError: the template renders an earlier turn differently once others follow, as some do
            that remove thoughts; or the tokenizer does not say where its tokens are in the text.
    """
    spans = list(_turn_spans(row, tokenizer))
    if not spans:
        return torch.zeros(len(row.token_ids), dtype=torch.bool)
    if not tokenizer.is_fast:
        raise DataError(
            f"{row.row.origin}: this tokenizer does not say where its tokens are in the text; put "
            "tokenizer.json into the model folder, or set sft.turns=last"
        )
    encoded = tokenizer(row.prompt_text, add_special_tokens=False, return_offsets_mapping=True)
    images = row.images or ()
    placeholder = images[0].placeholder if images else None
    num_times = num_repeats(encoded["input_ids"], images, placeholder)
    is_learned = [
        any(begin <= first < last <= end for begin, end in spans)
        for (first, last), num in zip(encoded["offset_mapping"], num_times, strict=True)
        for _ in range(num)
    ]
    return torch.tensor(is_learned[len(is_learned) - len(row.token_ids) :])


def _turn_spans(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each turn in the text of the prompt."""
    messages = () if isinstance(row.row.prompt, str) else row.row.prompt
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        render = partial(
            render_chat, tokenizer=tokenizer, origin=row.row.origin, has_images=bool(row.row.images)
        )
        before = render(messages[:index])
        after = render(messages[: index + 1], is_complete=True)
        if not (after.startswith(before) and row.prompt_text.startswith(after)):
            raise DataError(
                f"{row.row.origin}: the chat template renders message {index + 1} of the prompt "
                "differently once others follow, so its tokens cannot be learned there; set "
                "sft.turns=last, or correct the template"
            )
        end = after.rfind(tokenizer.eos_token, len(before))
        yield len(before), len(after) if end < 0 else end + len(tokenizer.eos_token)


@dataclass(frozen=True, slots=True)
class PreferencePair(TokenizedRow):
    """A row with the tokens of its prompt and of both answers."""

    chosen_ids: Tensor  # int64 [L], the answer and the end-of-sequence token
    rejected_ids: Tensor  # int64 [L], likewise


def tokenize_pairs(
    rows: Sequence[TokenizedRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_answer_tokens: int,
    drops_overlong: bool,
) -> list[PreferencePair]:
    """Tokenize both answers of every pair now, so that a bad one ends the run before it began.

    Args:
        max_answer_tokens: the longest answer, with its end-of-sequence token.
        drops_overlong: leave pairs with a longer answer out, instead of raising.

    Raises:
        DataError: the answers of a pair have the same tokens; one is overlong and not dropped, or
            all pairs were dropped; a row has no rejected answer.
    """
    if missing := [row.row.origin for row in rows if row.row.rejected is None]:
        raise DataError(f"{missing[0]} has no rejected answer; set data.rejected_key=COLUMN")
    chosen = tokenize_answers([row.row.answer for row in rows], tokenizer)
    rejected = tokenize_answers([str(row.row.rejected) for row in rows], tokenizer)
    pairs = [
        PreferencePair(
            row.row, row.prompt_text, row.token_ids, *map(torch.tensor, answers), images=row.images
        )
        for row, *answers in zip(rows, chosen, rejected, strict=True)
    ]
    for pair in pairs:
        if torch.equal(pair.chosen_ids, pair.rejected_ids):
            raise DataError(
                f"{pair.row.origin}: chosen and rejected answer have the same tokens; remove the "
                "row"
            )
    kept, overlong = [], Overlong()
    for pair in pairs:
        longest = max(len(pair.chosen_ids), len(pair.rejected_ids))
        if longest > max_answer_tokens:
            overlong.add(pair.row.origin, longest)
        else:
            kept.append(pair)
    if overlong.count and not (drops_overlong and kept):
        text = overlong.name("answers", "rollout.max_response_tokens", max_answer_tokens)
        raise DataError(f"{text} to leave such pairs out")
    if overlong.count:
        log.warning(
            "dropped pairs with overlong answers: count=%d of=%d", overlong.count, len(pairs)
        )
    return kept


def build_preference_batch(pairs: Sequence[PreferencePair]) -> PreferenceBatch:
    """Lay prompt and answer end to end, in 2 P rows, with the chosen before the rejected answer.

    The mask is on the answer and on the end-of-sequence token.
    """
    rows = [
        (pair.token_ids, answer)
        for pair in pairs
        for answer in (pair.chosen_ids, pair.rejected_ids)
    ]
    return PreferenceBatch(
        token_ids_BL=jagged([torch.cat(row) for row in rows]),
        response_mask_BL=jagged([torch.arange(len(p) + len(a)) >= len(p) for p, a in rows]),
        images_B=images_column([pair for pair in pairs for _ in range(2)]),
        batch_size=[len(rows)],
    )
