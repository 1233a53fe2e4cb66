from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.errors import RewardError
from hybridrl.rewards.scorer import LARGEST_REWARD, RewardScorer
from tests.rewards.rows import inputs, scorer_of, write_function

Open = Callable[..., RewardScorer]
HEAD = "def reward(responses, answers, **_):"


@pytest.mark.parametrize("function", ["exact_match", "sorted_prefix"])
def test_a_built_in_function_is_found_by_its_name(function: str) -> None:
    with scorer_of(function) as scorer:
        scores = scorer.score(inputs("42", "7"))
    assert scores.rewards_B.tolist() == [1.0, 0.0]
    assert scores.is_failed_B.tolist() == [False, False]


def test_a_users_function_scores_several_batches_in_one_process(
    open_scorer: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        print("what it prints", flush=True)
        return [os.getpid() if r == a else 0.5 for r, a in zip(responses, answers)]
    """
    scorer = open_scorer(HEAD, body, num_processes=1)
    first, second = scorer.score(inputs("42", "x")), scorer.score(inputs("42"))
    assert first.rewards_B[1].item() == 0.5
    assert first.rewards_B[0] == second.rewards_B[0] != os.getpid()
    assert capfd.readouterr() == ("", "what it prints\n" * 2)


def test_a_reward_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text("POINTS = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "from my_rules import POINTS\n\n"
        "def r(responses, **_):\n    return [POINTS] * len(responses)\n"
    )
    with scorer_of(f"{tmp_path}/mine.py:r") as scorer:
        assert scorer.score(inputs("a", "b")).rewards_B.tolist() == [3.0, 3.0]


FAULTY = """
    [kind] = {*responses} - {"good"} or {""}
    if kind == "raise":
        1 / 0
    if kind == "exit":
        sys.exit(3)
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(600)
    while kind == "spin":
        pass
    if kind in ("number", "nothing", "fewer"):
        return {"number": 1.0, "nothing": None, "fewer": responses[1:] and [1] * 3}[kind]
    values = {"nan": math.nan, "inf": math.inf, "huge": 1e39, "low": -2e15, "none": None}
    return [{**values, "text": "1"}.get(response, 1) for response in responses]
"""
FAULTS = {
    **{"nan": "returned nan", "inf": "returned inf", "none": "returned 'None', must be a number"},
    # Finite in Python, and not in the float32 that advantages are computed in.
    **{"huge": "returned 1e+39, must lie", "low": "returned -2e+15, must lie"},
    **{"text": "must be a number", "number": "returned 1.0, must be a list: one number a response"},
    **{"nothing": "returned None, must be", "fewer": "returned 0 rewards for 1 responses"},
    "raise": "raised ZeroDivisionError: division by zero (mine.py:7)",
    **{"exit": "SystemExit: 3", "die": "exit code 3"},
    **{"hang": "took longer than 1 s", "spin": "took longer than 1 s"},
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardScorer, RewardScorer]]:
    """One that ends the run, and one that gives failed responses 0."""
    folder = tmp_path_factory.mktemp("faulty")
    function = write_function(folder, HEAD, FAULTY)
    options = {"num_processes": 1, "timeout_s": 1.0}
    with (
        scorer_of(function, on_error="stop", **options) as stop,
        scorer_of(function, on_error="zero", **options) as zero,
    ):
        yield stop, zero


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.nightly if k == "spin" else ()) for k in FAULTS]
)
def test_failed_function_raises_with_response_or_scores_zero(
    faulty: tuple[RewardScorer, RewardScorer], kind: str
) -> None:
    stop, zero = faulty
    batch = inputs("good", "good", kind, "good")
    with pytest.raises(RewardError) as raised:
        stop.score(batch)
    message = str(raised.value)
    assert f".py:reward: response 2 '{kind}' to prompt '2': " in message
    assert FAULTS[kind] in message
    assert message.endswith("set reward.on_error=leave_out")
    for _ in range(2):  # it works on after a failure
        scores = zero.score(batch)
        assert scores.rewards_B.tolist() == [1.0, 1.0, 0.0, 1.0]
        assert scores.is_failed_B.tolist() == [False, False, True, False]


def test_the_largest_rewards_have_advantages_that_are_numbers(open_scorer: Open) -> None:
    body = f"return [{LARGEST_REWARD}, -{LARGEST_REWARD}, 0, 1]"
    scorer = open_scorer(HEAD, body, num_processes=1, on_error="stop")
    rewards_B = scorer.score(inputs("a", "b", "c", "d")).rewards_B
    advantages_B = grpo(rewards_B, rewards_B.new_zeros(4).long())
    assert bool(advantages_B.isfinite().all())
    assert float(advantages_B.abs().max()) > 1


def test_function_that_fails_only_on_batches_is_reported(open_scorer: Open) -> None:
    scorer = open_scorer(HEAD, "return [1.0]", num_processes=1, on_error="stop")
    with pytest.raises(RewardError, match="returned 1 rewards for 3 responses, though each alone"):
        scorer.score(inputs("a", "b", "c"))
    assert scorer.score(inputs("a")).rewards_B.tolist() == [1.0]


def test_where_a_batch_fails_and_each_row_alone_is_scored_all_rows_fail(open_scorer: Open) -> None:
    body = """
        lengths = [len(text) for text in responses]
        if len(lengths) == 3:
            raise OverflowError("of three")
        return [length - sum(lengths) / len(lengths) for length in lengths]
        """
    scorer = open_scorer(HEAD, body, num_processes=1)
    scores = scorer.score(inputs("a", "bb", "cccc"))
    assert scores.is_failed_B.tolist() == [True] * 3
    assert scorer.score(inputs("a", "bbb")).rewards_B.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def reward(responses, response): ...\n", "'responses' has all rows and others"),
        ("def reward(responses, *, weights): ...\n", "missing a required argument: 'weights'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_once(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=f"cannot be loaded: (.|\n)*{reason}"):
        scorer_of(f"{path}:reward")


def test_mistyped_reward_suggests_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match="'exact_mach' is not built in; did you mean 'exact_match'"
    ):
        scorer_of("exact_mach")
    with pytest.raises(RewardError, match=r"gone\.py is not a file; paths are relative to"):
        scorer_of(f"{tmp_path}/gone.py:reward")


def test_math_answers_are_compared_by_value() -> None:
    pytest.importorskip("math_verify")
    with scorer_of("math") as scorer:
        responses = [r"so it is \boxed{\frac{1}{2}}", "the answer is 3", ""]
        batch = inputs(*responses, answers=["0.5", "4", "1"])
        assert scorer.score(batch).rewards_B.tolist() == [1.0, 0.0, 0.0]
