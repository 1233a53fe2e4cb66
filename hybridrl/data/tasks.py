"""Tasks whose rows are made on the spot: digits, drawn numbers, sums, Countdown, reasoning-gym."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from importlib import import_module
from typing import Literal

from hybridrl.data.drawn_numbers import draw_number
from hybridrl.data.rows import IMAGE_MARK, Malformed, Message, Row
from hybridrl.errors import DataError, suggest_name

Split = Literal["train", "eval"]
_EVAL_SHARE = 8  # one number, or expression, in eight
_MAX_TRIES = 10_000
_LARGEST_TERM = 20
_CALL_SHARE = 0.35  # of the worked conversations of the calculator
_LARGEST_NUMBER, _LARGEST_TARGET = 99, 999  # of Countdown
_MIN_NUMBERS, _MAX_NUMBERS = 3, 4
_ROWS_OF_A_SEED = 1_000_000  # at most, of reasoning-gym
_EXTRA = "pip install 'hybridrl[reasoning-gym]'"
_PROMPT = (
    "Using the numbers {numbers}, make an expression that equals {target}. Use + - * / and "
    r"parentheses, and each number exactly once. Put the expression in \boxed{{}}."
)


def build_sort_digits_rows(
    num_rows: int,
    *,
    split: Split,
    seed: int,
    min_digits: int,
    max_digits: int,
    with_rejected: bool = False,
) -> list[Row]:
    """Make rows of ``31415=`` -> ``11345``; the same arguments make the same rows.

    Whether a number is for training or for evaluation depends on the number alone, so the two never
    meet, whatever the seeds: also not when the starting model is warmed up on training rows. Short
    numbers are few, and repeat.

    Args:
        split: ``eval`` numbers are one in eight of all.
        min_digits: >= 1. Lengths are uniform.
        with_rejected: make preference pairs: the rejected answer has one other digit.

    Raises:
        DataError: no number of some length belongs to ``split``.
    """
    source = random.Random(f"sort_digits {split} {seed}")
    errors = random.Random(f"sort_digits rejected {split} {seed}")
    rows = []
    for index in range(num_rows):
        number = _choose_number(source, split, min_digits, max_digits)
        answer = "".join(sorted(number))
        rejected = None
        if with_rejected:
            at = errors.randrange(len(answer))
            other = errors.choice("0123456789".replace(answer[at], ""))
            rejected = answer[:at] + other + answer[at + 1 :]
        rows.append(
            Row(
                prompt=f"{number}=",
                answer=answer,
                rejected=rejected,
                source="sort_digits",
                origin=f"sort_digits/{split}:{index + 1}",
            )
        )
    return rows


def build_read_numbers_rows(
    num_rows: int, *, split: Split, seed: int, min_digits: int, max_digits: int
) -> list[Row]:
    """Make rows of a drawn number to read; as ``build_sort_digits_rows``."""
    source = random.Random(f"read_numbers {split} {seed}")
    rows = []
    for index in range(num_rows):
        number = _choose_number(source, split, min_digits, max_digits)
        rows.append(
            Row(
                prompt=(Message("user", f"{IMAGE_MARK}="),),
                images=(draw_number(number, source),),
                answer=number,
                source="read_numbers",
                origin=f"read_numbers/{split}:{index + 1}",
            )
        )
    return rows


def _choose_number(source: random.Random, split: Split, min_digits: int, max_digits: int) -> str:
    num_digits = source.randint(min_digits, max_digits)
    for _ in range(_MAX_TRIES):
        number = str(source.randrange(10 ** (num_digits - 1), 10**num_digits))
        if _split_of(number) == split:
            return number
    raise DataError(
        f"there is no number of {num_digits} digits for {split}; set larger "
        "data.max_prompt_tokens and rollout.max_response_tokens"
    )


def _split_of(text: str) -> Split:
    digest = hashlib.blake2b(text.encode(), digest_size=1).digest()
    return "eval" if digest[0] % _EVAL_SHARE == 0 else "train"


def build_calculator_rows(
    num_rows: int, *, split: Split, seed: int, has_conversations: bool = False
) -> list[Row]:
    """Make arithmetic of two or three steps, ``(17+5)*12``; the same arguments make the same rows.

    Splits are apart as those of sorted digits. A small model cannot compute the answer, but it can
    ask the tool ``calculator``. The conversations that teach a starter model call the tool in a
    third of cases, and answer at once in the others. So it knows the form of a call, and
    reinforcement learning finds out that calls pay.

    With ``has_conversations`` the prompts of some rows hold the call of the tool and its result,
    too, for supervised fine-tuning of all turns.
    """
    source = random.Random(f"calculator {split} {seed}")
    rows = []
    for index, (expression, value) in zip(
        range(num_rows), _expressions(source, split), strict=False
    ):
        prompt: tuple[Message, ...] = (Message("user", expression),)
        if has_conversations and source.random() < _CALL_SHARE:
            call = f"[calculator(expression='{expression}')]"
            prompt = (*prompt, Message("assistant", call), Message("tool", str(value)))
        rows.append(
            Row(
                prompt=prompt,
                answer=str(value),
                source="calculator",
                origin=f"calculator/{split}:{index + 1}",
            )
        )
    return rows


def _expressions(source: random.Random, split: Split) -> Iterator[tuple[str, int]]:
    while True:
        value = source.randint(1, _LARGEST_TERM)
        expression = str(value)
        num_steps = source.choice((2, 3))
        for step in range(num_steps):
            number, operator = source.randint(1, _LARGEST_TERM), source.choice("+-*")
            left = f"({expression})" if operator == "*" and step else expression
            expression = f"{left}{operator}{number}"
            value = {"+": value + number, "-": value - number, "*": value * number}[operator]
        if _split_of(expression) == split:
            yield expression, value


def make_countdown(num_rows: int, *, split: str, seed: int) -> list[dict[str, object]]:
    """Make rows; the same arguments make the same rows, and no two have the same prompt.

    The answer is one solution, ``(44+19)+35``. It states the task for a reward function: a response
    is right if it uses the same numbers and has the same value. With the same seed ``train`` and
    ``test`` have different rows.
    """
    source = random.Random(f"countdown {split} {seed}")
    rows: dict[str, dict[str, object]] = {}
    while len(rows) < num_rows:
        num_numbers = source.randint(_MIN_NUMBERS, _MAX_NUMBERS)
        numbers = [source.randint(1, _LARGEST_NUMBER) for _ in range(num_numbers)]
        # A sum that divides by 8 is for the test: no seeds make a prompt of both splits.
        if (sum(numbers) % 8 == 0) != (split == "test"):
            continue
        expression, target = _combine([(str(n), Fraction(n)) for n in numbers], source)
        if target.denominator != 1 or not 1 <= target <= _LARGEST_TARGET:
            continue
        source.shuffle(numbers)
        prompt = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
        row = {"prompt": prompt, "answer": expression, "source": "countdown"}
        rows.setdefault(prompt, row | {"difficulty": num_numbers})
    return list(rows.values())


def _combine(terms: list[tuple[str, Fraction]], source: random.Random) -> tuple[str, Fraction]:
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(source.randrange(len(terms))) for _ in range(2))
        sign = source.choice("+-*/" if b else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[sign]
        terms.append((f"({left}{sign}{right})", value))
    expression, value = terms[0]
    return expression[1:-1], value


def make_task_rows(spelled: str, *, key: str) -> Iterator[dict[str, object] | Malformed]:
    """Yield rows of a task of reasoning-gym, with the entry that its scorer asks for [2505.24760].

    ``reasoning_gym:chain_sum?size=2000&seed=1&max_terms=3``: ``size`` (500) counts rows, ``seed``
    (0) chooses them, ``system`` (default) names a system prompt of the package, and the others are
    the task's own. The package seeds row i with its seed + i, so a seed of ours is a million of
    theirs: rows of two seeds never begin from the same numbers.

    The answer stands in ``<answer>`` tags, as the system prompts want it. With ``system=none`` the
    prompt is the question, as text, and the answer has no tags.

    Raises:
        DataError: no such task, options that it refuses, too many rows, or no reasoning-gym.

    [2505.24760]: https://arxiv.org/abs/2505.24760
    """
    name, options = _parse_task(spelled)
    size, seed = options.pop("size", 500), options.pop("seed", 0)
    system = options.pop("system", "default")
    try:
        gym, utils = import_module("reasoning_gym"), import_module("reasoning_gym.utils")
    except ImportError as error:
        raise DataError(f"{key}: {spelled} needs reasoning-gym: {_EXTRA}") from error
    tasks = import_module("reasoning_gym.factory").DATASETS
    prompts = {**utils.SYSTEM_PROMPTS, "none": ""}
    if name not in tasks:
        raise DataError(f"{key}: {spelled}: no task {name!r}; {suggest_name(name, [*tasks])}")
    if system not in prompts:
        known = suggest_name(str(system), [*prompts])
        raise DataError(f"{key}: {spelled}: no system prompt {system!r}; {known}")
    if not (type(size) is int and 0 < size <= _ROWS_OF_A_SEED and type(seed) is int and seed >= 0):
        rule = f"size is a number from 1 to {_ROWS_OF_A_SEED}, seed one from 0"
        raise DataError(f"{key}: {spelled}: {rule}; correct them")
    try:
        for entry in gym.create_dataset(name, size=size, seed=seed * _ROWS_OF_A_SEED, **options):
            yield _row_of_entry(entry, name, prompts[system])
    except Exception as error:  # of a task, which may raise any
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{key}: {spelled}: {reason}; correct its options") from error


def _parse_task(spelled: str) -> tuple[str, dict[str, object]]:
    """Return the task and its options; values are JSON, or else text."""
    name, _, query = spelled.partition(":")[2].partition("?")
    options: dict[str, object] = {}
    for option in filter(None, query.split("&")):
        word, _, value = option.partition("=")
        try:
            options[word] = json.loads(value)
        except ValueError:
            options[word] = value
    return name, options


def _row_of_entry(
    entry: dict[str, object], name: str, system: str
) -> dict[str, object] | Malformed:
    question, answer = entry["question"], entry["answer"]
    if not isinstance(answer, str):
        return Malformed(f"has no reference answer, as all rows of {name}; leave out the task")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {
        "prompt": messages if system else question,
        "answer": f"<answer>{answer}</answer>" if system else answer,
        "source": name,
        "entry": repr(_plain(entry)),  # JSON has no tuples, which some scorers compare
    }


def _plain(value: object) -> object:
    """Replace numpy's text and floats, whose ``repr`` is a call, by Python's."""
    if isinstance(value, dict):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return float(value) if isinstance(value, float) else value
