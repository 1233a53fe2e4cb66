"""Ranks that build the engines of one layout as a worker does, and what checks ask of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms import aggregate
from hybridrl.algorithms.load import Part
from hybridrl.batch import jagged_from, row_lengths
from hybridrl.config.actor import ActorConfig, CriticOptimizerConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import LoraConfig
from hybridrl.metrics import Metrics, merge
from hybridrl.workers.build import (
    build_critic_engine,
    build_reference_engine,
    build_reward_engines,
    build_reward_trainer,
    build_train_engine,
)
from hybridrl.workers.train.checkpoint import shards_of
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from hybridrl.workers.train.value_engines import CriticEngine, RewardEngine
from tests.config.values import config_of
from tests.contract.layouts import ENGINES, Layout
from tests.ranks import RankPool
from tests.tiny_models import RECURRENT, Family
from tests.workers.train.engines import ACTOR, CPU, CRITIC, LOSS, MODEL, rows_of
from tests.workers.train.lora_engines import LORA

NO_ADAPTER = replace(LORA, enabled=False)


class Rank:
    """This rank, which builds engines of its layout; every build is a collective call."""

    def __init__(self, index: int, layout: Layout, config: ExperimentConfig) -> None:
        self.index = index
        self.layout = layout
        self._config = config

    def policy(
        self, folder: Path, config: ActorConfig = ACTOR, *, lora: LoraConfig = NO_ADAPTER
    ) -> PolicyEngine:
        return build_train_engine(self._config_with(config, lora), folder, CPU)

    def free_routes(self) -> None:
        """Let models choose their experts, whatever the layout says."""
        self.layout = replace(self.layout, replays_routes=False)

    def reference(
        self, folder: Path, *, policy: PolicyEngine, lora: LoraConfig = NO_ADAPTER
    ) -> PolicyEngine | BaseModelReference:
        engine = build_reference_engine(self._config_with(ACTOR, lora), folder, CPU, actor=policy)
        assert engine is not None
        return engine

    def critic(
        self, folder: Path, config: ActorConfig = ACTOR, *, value_clip: float = 0.0
    ) -> CriticEngine:
        own = CriticOptimizerConfig(lr=config.optimizer.lr)
        critic = replace(CRITIC, optimizer=own, value_clip=value_clip)
        of_actor = replace(config, optimizer=replace(config.optimizer, lr=0.0))
        whole = replace(self._config_with(of_actor, NO_ADAPTER), critic=critic)
        return build_critic_engine(whole, folder, CPU)

    def reward_model(self, folder: Path) -> RewardEngine:
        args = {"path": str(folder)}
        reward = replace(self._config.reward, function="model", functions={}, args=args)
        config = replace(self._config_with(ACTOR, NO_ADAPTER), reward=reward)
        return build_reward_engines(config, CPU)["model"]

    def reward_trainer(
        self, folder: Path, config: ActorConfig = ACTOR, *, center_coefficient: float = 0.0
    ) -> RewardEngine:
        section = replace(self._config.reward_model, center_coefficient=center_coefficient)
        whole = replace(self._config_with(config, NO_ADAPTER), reward_model=section)
        return build_reward_trainer(whole, folder, CPU)

    def _config_with(self, config: ActorConfig, lora: LoraConfig) -> ExperimentConfig:
        if lora.target_modules == LORA.target_modules:
            lora = replace(lora, target_modules=self.layout.adapted)
        options = replace(config.fsdp2, **self.layout.fsdp2)  # type: ignore[arg-type]
        actor = replace(config, engine=self.layout.engine, fsdp2=options)  # type: ignore[arg-type]
        actor = replace(actor, replay_routing=self.layout.replays_routes)
        return replace(self._config, actor=actor, lora=lora)


class RanksUnderTest:
    """The ranks of one layout. They stay between checks, so that each costs no start."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.engine = ENGINES[layout.engine]
        self._pool = RankPool(layout.num_ranks, deadline_s=layout.deadline_s)
        self._config = _config_of(layout)

    @property
    def families(self) -> tuple[Family, ...]:
        """Those of the engine that this layout of its ranks can compute."""
        shares_tokens = self.layout.fsdp2.get("context_parallel_size", 1) != 1
        left_out = RECURRENT if shares_tokens else ()
        return tuple(family for family in self.engine.families if family not in left_out)

    def families_among(self, some: Collection[Family]) -> list[Family]:
        """Those that its tests take in turns: of a mixture's layout its own, else its engine's."""
        known = self.families if self.layout.family in self.families else (self.layout.family,)
        return [family for family in known if family in some or len(known) == 1]

    def run(self, check: Callable[..., Any], *args: object) -> list[Any]:
        """Call ``check(rank: Rank, *args)`` on every rank; return the answers by rank."""
        return self._pool.run(_run_check, check, self.layout, self._config, args)

    def close(self) -> None:
        self._pool.close()


def _run_check(
    index: int,
    check: Callable[..., Any],
    layout: Layout,
    config: ExperimentConfig,
    args: tuple[object, ...],
) -> object:
    ENGINES[layout.engine].prepare()
    return check(Rank(index, layout, config), *args)


@cache
def _base_config() -> ExperimentConfig:
    return config_of("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1")


def _config_of(layout: Layout) -> ExperimentConfig:
    config = _base_config()
    return replace(
        config,
        seed=0,
        model=MODEL,
        megatron=replace(config.megatron, **layout.megatron),  # type: ignore[arg-type]
        cluster=replace(
            config.cluster, num_ranks_per_node=layout.num_ranks, collective_timeout_s=60.0
        ),
        trainer=replace(config.trainer, num_steps=10),
    )


def rows_of_rank(batch: Any, engine: ModelEngine, first: int) -> Any:
    """Return this rank's rows: the first ones are of data-parallel rank 0, later ones of others.

    No rows at all cannot be taken of jagged ones: a row without a response stands in.
    """
    if engine.dp_size == 1:
        return batch
    rows = rank_ranges(len(batch), engine.dp_size, first)[engine.dp_rank]
    return rows_of(batch, rows) if len(rows) else mute(rows_of(batch, [0]))


def rank_ranges(num_rows: int, dp_size: int, first: int) -> list[range]:
    if dp_size == 1:
        return [range(num_rows)]
    num_others = dp_size - 1
    edges = [first + (num_rows - first) * n // num_others for n in range(num_others + 1)]
    return [range(*edge) for edge in pairwise([0, *edges])]


def mute(batch: Any) -> Any:
    silent = batch.clone()
    nothing = torch.zeros_like(batch.response_mask_BL.values())
    silent.response_mask_BL = jagged_from(nothing, row_lengths(batch.token_ids_BL))
    return silent


def take_step(
    engine: PolicyEngine,
    batch: Any,
    *,
    first: int = 3,
    loss: Any = LOSS,
    aggregation: str = "token_mean",
) -> Metrics:
    """Take a step on this rank's rows; return the metrics of an output rank."""
    metrics = engine.update(
        rows_of_rank(batch, engine, first),
        loss=loss,
        aggregation=Part.of(vars(aggregate)[aggregation]),
        temperature=0.9,
        max_response_tokens=8,
    )
    return output_metrics(engine, metrics)


def output_metrics(engine: ModelEngine, metrics: Metrics) -> Metrics:
    """Return the metrics of an output rank; those of other ranks are not used."""
    return metrics if engine.is_output_rank else {}


def merge_metrics(answers: list[Metrics]) -> dict[str, float]:
    return {name: metric.value for name, metric in merge(answers).items()}


def copy_state(engine: ModelEngine) -> dict[str, Tensor]:
    return {
        key: shard.values.clone()
        for name, tensor in engine.checkpoint_tensors().items()
        for key, shard in shards_of(name, tensor)
    }


def assert_float32_learns(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    weights = {name: tensor for name, tensor in after.items() if name.startswith("model.")}
    assert weights.keys() == before.keys()
    assert {tensor.dtype for tensor in weights.values()} <= {torch.float32}
    held = {name: tensor for name, tensor in weights.items() if tensor.numel()}
    assert [name for name, tensor in held.items() if torch.equal(tensor, before[name])] == []
