"""Scores answers to tasks of reasoning-gym by the task's own function. Imports the package."""

from __future__ import annotations

from ast import literal_eval
from functools import cache

try:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer
except ImportError as err:
    raise ImportError(
        "reward.function=reasoning_gym needs reasoning-gym: pip install 'hybridrl[reasoning-gym]'"
    ) from err

_scorer_of = cache(get_score_answer_fn)


def reasoning_gym(response: str, answer: str, source: str, entry: str) -> float:
    """Give what the task named ``source`` gives to an answer, mostly 0 to 1; 0 without tags.

    What counts is the text in the last ``<answer>`` tags. If the reference answer has none, the
    prompt did not ask for them, and all of the response counts.
    """
    given = extract_answer(response) if answer.startswith("<answer>") else response.strip()
    return 0.0 if given is None else float(_scorer_of(source)(given, literal_eval(entry)))
