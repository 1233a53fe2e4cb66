"""Advantages token by token and turn by turn, against plain loops over rows, turns and tokens."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.distillation import distillation
from hybridrl.algorithms.advantages.gae import bi_level_gae, gae
from hybridrl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridrl.algorithms.advantages.reinforce import reinforce, reinforce_plus_plus, remax
from hybridrl.algorithms.advantages.role_baseline import role_baseline
from hybridrl.algorithms.advantages.turns import gigpo, turn_grpo, turn_reinforce
from hybridrl.batch import jagged, place_on_last_tokens

Singletons = Literal["zero", "reward"]
Align = Literal["response", "position"]
Matrix = list[list[float]]


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens with gaps; masked tokens hold ``filler``."""

    group: list[int]
    mask: list[list[bool]]
    rewards: Matrix
    logprobs: Matrix
    others: Matrix
    greedy: list[float]
    filler: float = 0.0

    def column(self, values: Matrix) -> Tensor:
        return jagged(
            [
                torch.tensor([v if on else self.filler for v, on in zip(row, mask, strict=True)])
                for row, mask in zip(values, self.mask, strict=True)
            ]
        )

    @property
    def mask_BL(self) -> Tensor:
        return jagged([torch.tensor(row, dtype=torch.bool) for row in self.mask])


def random_tokens(seed: int) -> Tokens:
    source = random.Random(seed)
    sizes = [source.randrange(0, 12) for _ in range(12)]

    def matrix(low: float, high: float) -> Matrix:
        return [[source.uniform(low, high) for _ in range(size)] for size in sizes]

    return Tokens(
        group=[source.choice([2, 5, 5, 9]) for _ in sizes[:-1]] + [-1],  # one of them is alone
        mask=[[source.random() < 0.6 for _ in range(size)] for size in sizes[:-2]]
        + [[False] * sizes[-2], [True] * sizes[-1]],
        rewards=matrix(-1, 1),
        logprobs=matrix(-3, 0),
        others=matrix(0, 0.6),
        greedy=[source.uniform(-1, 1) for _ in sizes],
    )


def returns_of(tokens: Tokens, *, gamma: float) -> Matrix:
    rows = []
    for rewards, mask in zip(tokens.rewards, tokens.mask, strict=True):
        row, running = [0.0] * len(mask), 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                running = row[t] = rewards[t] + gamma * running
        rows.append(row)
    return rows


def flat(rows: Matrix, mask: list[list[bool]]) -> list[float]:
    pairs = [p for row, on in zip(rows, mask, strict=True) for p in zip(row, on, strict=True)]
    return [value if is_on else 0.0 for value, is_on in pairs]


def chosen(rows: Matrix, mask: list[list[bool]]) -> list[float]:
    pairs = [p for row, on in zip(rows, mask, strict=True) for p in zip(row, on, strict=True)]
    return [value for value, is_on in pairs if is_on]


def otb(tokens: Tokens, *, align: Align = "response", alone: Singletons = "zero") -> Tensor:
    return optimal_token_baseline(
        tokens.column(tokens.rewards),
        torch.tensor(tokens.group),
        tokens.mask_BL,
        tokens.column(tokens.logprobs),
        tokens.column(tokens.others),
        align=align,
        singletons=alone,
    )


ESTIMATORS: dict[str, Callable[[Tokens], Tensor]] = {
    "gae": lambda x: gae(x.column(x.rewards), x.column(x.others), x.mask_BL).advantages_BL,
    "bi_level_gae": lambda x: (
        bi_level_gae(x.column(x.rewards), x.column(x.others), x.mask_BL).advantages_BL
    ),
    "turn_grpo": lambda x: turn_grpo(x.column(x.rewards), torch.tensor(x.group), x.mask_BL),
    "turn_reinforce": lambda x: turn_reinforce(x.column(x.rewards), x.mask_BL, gamma=0.9),
    "reinforce": lambda x: reinforce(x.column(x.rewards), x.mask_BL, gamma=0.9),
    "reinforce_plus_plus": lambda x: reinforce_plus_plus(x.column(x.rewards), x.mask_BL),
    "remax": lambda x: remax(x.column(x.rewards), torch.tensor(x.greedy), x.mask_BL),
    "distillation": lambda x: distillation(x.column(x.logprobs), x.column(x.others), x.mask_BL),
    "optimal_token_baseline": otb,
    "the same by position": lambda x: otb(x, align="position"),
}


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_rewards_to_come_skip_what_the_policy_did_not_choose(seed: int, gamma: float) -> None:
    tokens = random_tokens(seed)
    rewards_BL, returns = tokens.column(tokens.rewards), returns_of(tokens, gamma=gamma)
    plain_BL = reinforce(rewards_BL, tokens.mask_BL, gamma=gamma)
    assert plain_BL.values().tolist() == pytest.approx(flat(returns, tokens.mask), abs=1e-5)
    selected = chosen(returns, tokens.mask)
    mean, variance = statistics.fmean(selected), statistics.variance(selected)
    white = [[(g - mean) / math.sqrt(variance + 1e-8) for g in row] for row in returns]
    white_BL = reinforce_plus_plus(rewards_BL, tokens.mask_BL, gamma=gamma)
    assert white_BL.values().tolist() == pytest.approx(flat(white, tokens.mask), abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_response_is_the_baseline(seed: int) -> None:
    tokens = random_tokens(seed)
    returns = returns_of(tokens, gamma=1.0)
    expected = [[g - b for g in row] for row, b in zip(returns, tokens.greedy, strict=True)]
    advantages_BL = ESTIMATORS["remax"](tokens)
    assert advantages_BL.values().tolist() == pytest.approx(flat(expected, tokens.mask), abs=1e-5)


def test_the_teacher_raises_what_it_finds_likelier() -> None:
    mask_BL = jagged([torch.tensor([True, True, False]), torch.tensor([True])])
    old_BL = jagged([torch.tensor([-1.0, -3.0, math.nan]), torch.tensor([-0.5])])
    teacher_BL = jagged([torch.tensor([-2.0, -0.5, 1.0]), torch.tensor([-math.inf])])
    k1_BL = distillation(old_BL, teacher_BL, mask_BL)
    assert k1_BL.values().tolist() == [-1.0, 2.5, 0.0, -20.0]
    k3_BL = distillation(old_BL, teacher_BL, mask_BL, estimator="k3", limit=10.0)
    expected = [-(math.exp(-1) - 1 + 1), -(math.exp(2.5) - 1 - 2.5), 0.0, -10.0]
    assert k3_BL.values().tolist() == pytest.approx(expected)


def test_baselines_of_sure_tokens_lie_between_the_rewards() -> None:
    mask_BL = jagged([torch.tensor([True])] * 2)
    advantages_BL = optimal_token_baseline(
        jagged([torch.tensor([1.0]), torch.tensor([0.0])]),
        torch.tensor([0, 0]),
        mask_BL,
        jagged([torch.tensor([0.0])] * 2),
        jagged([torch.tensor([1 + 1e-6]), torch.tensor([1 - 1e-6])]),
    )
    assert float(advantages_BL.values().abs().max()) <= 1.0


def obvious_baselines(tokens: Tokens, *, align: Align) -> Matrix:
    """The formula of optimal_token_baseline, step by step; 0 where no other response goes on."""
    returns, baselines = returns_of(tokens, gamma=1.0), [[0.0] * len(row) for row in tokens.mask]
    steps: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {}
    for b, mask in enumerate(tokens.mask):
        weight, positions = 0.0, [t for t, on in enumerate(mask) if on]
        for index, t in enumerate(positions):
            weight += 1 - 2 * math.exp(tokens.logprobs[b][t]) + tokens.others[b][t]
            step = index if align == "response" else t - positions[0]
            steps.setdefault((tokens.group[b], step), []).append((weight, returns[b][t], b, t))
    for (group, step), entries in steps.items():
        baseline = sum(w * g for w, g, _, _ in entries) / (sum(w for w, *_ in entries) + 1e-8)
        counts = [sum(m) for m, g in zip(tokens.mask, tokens.group, strict=True) if g == group]
        second, longest = [0, *sorted(counts)][-2:]
        for _, _, b, t in entries:
            is_alone = sum(tokens.mask[b]) == longest > second and step >= second
            baselines[b][t] = 0.0 if is_alone else baseline
    return baselines


@pytest.mark.parametrize("alone", ["zero", "reward"])
@pytest.mark.parametrize("align", ["response", "position"])
@pytest.mark.parametrize("seed", range(8))
def test_each_token_has_its_own_baseline(seed: int, align: Align, alone: Singletons) -> None:
    tokens = random_tokens(seed)
    tokens = replace(tokens, others=[[p + 1 for p in row] for row in tokens.others])  # w > 0
    returns, baselines = returns_of(tokens, gamma=1.0), obvious_baselines(tokens, align=align)
    expected = [
        [g - b for g, b in zip(*rows, strict=True)] for rows in zip(returns, baselines, strict=True)
    ]
    if alone == "zero":
        expected = [
            row if tokens.group.count(group) > 1 else [0.0] * len(row)
            for row, group in zip(expected, tokens.group, strict=True)
        ]
    advantages_BL = otb(tokens, align=align, alone=alone)
    assert advantages_BL.values().tolist() == pytest.approx(flat(expected, tokens.mask), abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_tokens_outside_responses_are_never_read(name: str, filler: float) -> None:
    tokens = random_tokens(1)
    spoiled_BL = ESTIMATORS[name](replace(tokens, filler=filler))
    assert torch.equal(spoiled_BL.values(), ESTIMATORS[name](tokens).values())
    assert not spoiled_BL.values()[~tokens.mask_BL.values()].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_response_token_at_all_gives_zeros(name: str) -> None:
    tokens = random_tokens(5)
    empty = replace(tokens, mask=[[False] * len(row) for row in tokens.mask])
    assert not ESTIMATORS[name](empty).values().any()
    one = replace(empty, mask=[[t == 0 for t in range(len(row))] for row in tokens.mask])
    assert bool(ESTIMATORS[name](one).values().isfinite().all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_token_advantages_carry_no_gradient(name: str) -> None:
    tokens = random_tokens(0)
    column = Tokens.column

    def with_gradient(self: Tokens, values: Matrix) -> Tensor:
        return column(self, values).requires_grad_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "column", with_gradient)
        assert not ESTIMATORS[name](tokens).requires_grad


def turns_of(mask: list[bool]) -> Iterator[list[int]]:
    """Positions of the tokens of each turn."""
    turn: list[int] = []
    for t, is_response in enumerate([*mask, False]):
        if is_response:
            turn.append(t)
        elif turn:
            yield turn
            turn = []


def turn_returns(tokens: Tokens, *, gamma: float) -> Matrix:
    rows = []
    for rewards, mask in zip(tokens.rewards, tokens.mask, strict=True):
        running, returns = 0.0, []
        for turn in reversed(list(turns_of(mask))):
            running = sum(rewards[t] for t in turn) + gamma * running
            returns.append(running)
        rows.append(returns[::-1])
    return rows


def by_token(by_turn: Matrix, tokens: Tokens) -> list[float]:
    rows = [[0.0] * len(mask) for mask in tokens.mask]
    for row, values, mask in zip(rows, by_turn, tokens.mask, strict=True):
        for value, turn in zip(values, turns_of(mask), strict=True):
            for t in turn:
                row[t] = value
    return flat(rows, tokens.mask)


def obvious_turn_grpo(tokens: Tokens, *, gamma: float, singletons: Singletons) -> Matrix:
    returns = turn_returns(tokens, gamma=gamma)
    advantages: Matrix = []
    for group, row in zip(tokens.group, returns, strict=True):
        rows = [g for number, g in zip(tokens.group, returns, strict=True) if number == group]
        columns = [[g[k] for g in rows if k < len(g)] for k in range(max(map(len, rows)))]
        squares = sum((g - statistics.fmean(c)) ** 2 for c in columns for g in c)
        freedom = sum(map(len, columns)) - len(columns)
        std = math.sqrt(squares / max(freedom, 1))
        advantages.append([])
        for k, g in enumerate(row):
            alone = 0.0 if singletons == "zero" else g / (1 + 1e-6)
            peers = columns[k]
            value = (g - statistics.fmean(peers)) / (std + 1e-6) if len(peers) > 1 else alone
            advantages[-1].append(value)
    return advantages


@pytest.mark.parametrize("singletons", ["zero", "reward"])
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("seed", range(6))
def test_a_turn_is_compared_with_the_same_turn_of_others(
    seed: int, gamma: float, singletons: Singletons
) -> None:
    tokens = random_tokens(seed)
    advantages_BL = turn_grpo(
        tokens.column(tokens.rewards),
        torch.tensor(tokens.group),
        tokens.mask_BL,
        gamma=gamma,
        singletons=singletons,
    )
    expected = obvious_turn_grpo(tokens, gamma=gamma, singletons=singletons)
    assert advantages_BL.values().tolist() == pytest.approx(by_token(expected, tokens), abs=1e-4)


def obvious_gigpo(tokens: Tokens, ids: list[list[int]], *, gamma: float) -> Matrix:
    returns, states = turn_returns(tokens, gamma=gamma), []
    rewards = [sum(row[:1], 0.0) for row in turn_returns(tokens, gamma=1.0)]
    for group, ids_of_row, mask in zip(tokens.group, ids, tokens.mask, strict=True):
        ends = [0, *(turn[-1] + 1 for turn in turns_of(mask))]
        begins = [turn[0] for turn in turns_of(mask)]
        states.append([(group, *ids_of_row[e:b]) for e, b in zip(ends, begins, strict=False)])
    advantages: Matrix = []
    for number, row in enumerate(returns):
        own = tokens.group[number]
        of_group = [r for r, g in zip(rewards, tokens.group, strict=True) if g == own]
        lead = rewards[number] - statistics.fmean(of_group)
        advantages.append([])
        for state, g in zip(states[number], row, strict=True):
            peers = [
                other
                for of_row, states_of_row in zip(returns, states, strict=True)
                for other, of_other in zip(of_row, states_of_row, strict=True)
                if of_other == state
            ]
            advantages[-1].append(lead + 0.5 * (g - statistics.fmean(peers)))
    return advantages


@pytest.mark.parametrize("seed", range(6))
def test_turns_that_answer_the_same_observation_are_compared(seed: int) -> None:
    tokens, source = random_tokens(seed), torch.Generator().manual_seed(seed)
    # Of two tokens, so that observations are often the same, in one row and in several.
    ids = [torch.randint(2, (len(row),), generator=source).tolist() for row in tokens.mask]
    advantages_BL = gigpo(
        tokens.column(tokens.rewards),
        torch.tensor(tokens.group),
        tokens.mask_BL,
        jagged([torch.tensor(row, dtype=torch.int64) for row in ids]),
        gamma=0.7,
        step_weight=0.5,
    )
    expected = by_token(obvious_gigpo(tokens, ids, gamma=0.7), tokens)
    assert advantages_BL.values().tolist() == pytest.approx(expected, abs=1e-5)


def test_two_ways_from_the_same_state_are_in_units_of_their_spread() -> None:
    ids_BL = jagged([torch.tensor([7, 1, 8, 2]), torch.tensor([7, 3, 8, 4])])
    mask_BL = jagged([torch.tensor([False, True, False, True])] * 2)
    rewards_BL = jagged([torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4)])
    group_B = torch.tensor([4, 4])
    found_BL = gigpo(rewards_BL, group_B, mask_BL, ids_BL, gamma=0.5, scale="group")
    lead = 2 * 0.5 / math.sqrt(0.5)  # of the conversation, and as much of each turn
    expected = [0, lead, 0, lead, 0, -lead, 0, -lead]
    assert found_BL.values().tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_each_turn_has_its_discounted_return(seed: int, gamma: float) -> None:
    tokens = random_tokens(seed)
    rewards_BL = tokens.column(tokens.rewards)
    returns_BL = turn_reinforce(rewards_BL, tokens.mask_BL, gamma=gamma, whiten=False)
    expected = by_token(turn_returns(tokens, gamma=gamma), tokens)
    assert returns_BL.values().tolist() == pytest.approx(expected, abs=1e-5)


def obvious_bi_level(tokens: Tokens, numbers: dict[str, float]) -> list[float]:
    """The equations of the docstring, one turn and one token after the other."""
    rows = []
    for rewards, values, mask in zip(tokens.rewards, tokens.others, tokens.mask, strict=True):
        row, advantage, following = [0.0] * len(mask), 0.0, 0.0
        for turn in reversed(list(turns_of(mask))):
            last = turn[-1]
            delta = rewards[last] + numbers["gamma_turn"] * following - values[last]
            advantage = delta + numbers["gamma_turn"] * numbers["lam"] * advantage
            row[last] = advantage
            for t in reversed(turn[:-1]):
                delta = rewards[t] + numbers["gamma"] * values[t + 1] - values[t]
                row[t] = delta + numbers["gamma"] * numbers["lam"] * row[t + 1]
            following = values[last] + sum(rewards[t] for t in turn[:-1])
        rows.append(row)
    return flat(rows, tokens.mask)


@pytest.mark.parametrize("seed", range(6))
def test_turns_then_tokens_are_estimated(seed: int) -> None:
    tokens = random_tokens(seed)
    columns = (tokens.column(tokens.rewards), tokens.column(tokens.others), tokens.mask_BL)
    numbers = {"gamma": 0.9, "lam": 0.8, "gamma_turn": 0.7}
    estimate = bi_level_gae(*columns, gamma=0.9, lam=0.8, gamma_turn=0.7, whiten=False)
    expected = obvious_bi_level(tokens, numbers)
    assert estimate.advantages_BL.values().tolist() == pytest.approx(expected, abs=1e-5)
    values = flat(tokens.others, tokens.mask)
    returns = [a + v for a, v in zip(expected, values, strict=True)]
    assert estimate.returns_BL.values().tolist() == pytest.approx(returns, abs=1e-5)


def test_without_discount_all_see_the_same_rewards() -> None:
    tokens = random_tokens(4)
    rewards_BL, values_BL = tokens.column(tokens.rewards), tokens.column(tokens.others)
    turns = bi_level_gae(rewards_BL, values_BL, tokens.mask_BL, lam=1.0, gamma_turn=1.0)
    torch.testing.assert_close(
        turns.returns_BL.values(),
        gae(rewards_BL, values_BL, tokens.mask_BL, lam=1.0).returns_BL.values(),
    )
    at_end_BL = place_on_last_tokens(torch.arange(12.0), tokens.mask_BL)
    torch.testing.assert_close(
        turn_reinforce(at_end_BL, tokens.mask_BL).values(),
        reinforce_plus_plus(at_end_BL, tokens.mask_BL).values(),
    )
    torch.testing.assert_close(
        turn_reinforce(at_end_BL, tokens.mask_BL, whiten=False).values(),
        reinforce(at_end_BL, tokens.mask_BL).values(),
    )


def test_equal_returns_of_a_turn_teach_nothing() -> None:
    mask_BL = jagged([torch.tensor([True, False, True]), torch.tensor([True, False, True])])
    rewards_BL = jagged([torch.tensor([0.1, 0.0, 0.7]), torch.tensor([0.1, 0.0, 0.7])])
    assert not turn_grpo(rewards_BL, torch.zeros(2), mask_BL).values().any()


@pytest.mark.parametrize("seed", range(5))
def test_each_player_is_compared_with_those_of_its_role_before(seed: int) -> None:
    drawn = random.Random(seed)
    state: dict[str, float] = {}
    means: dict[tuple[str, int], float] = {}
    for _ in range(3):
        tokens = random_tokens(drawn.randrange(10**6))
        players = [[drawn.randrange(3) for _ in m] for m in tokens.mask]
        sources = [("chess", "poker")[g % 2] for g in tokens.group]
        expected: Matrix = []
        for row, source in enumerate(sources):
            row_tokens = zip(tokens.mask[row], players[row], tokens.rewards[row], strict=True)
            totals: dict[int, float] = {}
            for is_response, player, reward in row_tokens:
                if is_response:
                    totals[player] = totals.get(player, 0.0) + reward
            known = {player: means.get((source, player), 0.0) for player in totals}
            pairs = zip(players[row], tokens.mask[row], strict=True)
            expected.append([totals[p] - known[p] if m else 0.0 for p, m in pairs])
            for player, mean in known.items():
                means[source, player] = 0.9 * mean + 0.1 * totals[player]
        mask_BL = jagged([torch.tensor(row, dtype=torch.bool) for row in tokens.mask])
        advantages_BL = role_baseline(
            jagged([torch.tensor(row) for row in tokens.rewards]),
            mask_BL,
            jagged([torch.tensor(row, dtype=torch.int8) for row in players]),
            sources,
            state,
            decay=0.9,
        )
        assert advantages_BL.values().tolist() == pytest.approx(
            [value for row in expected for value in row], abs=1e-5
        )
    assert state == pytest.approx({f"{s}_{p}": m for (s, p), m in means.items()}, abs=1e-5)


def test_a_game_without_tokens_changes_no_mean() -> None:
    state = {"s_0": 0.5}
    mask_BL = jagged([torch.tensor([False, False])])
    nothing = role_baseline(
        mask_BL.float(), mask_BL, mask_BL.to(torch.int8), ["s"], state, decay=0.9
    )
    assert nothing.values().tolist() == [0.0, 0.0]
    assert state == {"s_0": 0.5}
