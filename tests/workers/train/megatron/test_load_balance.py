from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridrl.batch import TrainBatch
from hybridrl.metrics import Metrics
from tests.contract.plain import PlainPolicy
from tests.contract.ranks_under_test import Rank, RanksUnderTest, mute, take_step
from tests.contract.steps import merged_steps
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    assert_same_weights,
    make_rows,
    rows_of,
    weights_of,
)
from tests.workers.train.megatron.expert_layouts import cut_as

COEFFICIENT = 0.7
ALL = ("1", "ep2", "tp2-sp-ep2", "pp2", "pp2-vp2", "pp2-ep2", "cp2-ep2")
# Every row is a pack, on all layouts the same.
ALONE: dict[str, Any] = {"max_tokens_per_microbatch": 1}


def _lessons() -> list[TrainBatch]:
    return [rows_of(make_rows(12, seed=seed), range(6)) for seed in range(2)]


class PlainBalance(PlainPolicy):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, OPTIMIZER)
        self._heard: list[Tensor] = []
        layers = [layer.mlp for layer in self.model.model.layers]
        self.routers = [mlp.gate for mlp in layers if hasattr(mlp, "gate")]
        for router in self.routers:
            router.register_forward_pre_hook(
                lambda gate, args: self._heard.append(linear(args[0], gate.weight))
            )

    def listen(self, batch: TrainBatch) -> list[list[Tensor]]:
        """Return the logits [tokens, experts] of each router for each row, its last token not."""
        rows = []
        for tokens in batch.token_ids_BL.unbind():
            self._heard.clear()
            self.model(tokens[None, :-1])
            rows.append(list(self._heard))
        return rows

    def balance(self, batch: TrainBatch) -> tuple[list[Tensor], float]:
        config = self.model.config
        rows = self.listen(batch)
        num_tokens = sum(len(layers[0]) for layers in rows)
        losses, loads = [], []
        for layer in range(len(self.routers)):
            loss, routes = torch.zeros(()), torch.zeros(config.num_experts)
            for layers in rows:
                probabilities = layers[layer].softmax(dim=-1)
                chosen = probabilities.topk(config.num_experts_per_tok).indices
                own = torch.bincount(chosen.flatten(), minlength=config.num_experts)
                mean = probabilities.mean(dim=0)
                pack = config.num_experts * (own / own.sum() * mean).sum()
                loss = loss + pack * len(probabilities) / num_tokens
                routes += own
            losses.append(loss)
            loads.append((routes.max() / routes.mean()).item())
        return losses, max(loads)


def _learn_balance(rank: Rank, folder: Path) -> tuple[list[Metrics], dict[str, Tensor]]:
    engine = rank.policy(folder, replace(ACTOR, **ALONE))
    reported = [take_step(engine, batch, first=4) for batch in _lessons()]
    return reported, weights_of(engine)


@cut_as(*ALL, load_balance_coefficient=COEFFICIENT)
def test_two_steps_take_the_loss_of_the_formula_once(ranks: RanksUnderTest, folder: Path) -> None:
    plain = PlainBalance(folder)
    expected = []
    for batch in _lessons():
        losses, load = plain.balance(batch)
        logprobs, _ = plain.score(batch, temperature=0.9)
        mask = batch.response_mask_BL.values()
        gains = (logprobs - logprobs.detach()).exp() * batch.advantages_BL.values()
        total = torch.stack(losses).sum()
        _, norm = plain.step(COEFFICIENT * total - (gains * mask).sum() / mask.sum())
        expected.append((total.item() / len(losses), load, norm))
    answers = ranks.run(_learn_balance, folder)
    steps = merged_steps([metrics for metrics, _ in answers])
    for reported, (loss, load, norm) in zip(steps, expected, strict=True):
        assert reported["moe/load_balance_loss"] == pytest.approx(loss, rel=1e-5)
        assert reported["moe/max_expert_load"] == pytest.approx(load, rel=1e-6)
        assert reported["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_same_weights(answers[0][1], plain.weights(), atol=1e-5)


def _only_measure(rank: Rank, folder: Path) -> list[Metrics]:
    engine = rank.policy(folder, replace(ACTOR, gradient_checkpointing=True, **ALONE))
    reported = [take_step(engine, batch, first=4) for batch in _lessons()]
    return [*reported, take_step(engine, mute(_lessons()[0]), first=4)]


@cut_as("1", "tp2-sp-ep2", "pp2-ep2", by_night=["1"])
def test_balance_is_measured_per_step_without_a_coefficient(
    ranks: RanksUnderTest, folder: Path
) -> None:
    one, two, mute_step = merged_steps(ranks.run(_only_measure, folder))
    losses, load = PlainBalance(folder).balance(_lessons()[0])
    expected = torch.stack(losses).mean().item()
    assert one["moe/load_balance_loss"] == pytest.approx(expected, rel=1e-5)
    assert one["moe/max_expert_load"] == pytest.approx(load, rel=1e-6)
    assert 0.5 < two["moe/load_balance_loss"] < 3
    assert one["moe/max_expert_load"] != two["moe/max_expert_load"]
    assert 1 < two["moe/max_expert_load"] <= 6
    assert "moe/load_balance_loss" not in mute_step
