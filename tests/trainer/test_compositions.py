from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.kl import KLCoefficient
from hybridrl.algorithms.load import require_part
from hybridrl.batch import (
    CriticBatch,
    LogprobBatch,
    PromptBatch,
    RolloutBatch,
    TrainBatch,
    ValueBatch,
    jagged,
)
from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.config.load import read_config
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.env import ROOT
from hybridrl.metrics import Metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import Sampled
from hybridrl.trainer.build_algorithm import (
    Ingredients,
    build_actor_critic,
    build_policy_optimization,
)
from hybridrl.workers.build import build_policy_loss
from hybridrl.workers.train.backend import StepOutcome
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.microbatcher import MicroBatcher
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.algorithms.test_all_policy_losses import dppo_tv, gmpo, sapo, surrogate, topr, vespo
from tests.algorithms.test_gae import obvious_advantages
from tests.algorithms.test_token_advantages import Tokens, obvious_baselines
from tests.config.values import values_of
from tests.trainer.rollouts import ScoredAfterwards, rollouts_of, row_of

Rows = list[list[float]]
CPU = torch.device("cpu")
ALGORITHMS = sorted(file.stem for file in (ROOT / "hydra_configs/algorithm").glob("*.yaml"))
GROUP_SIZE, NUM_PROMPT_TOKENS, MAX_TOKENS = 3, 2, 6
LENGTHS = [1, 3, 2, 4, 2, 2, 3, 1, 4]
# Two rewards; in the last group all responses have the same.
PARTS = [[1.0, 0.5], [0.0, 0.5], [1.0, 2.0], [0.0, 0.0], [0.0, 1.0], [2.0, 1.0], *[[1.0, 1.0]] * 3]
WEIGHTS = [1.0, 0.5]
GREEDY = [0.5, 1.0, 0.25]
MAX_SQUARE = 0.01
REWARDS = [math.fsum(w * r for w, r in zip(WEIGHTS, row, strict=True)) for row in PARTS]
GROUPS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
GROUP_OF = [n // GROUP_SIZE for n in range(len(REWARDS))]


def table(seed: int, low: float, high: float) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(sum(LENGTHS), generator=generator) * (high - low) + low
    return [row.tolist() for row in draw.split(LENGTHS)]


CURRENT, MOVES = table(0, -2.0, -0.3), table(1, -0.35, 0.35)
OLD = [[c - u for c, u in zip(*rows, strict=True)] for rows in zip(CURRENT, MOVES, strict=True)]
VALUES, TEACHER, SQUARED = table(2, 0.0, 1.0), table(3, -2.0, -0.3), table(4, 0.2, 0.9)


def column(rows: Rows) -> Tensor:
    """A column of the batch, with 0 at the prompt's tokens."""
    return jagged([torch.tensor([0.0] * NUM_PROMPT_TOKENS + row) for row in rows])


LENGTHS_B = torch.tensor(LENGTHS) + NUM_PROMPT_TOKENS
MASK_BL = jagged([torch.arange(n) >= NUM_PROMPT_TOKENS for n in LENGTHS_B.tolist()])
ROLLOUTS = rollouts_of(
    torch.arange(int(LENGTHS_B.sum())).split(LENGTHS_B.tolist()),  # no two are alike
    MASK_BL.unbind(),
    GROUP_OF,
    sampler_logprobs_BL=column(OLD),
)
TASK = build_prompt_step([row_of(n) for n in range(3)], range(3), seed=0)


class TableBackend:
    """A model that is a table of log-probs, by token id."""

    folder, device, is_output_rank, weight_sets, adapter = ROOT, CPU, True, (), None

    def __init__(self) -> None:
        self.data_ranks = Ranks(CPU)
        self.logprobs_V = column(CURRENT).values().clone().requires_grad_()
        self.batcher = MicroBatcher(
            kernel="padded", max_tokens=10_000, ranks=self.data_ranks, device=CPU
        )

    def microbatches(self, rows: Any) -> Any:
        self.token_ids_N = rows.token_ids_BL.values()
        return self.batcher.divide(rows)

    def train_step(self, microbatches: Any, _compute: Any, loss_of: Any) -> StepOutcome:
        for microbatch in microbatches:
            current_S = self.logprobs_V[self.token_ids_N[microbatch.token_index_S]]
            loss, _ = loss_of(microbatch, (current_S, torch.zeros_like(current_S)))
            loss.backward()
        return StepOutcome(StepResult(1.0, 0.0, is_skipped=False), {})


@dataclass
class TablePolicy:
    """Samples, scores and learns as the ranks would, in this process."""

    config: ExperimentConfig
    rows: list[int]
    """The responses that there are."""

    backend: TableBackend = field(default_factory=TableBackend)

    def __call__(self, _: SamplingParams) -> Sampled:
        return TASK, ROLLOUTS[self.rows]

    def generate(self, _prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        assert sampling.temperature == 0
        return ROLLOUTS[[0, 3, 6]]

    def compute_logprobs(self, _: RolloutBatch) -> LogprobBatch:
        is_recomputed = self.config.algorithm.old_logprobs == "recompute"
        return LogprobBatch(
            old_logprobs_BL=column(OLD) if is_recomputed else None,
            reference_logprobs_BL=column(TEACHER),
            teacher_logprobs_BL=column(TEACHER),
            squared_probs_BL=column(SQUARED),
            batch_size=[len(LENGTHS)],
        )[self.rows]

    def update(self, batch: TrainBatch, *, kl_coefficient: float) -> Metrics:
        return PolicyEngine(self.backend).update(  # type: ignore[arg-type]
            batch,
            loss=replace(build_policy_loss(self.config), kl_coefficient=kl_coefficient),
            aggregation=require_part(self.config.algorithm, parts.AGGREGATION),
            temperature=1.0,
            max_response_tokens=MAX_TOKENS,
        )


@dataclass(frozen=True)
class Done:
    result: Any

    def get(self) -> Any:
        return self.result


@dataclass
class TableCritic:
    """Values responses from a table, and keeps what it shall learn."""

    rows: list[int]
    batch: CriticBatch | None = None

    def compute_values(self, _: RolloutBatch) -> Done:
        batch = ValueBatch(values_BL=column(VALUES), batch_size=[len(LENGTHS)])
        return Done(batch[self.rows])

    def update(self, batch: CriticBatch) -> Done:
        self.batch = batch
        return Done({})


@dataclass(frozen=True)
class TableReward(ScoredAfterwards):
    rows: list[int]
    left_out: list[int]
    greedy_left_out: list[int]

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        is_greedy = len(rollouts) == len(task.rows)
        values = [[g, 0.0] for g in GREEDY] if is_greedy else [PARTS[n] for n in self.rows]
        parts_BK = torch.tensor(values)
        left_out = self.greedy_left_out if is_greedy else self.left_out
        rows = range(len(GREEDY)) if is_greedy else self.rows
        return Scores(
            *(("one", "two"), torch.tensor(WEIGHTS), parts_BK, parts_BK < 0),
            is_left_out_B=torch.tensor([n in left_out for n in rows]),
        )


def slopes_of(
    config: ExperimentConfig,
    rows: Sequence[int] = range(9),
    left_out: Sequence[int] = (),
    greedy_left_out: Sequence[int] = (),
) -> Rows:
    """Return the gradient of a step's loss by the log-prob of each response token."""
    policy: Any = TablePolicy(config, [*rows])
    critic, state = TableCritic([*rows]), dict[str, float]()
    given = Ingredients(
        policy=policy,
        engines=policy,
        batches=policy,
        sampling=SamplingParams(
            num_responses_per_prompt=GROUP_SIZE,
            max_response_tokens=MAX_TOKENS,
            temperature=1.0,
            stop_token_ids=(0,),
        ),
        reward=TableReward([*rows], [*left_out], [*greedy_left_out]),
        kl=KLCoefficient(config.algorithm.kl, num_rows=len(LENGTHS)),
        advantage_state=state,
        on_phase=lambda _: None,
    )
    if config.has_critic:
        report = build_actor_critic(config, given, critic)(1).step()
        assert critic.batch is not None
        num_learned = int(critic.batch.response_mask_BL.values().sum())
        assert num_learned == sum(LENGTHS[n] for n in rows if n not in left_out)
    else:
        report = build_policy_optimization(config, given).step()
    adapts = config.algorithm.kl.target_nats is not None
    assert ("policy/kl_coefficient" in report.update) == adapts
    assert not state or len(left_out) < len(rows)
    grads_N = policy.backend.logprobs_V.grad
    assert grads_N is not None
    return [row.tolist() for row in grads_N[MASK_BL.values()].split(LENGTHS)]


# -- the formulas --------------------------------------------------------------------------------

Advantages = Callable[[], Rows]
Slope = Callable[[float, float, float, list[float]], float]
"""Of a token, from its log-prob, its log-ratio, its advantage, and its response's log-ratios."""


def spread(of_rows: Sequence[float]) -> Rows:
    return [[value] * n for value, n in zip(of_rows, LENGTHS, strict=True)]


def of_groups(of_group: Callable[[list[float]], list[float]], rewards: Sequence[float]) -> Rows:
    return spread([each for g in GROUPS for each in of_group([rewards[n] for n in g])])


def centred(rewards: list[float]) -> list[float]:
    return [reward - fmean(rewards) for reward in rewards]


def standardised(rewards: list[float]) -> list[float]:
    return [reward / (stdev(rewards) + 1e-6) for reward in centred(rewards)]


def lead(rewards: list[float]) -> list[float]:
    second, best = sorted(rewards)[-2:]
    return [(best - second) / (stdev(rewards) + 1e-6) * (reward == best) for reward in rewards]


def over_mean(rewards: list[float]) -> list[float]:
    return [reward / (fmean(rewards) + 1e-6) for reward in centred(rewards)]


def left_out(rewards: list[float]) -> list[float]:
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    return [reward - other for reward, other in zip(rewards, others, strict=True)]


def whitened(rows: Rows) -> Rows:
    tokens = [value for row in rows for value in row]
    scale = (stdev(tokens) ** 2 + 1e-8) ** -0.5
    return [[(value - fmean(tokens)) * scale for value in row] for row in rows]


def gdpo() -> Rows:
    first, second = (of_groups(standardised, [row[k] for row in PARTS]) for k in (0, 1))
    summed = [WEIGHTS[0] * a[0] + WEIGHTS[1] * b[0] for a, b in zip(first, second, strict=True)]
    return spread([(value - fmean(summed)) / (stdev(summed) + 1e-6) for value in summed])


def gigpo() -> Rows:
    """Of one turn each; no two prompts are alike here, so no turn has another of its state."""
    return of_groups(centred, REWARDS)


def rae() -> Rows:
    """Of one player: each reward less the running mean of those before it."""
    advantages, mean = [], 0.0
    for reward in REWARDS:
        advantages.append(reward - mean)
        mean = 0.95 * mean + 0.05 * reward
    return spread(advantages)


def opo() -> Rows:
    advantages = []
    for group in GROUPS:
        num_tokens = sum(LENGTHS[n] for n in group)
        baseline = sum(LENGTHS[n] * REWARDS[n] for n in group) / num_tokens
        advantages += [REWARDS[n] - baseline for n in group]
    return spread(advantages)


def gae(lam: float = 0.95) -> Rows:
    rows = [
        [*((True, 0.0, value) for value in values[:-1]), (True, reward, values[-1])]
        for reward, values in zip(REWARDS, VALUES, strict=True)
    ]
    return whitened([obvious_advantages(row, gamma=1.0, lam=lam) for row in rows])


def optimal_token_baseline() -> Rows:
    rewards = [[0.0] * (n - 1) + [reward] for n, reward in zip(LENGTHS, REWARDS, strict=True)]
    mask = [[True] * n for n in LENGTHS]
    tokens = Tokens(GROUP_OF, mask, rewards, logprobs=OLD, others=SQUARED, greedy=[])
    baselines = obvious_baselines(tokens, align="response")
    return [[reward - b for b in row] for reward, row in zip(REWARDS, baselines, strict=True)]


def dapo() -> Rows:
    """Charged for length, of the groups whose rewards differ; the other has no loss at all."""
    charges = [max(0.0, (n - (MAX_TOKENS - 4)) / 4) for n in LENGTHS]
    charged = [r - c for r, c in zip(REWARDS, charges, strict=True)]
    return [*of_groups(standardised, charged)[:6], *spread([0.0] * 9)[6:]]


def distilled() -> Rows:
    pairs = zip(TEACHER, OLD, strict=True)
    return [[t - o for t, o in zip(*rows, strict=True)] for rows in pairs]


def by(loss: Callable[..., tuple[float, float]]) -> Slope:
    return lambda lp, u, a, us: loss(lp, u, a, us)[1]


def ppo(low: float = 0.2, high: float = 0.2) -> Slope:
    return lambda _, u, a, us: surrogate(math.exp(u), a, math.exp(u), low, high)[1]


def of_response(low: float, high: float) -> Slope:
    def slope(_: float, _u: float, a: float, us: list[float]) -> float:
        s = math.exp(fmean(us))
        return float(surrogate(s, a, s, low, high)[1])

    return slope


def plain(_: float, _u: float, a: float, _us: list[float]) -> float:
    return -a


def m2po() -> Slope:
    """Tokens that moved with their advantage lose the largest moves until the mean square fits."""
    pairs = zip((u for us in MOVES for u in us), (a for row in GRPO() for a in row), strict=True)
    squares = sorted(u * u for u, a in pairs if u * a > 0)
    assert fmean(squares) > MAX_SQUARE
    while fmean(squares) > MAX_SQUARE:
        squares.pop()
    return lambda _, u, a, us: -math.exp(u) * a if u * a <= 0 or u * u <= squares[-1] else 0.0


def flash_reinforce(_: float, u: float, a: float, us: list[float]) -> float:
    def divergence(q: float, p: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    current = CURRENT[MOVES.index(us)]
    divergences = [
        divergence(math.exp(lp), math.exp(lp - u)) for lp, u in zip(current, us, strict=True)
    ]
    return -math.exp(u) * a if fmean(divergences) <= 3e-3 else 0.0


def token_mean(_: int) -> float:
    return 1 / sum(LENGTHS)


def row_mean(length: int) -> float:
    return 1 / (len(LENGTHS) * length)


GRPO = lambda: of_groups(standardised, REWARDS)  # noqa: E731
FORMULAS: dict[str, tuple[Advantages, Slope, Callable[[int], float]]] = {
    "grpo": (GRPO, plain, token_mean),
    "bypass_pg_is": (GRPO, lambda _, u, a, us: -min(math.exp(sum(us)), 2) * a, token_mean),
    "bypass_ppo_clip": (GRPO, ppo(), token_mean),
    "cispo": (GRPO, lambda _, u, a, us: -min(math.exp(u), 5) * a, token_mean),
    "dapo": (dapo, ppo(high=0.28), lambda _: 1 / sum(LENGTHS[:6])),
    "distillation": (distilled, plain, token_mean),
    "dppo": (GRPO, by(dppo_tv), token_mean),
    "dr_grpo": (lambda: of_groups(centred, REWARDS), plain, lambda _: 1 / (9 * MAX_TOKENS)),
    "dro": (GRPO, lambda _, u, a, us: u - a, token_mean),
    "flash_reinforce": (
        lambda: spread([r - fmean(REWARDS) for r in REWARDS]),
        flash_reinforce,
        row_mean,
    ),
    "gdpo": (gdpo, plain, token_mean),
    "gigpo": (gigpo, plain, token_mean),
    "gkd": (lambda: spread([0.0] * 9), plain, token_mean),  # besides the divergence
    "gmpo": (GRPO, by(gmpo), row_mean),
    "gpg": (lambda: of_groups(centred, [r * 9 / 6 for r in REWARDS]), plain, token_mean),
    "grpo_passk": (lambda: of_groups(lead, REWARDS), plain, token_mean),
    "gspo": (GRPO, of_response(3e-4, 4e-4), row_mean),
    "luspo": (GRPO, of_response(2e-3, 2.5e-3), lambda _: 1 / 9),
    "m2po": (GRPO, m2po(), token_mean),
    "maxrl": (lambda: of_groups(over_mean, REWARDS), plain, token_mean),
    "opmd": (lambda: of_groups(centred, [r / 2 for r in REWARDS]), plain, token_mean),
    "opo": (opo, plain, token_mean),
    "optimal_token_baseline": (optimal_token_baseline, ppo(), token_mean),
    "ppo": (gae, ppo(), token_mean),
    "rae": (rae, plain, token_mean),
    "reinforce": (lambda: spread(REWARDS), plain, token_mean),
    "reinforce_plus_plus": (lambda: whitened(spread(REWARDS)), plain, token_mean),
    "reinforce_plus_plus_baseline": (
        lambda: whitened(of_groups(centred, REWARDS)),
        plain,
        token_mean,
    ),
    "remax": (
        lambda: spread([r - GREEDY[g] for r, g in zip(REWARDS, GROUP_OF, strict=True)]),
        plain,
        token_mean,
    ),
    "rloo": (lambda: of_groups(left_out, REWARDS), plain, lambda _: 1 / 9),
    "sapo": (GRPO, by(sapo), row_mean),
    "topr": (lambda: of_groups(centred, REWARDS), by(topr), token_mean),
    "turn_grpo": (GRPO, plain, token_mean),
    "turn_ppo": (gae, ppo(), token_mean),
    "vapo": (lambda: gae(lam=0.0), ppo(high=0.28), token_mean),  # 0.05 n is below 1 here
    "vespo": (GRPO, by(vespo), token_mean),
}


def expected_of(name: str) -> Rows:
    advantages, slope, weight = FORMULAS[name]
    return [
        [weight(len(us)) * slope(lp, u, a, us) for lp, u, a in zip(lps, us, gains, strict=True)]
        for lps, us, gains in zip(CURRENT, MOVES, advantages(), strict=True)
    ]


@cache
def config_for(name: str, *overrides: str) -> ExperimentConfig:
    values = values_of(
        f"algorithm={name}",
        *("algorithm.num_minibatches=1", "algorithm.max_sampling_rounds=1"),
        *("critic.num_warmup_steps=0", "critic.num_minibatches=1"),
        f"rollout.max_response_tokens={MAX_TOKENS}",
        *([f"algorithm.token_mask_args.max_square={MAX_SQUARE}"] if name == "m2po" else []),
        *overrides,
    )
    config, _ = read_config(values)  # a teacher's folder is not there
    assert config is not None
    return config


@pytest.mark.parametrize("name", FORMULAS)
def test_a_composed_algorithm_has_the_gradient_of_its_formula(name: str) -> None:
    assert slopes_of(config_for(name)) == [
        pytest.approx(row, rel=2e-4, abs=2e-6) for row in expected_of(name)
    ]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_that_looks_at_covariances_spares_or_charges_the_largest_one(name: str) -> None:
    """Here no covariance reaches 1, from which Clip-Cov drops tokens."""
    advantages = GRPO()
    means = [fmean([v for row in rows for v in row]) for rows in (CURRENT, advantages)]
    covariances = [
        [(lp - means[0]) * (a - means[1]) for lp, a in zip(*rows, strict=True)]
        for rows in zip(CURRENT, advantages, strict=True)
    ]
    largest = max(v for row in covariances for v in row)
    assert largest < 1 or name == "kl_cov"
    slope = ppo() if name == "clip_cov" else lambda _, u, a, us: -math.exp(u) * a
    expected = []
    for lps, us, gains, covs in zip(CURRENT, MOVES, advantages, covariances, strict=True):
        row = [slope(lp, u, a, us) for lp, u, a in zip(lps, us, gains, strict=True)]
        if name == "kl_cov" and largest in covs:
            at = covs.index(largest)
            row[at] += math.copysign(0.1, us[at])
        expected.append([value / sum(LENGTHS) for value in row])
    assert slopes_of(config_for(name)) == [
        pytest.approx(row, rel=2e-4, abs=2e-6) for row in expected
    ]


@pytest.mark.parametrize("name", ["gdpo", "grpo", "reinforce"])
def test_a_charge_is_paid_by_each_reward(name: str) -> None:
    """Of 6 tokens the last 4 cost a quarter each."""
    charges = [max(0.0, (n - 2) / 4) for n in LENGTHS]
    config = config_for(name, "algorithm.soft_overlong_tokens=4")
    slopes = slopes_of(config)
    charged = [[r - c for r in row] for row, c in zip(PARTS, charges, strict=True)]
    rewards = [r - c for r, c in zip(REWARDS, charges, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PARTS", charged)
        patch.setitem(globals(), "REWARDS", rewards)
        assert slopes == [pytest.approx(row, rel=2e-4, abs=2e-6) for row in expected_of(name)]


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_kl_penalty_is_paid_once_in_the_loss_or_by_the_tokens_rewards(
    name: str, placement: str
) -> None:
    config = config_for(
        name,
        *("algorithm.old_logprobs=recompute", "algorithm.kl.estimator=k1"),
        *(f"algorithm.kl.placement={placement}", "algorithm.kl.coefficient=0.1"),
        "algorithm.kl.target_nats=0.01",
    )
    in_loss, in_reward = (0.1 * (placement == place) for place in ("loss", "reward"))
    gains = []
    for reward, values, olds, references in zip(REWARDS, VALUES, OLD, TEACHER, strict=True):
        rewards = [-in_reward * (old - r) for old, r in zip(olds, references, strict=True)]
        rewards[-1] += reward
        row = [(True, r, v * (name == "ppo")) for r, v in zip(rewards, values, strict=True)]
        gains.append(obvious_advantages(row, gamma=1.0, lam=0.95 if name == "ppo" else 1.0))
    slope = ppo() if name == "ppo" else plain
    gains = whitened(gains) if name == "ppo" else gains
    expected = [
        [slope(lp, u, a, us) + in_loss for lp, u, a in zip(lps, us, each, strict=True)]
        for lps, us, each in zip(CURRENT, MOVES, gains, strict=True)
    ]
    assert slopes_of(config) == [
        pytest.approx([token_mean(0) * each for each in row], rel=2e-4, abs=2e-6)
        for row in expected
    ]


def test_an_advantage_that_reads_no_reward_refuses_charges() -> None:
    charges = ("algorithm.soft_overlong_tokens=4", "algorithm.kl.placement=reward")
    refused = find_violations(config_for("distillation", *charges))
    named = {violation.key for violation in refused if "reads no reward" in str(violation)}
    assert named == {"algorithm.soft_overlong_tokens", "algorithm.kl.placement"}
    mixed = ("algorithm.by_source={a: {advantage: rloo}}",)
    charged = find_violations(config_for("distillation", *charges, *mixed))  # those of one source
    assert not [violation for violation in charged if "reads no reward" in str(violation)]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *(("gpg", "{}"), ("gdpo", "{}"), ("grpo", "{scale: batch}"), ("rloo", "{scale: batch}")),
        *(("reinforce_plus_plus", "{}"), ("reinforce_plus_plus_baseline", "{}")),
        ("optimal_token_baseline", "{}"),
    ],
)
def test_groups_that_a_filter_drops_are_in_no_statistic(name: str, args: str) -> None:
    given = f"algorithm.advantage_args={args}"
    filtered = slopes_of(config_for(name, given, "algorithm.group_filter=zero_variance"))
    alone = slopes_of(config_for(name, given), rows=range(6))
    assert filtered == [pytest.approx(row, rel=1e-5, abs=1e-8) for row in alone]
    assert not any(value for row in filtered[6:] for value in row)


@pytest.mark.parametrize("name", ["grpo", "gpg", "gdpo", "opo", "distillation", "ppo", "turn_ppo"])
def test_rows_that_are_left_out_are_in_no_statistic(name: str) -> None:
    config = config_for(name)
    left = slopes_of(config, left_out=[4, 6, 7, 8])
    alone = slopes_of(config, rows=[0, 1, 2, 3, 5])
    assert left == [pytest.approx(row, rel=1e-5, abs=1e-8) for row in alone]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_whose_rows_are_all_left_out_teaches_nothing(name: str) -> None:
    slopes = slopes_of(config_for(name), left_out=range(9))
    assert not any(value for row in slopes for value in row)


def test_a_prompt_whose_greedy_response_is_left_out_is_not_learned_from() -> None:
    config = config_for("remax")
    assert slopes_of(config, greedy_left_out=[1]) == slopes_of(config, left_out=GROUPS[1])


def test_the_last_row_of_a_group_whose_others_are_left_out_is_not_learned_from() -> None:
    config = config_for("reinforce")  # whose baseline would not miss the others
    assert slopes_of(config, left_out=[6, 7]) == slopes_of(config, left_out=[6, 7, 8])
    assert any(slopes_of(config, rows=[0, 1, 6])[6])  # which had no others


def test_each_algorithm_has_a_formula() -> None:
    assert sorted([*FORMULAS, "clip_cov", "kl_cov"]) == ALGORITHMS
