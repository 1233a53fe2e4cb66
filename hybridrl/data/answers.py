r"""The answer in the text of a response, normalised, so that equal answers can be counted.

The answer is the first of these that the response has: the content of its last ``\boxed{...}``;
the text after its last ``####`` or ``answer is`` or ``answer:``, to the end of the line; its last
line. White space, dollar signs, the full stop at the end and commas between digits do not count,
nor does upper case.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RolloutBatch
from hybridrl.data.tokenizer import decode_responses

_MARK = re.compile(r"(?:####|answer is|answer:)[ \t]*([^\n]+)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def extract_answer(response: str) -> str:
    """Return the normalised answer of a response; empty if it has none."""
    for candidate in (_last_boxed(response), _last_marked(response), _last_line(response)):
        if candidate:
            return candidate
    return ""


def response_answers(rollouts: RolloutBatch, *, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the normalised answers of B responses."""
    return [extract_answer(text) for text in decode_responses(rollouts, tokenizer)]


def _last_boxed(text: str) -> str:
    """Return the content of the last command that is closed, in one pass over the braces."""
    begins = {match.end() for match in _BOXED.finditer(text)}
    open_braces: list[int] = []
    last = (0, 0)
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.end())
        elif open_braces and (begin := open_braces.pop()) in begins:
            last = max(last, (begin, match.start()))
    return _normalise(text[slice(*last)])


def _last_marked(text: str) -> str:
    marked = _MARK.findall(text)
    return _normalise(marked[-1]) if marked else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return _normalise(lines[-1]) if lines else ""


def _normalise(answer: str) -> str:
    answer = " ".join(answer.replace("$", "").split()).removesuffix(".").strip()
    return _COMMA.sub("", answer).lower()
