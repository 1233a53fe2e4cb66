r"""Rows of published data sets, one function for each format. See ``data/prepare.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_LEVEL = re.compile(r"(\d+)\s*$")

HUB = {
    "gsm8k": "openai/gsm8k",
    "math": "EleutherAI/hendrycks_math",
    "dapo_math": "BytedTsinghua-SIA/DAPO-Math-17k",
}
"""Repositories on the Hugging Face Hub."""


class Unusable(ValueError):
    """A record in another format; the text says what it lacks."""


def convert_gsm8k(record: Mapping[str, object], instruction: str) -> dict[str, object]:
    """Take the number after ``####``, without commas between its digits."""
    _, mark, answer = _text(record, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise Unusable("its answer does not end in '#### NUMBER'")
    question = _text(record, "question")
    answer = answer.strip().replace(",", "")
    return {"prompt": _with(question, instruction), "answer": answer, "source": "gsm8k"}


def convert_math(record: Mapping[str, object], instruction: str) -> dict[str, object]:
    r"""Take the column ``answer``, or the last ``\boxed{}`` of the solution; levels are 1 to 5."""
    has_answer = record.get("answer") is not None
    answer = _text(record, "answer") if has_answer else last_boxed(_text(record, "solution"))
    row: dict[str, object] = {
        "prompt": _with(_text(record, "problem"), instruction),
        "answer": answer,
        "source": "math",
    }
    level = _LEVEL.search(str(record.get("level", "")))
    return row | ({"difficulty": int(level[1])} if level else {})


def convert_verl(record: Mapping[str, object], _: str) -> dict[str, object]:
    """Take prompt and ground truth as they stand: the prompt has its own instruction."""
    reward, messages = record["reward_model"], record["prompt"]
    if not isinstance(reward, Mapping) or not isinstance(messages, list):
        raise Unusable("reward_model must be a record, and prompt a list of messages")
    prompt = [{"role": _text(m, "role"), "content": _text(m, "content")} for m in messages]
    answer, source = str(reward["ground_truth"]), _text(record, "data_source")
    return {"prompt": prompt, "answer": answer, "source": source}


def last_boxed(solution: str) -> str:
    r"""Return the content of the last ``\boxed{...}``, or the character after ``\boxed ``.

    Raises:
        Unusable: there is none, or it is not closed.
    """
    matches = list(_BOX.finditer(solution))
    if not matches:
        raise Unusable(r"its solution has no \boxed{}")
    begin = matches[-1].end()
    if solution[begin : begin + 1] != "{":
        return solution[begin : begin + 1]
    depth = 0
    for end in range(begin, len(solution)):
        depth += (solution[end] == "{") - (solution[end] == "}")
        if depth == 0:
            return solution[begin + 1 : end].strip()
    raise Unusable(r"the last \boxed{ of its solution is not closed")


def _text(record: Mapping[str, object], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"{name!r} is {value!r}, must be text")
    return value


def _with(question: str, instruction: str) -> str:
    return f"{question.strip()}\n{instruction}" if instruction else question.strip()


CONVERTERS: Mapping[str, Callable[[Mapping[str, object], str], dict[str, object]]] = {
    "gsm8k": convert_gsm8k,
    "math": convert_math,
    "dapo_math": convert_verl,
    "verl": convert_verl,
}
"""From a record and an instruction to a row; by name of the data set."""
