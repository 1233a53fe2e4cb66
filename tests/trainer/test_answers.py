from __future__ import annotations

import pytest

from hybridrl.trainer.evaluate import extract_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}. #### 7", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        ("6 x 7 = 42\n#### 1,042.\n", "1042"),
        ("The answer is 5.\nThe final Answer:  $ 6 $ .\nBye", "6"),
        ("first\n\n  B) Paris  \n", "b) paris"),
        ("3,4 and 5", "3,4 and 5"),
        ("", ""),
        ("$", ""),
    ],
)
def test_equal_answers_become_equal_text(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


def test_thousands_of_open_boxes_cost_one_pass() -> None:
    assert extract_answer("\\boxed{" * 200_000 + "7}").startswith("7")
