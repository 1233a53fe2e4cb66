"""Faults of rows that training would not report: they only teach less, or measure wrongly.

No check needs a model, a GPU or Ray.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from hybridrl.data.prompts import TokenizedRow, tokenize_answers

_BARS = 8
_BAR_WIDTH = 40
_MAX_CHARS = 60


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of one check over some rows."""

    fault: str  # in words, as a plural: "prompts that are ..."
    num_rows: int  # rows that were looked at
    examples: Sequence[str]  # one line for each row with the fault: its origin and the details
    is_problem: bool = True  # False for a fault that may be wanted

    @property
    def is_bad(self) -> bool:
        """Whether rows have a fault that should be corrected."""
        return self.is_problem and bool(self.examples)


def find_duplicates(rows: Sequence[TokenizedRow]) -> Iterator[Examination]:
    """Find prompts that stand in several rows, with the same answer or with different ones."""
    by_prompt: dict[object, list[TokenizedRow]] = defaultdict(list)
    for row in rows:
        by_prompt[_key(row)].append(row)
    repeated = [group for group in by_prompt.values() if len(group) > 1]
    alike: list[str] = []
    different: list[str] = []
    for group in repeated:
        answers = {row.row.answer.strip() for row in group}
        line = f"{group[0].row.origin} and {group[1].row.origin}: {_short(group[0].prompt_text)}"
        (alike if len(answers) == 1 else different).append(line)
    yield Examination("prompts that stand twice", len(rows), alike, is_problem=False)
    yield Examination("prompts with two different answers", len(rows), different)


def both_answers(rows: Iterable[TokenizedRow]) -> list[TokenizedRow]:
    """Return the rows, each preference pair as two: with its chosen and its rejected answer."""
    return [
        replace(row, row=replace(row.row, answer=answer, rejected=None))
        for row in rows
        for answer in (row.row.answer, row.row.rejected)
        if answer is not None
    ]


def find_contradictions(rows: Sequence[TokenizedRow]) -> Examination:
    """Find preference pairs that another pair has the other way round."""
    preferred = {(_key(row), row.row.answer, row.row.rejected): row for row in rows}
    lines = []
    for row in rows:
        other = preferred.get((_key(row), row.row.rejected or "", row.row.answer))
        if other is not None and other.row.origin < row.row.origin:
            lines.append(f"{other.row.origin} and {row.row.origin}: {_short(row.prompt_text)}")
    return Examination("pairs that stand twice, the other way round", len(rows), lines)


def find_overlap(
    train: Sequence[TokenizedRow], held_out: Mapping[str, Sequence[TokenizedRow]]
) -> Iterator[Examination]:
    """Find held-out prompts that are also learned from, up to white space and upper case."""
    learned = {_key(row): row for row in train}
    for name, rows in held_out.items():
        both = [
            f"{row.row.origin} is {learned[_key(row)].row.origin}: {_short(row.prompt_text)}"
            for row in rows
            if _key(row) in learned
        ]
        label = f" of {name}" if name else ""
        yield Examination(f"held-out prompts{label} that are also learned from", len(rows), both)


def find_unlike_decoded(
    rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase
) -> Examination:
    """Find rows whose tokens, prompt and answer, decode to another text."""
    unlike = []
    answers = tokenize_answers([row.row.answer for row in rows], tokenizer)
    for row, answer in zip(rows, answers, strict=True):
        text = _expanded_text(row, tokenizer) + row.row.answer
        decoded = str(tokenizer.decode([*row.token_ids.tolist(), *answer[:-1]]))
        # A tokenizer that adds a token of its own in front (as <s>) changes no text.
        if not decoded.endswith(text):
            pairs = enumerate(zip(text, decoded, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(text), len(decoded)))
            unlike.append(f"{row.row.origin}: {_short(text[at:])} becomes {_short(decoded[at:])}")
    return Examination("rows whose tokens decode to another text", len(rows), unlike)


def find_overlong_prompts(
    rows: Sequence[TokenizedRow], *, limit: int, is_problem: bool
) -> Examination:
    """Find prompts beyond their limit."""
    prompts = [
        f"{row.row.origin}: {len(row.token_ids)} tokens"
        for row in rows
        if len(row.token_ids) > limit
    ]
    fault = f"prompts longer than data.max_prompt_tokens={limit}"
    return Examination(fault, len(rows), prompts, is_problem=is_problem)


def find_overlong_answers(
    rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase, *, key: str, limit: int
) -> Examination:
    """Find reference answers beyond the limit of a key.

    An answer that does not fit, with its end-of-sequence token, cannot be given by the model.
    """
    lengths = answer_lengths(rows, tokenizer)
    answers = [
        f"{row.row.origin}: {length} tokens"
        for row, length in zip(rows, lengths, strict=True)
        if length > limit
    ]
    return Examination(f"answers longer than {key}={limit}", len(rows), answers)


def describe_lengths(name: str, lengths: Sequence[int], *, limit: int) -> list[str]:
    """Return statistics of lengths, in tokens, and a histogram of a few bars."""
    ordered = sorted(lengths)
    median, p95 = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.95))
    lines = [
        f"{name}: {ordered[0]} to {ordered[-1]} tokens, median {median}, 95 % at most {p95}, "
        f"limit {limit}"
    ]
    width = max(1, -(-(ordered[-1] - ordered[0] + 1) // _BARS))
    counts = [0] * -(-(ordered[-1] - ordered[0] + 1) // width)
    for length in ordered:
        counts[(length - ordered[0]) // width] += 1
    for index, count in enumerate(counts):
        begin = ordered[0] + index * width
        bar = "#" * round(_BAR_WIDTH * count / max(counts))
        lines.append(f"  {begin:>6} - {begin + width - 1:<6} {bar:<{_BAR_WIDTH}} {count}")
    return lines


def answer_lengths(rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each reference answer, with its end-of-sequence token."""
    return [len(answer) for answer in tokenize_answers([row.row.answer for row in rows], tokenizer)]


def _key(row: TokenizedRow) -> tuple[str, tuple[str, ...]]:
    return " ".join(row.prompt_text.split()).lower(), row.row.images


def _expanded_text(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt, the placeholder of each image as often as it stands in the tokens."""
    if not row.images:
        return row.prompt_text
    placeholder = str(tokenizer.convert_ids_to_tokens(row.images[0].placeholder))
    first, *others = row.prompt_text.split(placeholder)
    pairs = zip(row.images, others, strict=True)
    return first + "".join(placeholder * image.num_tokens + other for image, other in pairs)


def _short(text: str) -> str:
    return repr(text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "...")
