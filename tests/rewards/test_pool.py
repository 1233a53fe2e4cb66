"""Rows scored by several processes: each failure costs its own row, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.reward import RewardPart
from hybridrl.errors import RewardError
from hybridrl.metrics import Mean
from hybridrl.rewards.report import reward_metrics, warn_of_useless_rewards
from hybridrl.rewards.scorer import EarlyRow, RewardScorer
from tests.rewards.rows import inputs, scorer_of, write_function

ROW = "def reward(response, *, scale: float = 1.0):"
LATER = "async def reward(response, *, scale: float = 1.0):"
BATCH = "def reward(responses, prompts):"
MISHAPS = """
if response == "raise":
    raise KeyError("x")
if response == "die":
    os._exit(3)
if response == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if response == "hang":
    time.sleep(600)
if response == "nan":
    return float("nan")
if response == "decline":
    return ValueError("no digits")
"""

Open = Callable[..., RewardScorer]


@pytest.mark.shows("R5.6")
@pytest.mark.parametrize("head", [ROW, LATER])
def test_each_mishap_fails_its_own_row_and_rows_keep_their_order(
    open_scorer: Open, head: str
) -> None:
    body = f"{MISHAPS}\nreturn scale * float(response)"
    scorer = open_scorer(head, body, timeout_s=1.0, args={"scale": 2.0})
    responses = [str(number) for number in range(40)]
    for row, mishap in (
        *((3, "raise"), (7, "hang"), (8, "nan"), (15, "die"), (16, "crash")),
        *((22, "decline"), (39, "hang")),
    ):
        responses[row] = mishap
    scores = scorer.score(inputs(*responses))
    failed = {row for row, response in enumerate(responses) if not response.isdigit()}
    assert scores.is_left_out_B is None
    assert set(scores.is_failed_B.nonzero().flatten().tolist()) == failed
    assert scores.rewards_B.tolist() == [2.0 * int(r) if r.isdigit() else 0.0 for r in responses]


def test_an_early_failure_has_its_row_and_leaves_those_behind_it(open_scorer: Open) -> None:
    scorer = open_scorer(ROW, MISHAPS + "return 1.0")
    (first,), (second,), (third,) = scorer.score_early(inputs("a", "die", "b"))[0]
    assert (first, third) == (1.0, None)
    assert "ended its process" in str(second)


def test_early_rewards_are_those_of_their_functions(tmp_path: Path) -> None:
    own = write_function(tmp_path, ROW, "return float(response) * scale")
    functions = {str(n): RewardPart(function=own, args={"scale": n}) for n in (1.0, 10.0)}
    with scorer_of(None, functions=functions) as scorer:
        rewards, _ = scorer.score_early(inputs("1", "2"))
        early = {row: EarlyRow(each, is_in_time=True) for row, each in enumerate(rewards)}
        scores = scorer.score(inputs("1", "2"), early=early)
    assert scores.reward_parts_BK.tolist() == [[1, 10], [2, 20]]


@pytest.mark.shows("R5.6")
def test_rows_beside_a_hang_are_called_once(open_scorer: Open, tmp_path: Path) -> None:
    body = "open(NOTES, 'a').write(f'{response}\\n')" + MISHAPS + "return 1.0"
    scorer = open_scorer(ROW, body, timeout_s=0.5)
    responses = [*"abcdef", "hang", *"ghijklmnop"]  # in the middle of a piece
    scores = scorer.score(inputs(*responses))
    assert scores.is_failed_B.tolist() == [response == "hang" for response in responses]
    assert sorted((tmp_path / "notes").read_text().split()) == sorted(responses)


def test_a_row_that_hangs_now_and_then_gives_nothing_up(open_scorer: Open) -> None:
    scorer = open_scorer(ROW, MISHAPS + "return 1.0", timeout_s=0.2)
    responses = ["a", "hang"] * 8  # more than three for each of two processes
    assert scorer.score(inputs(*responses)).rewards_B.tolist() == [1.0, 0.0] * 8


def test_what_always_hangs_is_given_up(open_scorer: Open, tmp_path: Path) -> None:
    body = "open(NOTES, 'a').write('.')\ntime.sleep(600)"
    scores = open_scorer(ROW, body, timeout_s=0.3).score(inputs(*"x" * 64))
    assert bool(scores.is_failed_B.all())
    assert len((tmp_path / "notes").read_text()) in (6, 7)  # one more was under way


@pytest.mark.parametrize(
    "mishap",
    ["await asyncio.sleep(600)", pytest.param("while True: pass", marks=pytest.mark.nightly)],
)
def test_an_asynchronous_row_that_never_ends_fails_alone(open_scorer: Open, mishap: str) -> None:
    body = f"if response == 'hang':\n    {mishap}\nawait asyncio.sleep(0.01)\nreturn 1.0"
    scorer = open_scorer(LATER, body, timeout_s=1.0)
    responses = [*"abcd", "hang", *"efgh"]
    scores = scorer.score(inputs(*responses))
    assert scores.rewards_B.tolist() == [float(response != "hang") for response in responses]


def test_asynchronous_rows_are_awaited_together(open_scorer: Open) -> None:
    body = """
        reward.gate = getattr(reward, "gate", None) or asyncio.Barrier(8)
        await reward.gate.wait()  # nobody passes before all have come
        return 1.0
    """
    scores = open_scorer(LATER, body, num_processes=1).score(inputs(*"abcdefgh"))
    assert scores.rewards_B.tolist() == [1.0] * 8


def test_an_asynchronous_function_of_all_rows_is_awaited(open_scorer: Open) -> None:
    head = "async def reward(responses):"
    scorer = open_scorer(head, "await asyncio.sleep(0)\nreturn [float(r) for r in responses]")
    assert scorer.score(inputs("1", "2", "x")).rewards_B.tolist() == [1.0, 2.0, 0.0]


def test_rows_of_a_prompt_are_in_one_call(open_scorer: Open) -> None:
    scorer = open_scorer(BATCH, "return [len(set(prompts)) * 100 + len(prompts)] * len(prompts)")
    prompts = [*"aaaaaaa", *"bb", *"c"]
    rewards = scorer.score(inputs(*prompts, prompts=prompts)).rewards_B.tolist()
    assert rewards == [107.0] * 7 + [203.0] * 3
    alone = open_scorer(BATCH, "return [len(prompts)] * len(prompts)", num_processes=1)
    assert alone.score(inputs(*prompts, prompts=prompts)).rewards_B.tolist() == [10.0] * 10


def test_two_processes_score_at_a_time(open_scorer: Open) -> None:
    body = """
        open(NOTES + response, "w").close()
        other = "b" if response == "a" else "a"
        while not os.path.exists(NOTES + other):
            time.sleep(0.01)
        return 1.0
    """
    assert open_scorer(ROW, body).score(inputs("a", "b")).rewards_B.tolist() == [1.0, 1.0]


def test_a_response_that_cannot_be_scored_is_left_out(open_scorer: Open) -> None:
    scorer = open_scorer(ROW, "return float(response)", on_error="leave_out")
    scores = scorer.score(inputs("1", "two", "3", "4"))
    assert scores.is_left_out_B is not None
    assert scores.is_left_out_B.tolist() == [False, True, False, False]
    metrics = reward_metrics(scores, num_responses=2)
    assert metrics["reward/left_out_fraction"] == Mean(1.0, 4)


def test_with_stop_the_run_ends_at_the_first_failure(open_scorer: Open) -> None:
    scorer = open_scorer(ROW, MISHAPS + "return 1.0", on_error="stop")
    with pytest.raises(RewardError, match="response 5 'raise' to prompt '5': raised KeyError"):
        scorer.score(inputs(*"abcde", "raise", *"fgh"))


def test_several_functions_are_summed_with_their_weights(tmp_path: Path) -> None:
    own = write_function(tmp_path, ROW, MISHAPS + "return float(response)")
    functions = {
        "right": RewardPart(function="exact_match"),
        "short": RewardPart(function="length", weight=0.5, args={"tokens": 0, "per_token": 1.0}),
        "own": RewardPart(function=own, weight=-2.0),
    }
    with scorer_of(None, functions=functions) as scorer:
        scores = scorer.score(inputs("42", "7", "raise"))
    assert scores.names == ("right", "short", "own")
    assert scores.reward_weights_K.tolist() == [1.0, 0.5, -2.0]
    assert scores.reward_parts_BK.tolist() == [[1, -1, 42], [0, -1, 7], [0, -1, 0]]
    assert scores.rewards_B.tolist() == [1 - 0.5 - 84, -0.5 - 14, -0.5]
    assert scores.is_failed_BK.tolist() == [[False] * 3, [False] * 3, [False, False, True]]
    assert scores.is_failed_B.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("body", "alarm"),
    [
        ("return 0.5", "the first 3 rewards are all 0.5"),
        ("raise KeyError(response)", "none of the first 3 responses could be scored"),
        ("return float(response == 'b')", ""),
    ],
)
def test_rewards_that_teach_nothing_raise_an_alarm(
    open_scorer: Open, caplog: pytest.LogCaptureFixture, body: str, alarm: str
) -> None:
    scorer = open_scorer(ROW, body)
    warn_of_useless_rewards(scorer.score(inputs("a", "b", "c")))
    alarms = [message for message in caplog.messages if message.startswith("ALARM")]
    assert len(alarms) == (1 if alarm else 0)
    assert alarm in "".join(alarms)
