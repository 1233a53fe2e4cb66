"""Code of responses gets its rewards by tests, in the sandbox."""

from __future__ import annotations

import json

import pytest

from hybridrl.rewards.code_answers import code, code_of
from tests.processes.test_sandbox import refusal

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

ADD = "Adds.\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
CASES = json.dumps([{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "-1 1", "stdout": "0"}])


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (ADD, CASES, 1.0),
        ("print(7)", CASES, 0.0),
        ("def add(a, b):\n    return a + b", "assert add(3, 4) == 7", 1.0),
        ("def add(a, b):\n    return a - b", "assert add(3, 4) == 7", 0.0),
        ("import os\nos._exit(0)", "assert False", 0.0),
        ("print('1' * 32)\nraise SystemExit", "assert False", 0.0),
        ("def f(:", CASES, 0.0),
        ("", CASES, 0.0),
    ],
)
def test_code_is_rewarded_if_it_passes_all_tests(response: str, answer: str, reward: float) -> None:
    assert code(response, answer, 20.0) == reward


def test_code_without_tests_is_an_error() -> None:
    for answer, word in (("[]", "no case"), (" ", "empty"), ('[{"input": "1"}]', "a case is")):
        with pytest.raises(ValueError, match=word):
            code(ADD, answer, 20.0)


def test_the_last_block_of_a_response_is_its_code() -> None:
    assert code_of("```py\n1\n```\nor\n```python\n2\n```\n") == "2\n"
    assert code_of("```python\nnever closed\n") == "never closed\n"
    assert code_of("plain") == "plain"
