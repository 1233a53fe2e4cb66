from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from hybridrl.algorithms.advantages.gae import gae
from hybridrl.batch import RolloutBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.conversations import lay_out_conversations
from hybridrl.errors import DriftError, PhaseError
from hybridrl.metrics import Sum
from hybridrl.sampler import Sample
from hybridrl.trainer.advantages import Targets
from hybridrl.trainer.train_batch import build_critic_batch, build_train_batch
from hybridrl.workers import build as build_module
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.build import build_rollout_engine
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.rollout.assemble import assemble_rollouts, require_known_tokens
from hybridrl.workers.rollout.embedded.tensor_memory import checksum
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.config.values import config_of
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_classifier, make_tiny_model
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.train.engines import make_rows, to_rollouts, update


def small_config(*overrides: str, **rollout: Any) -> ExperimentConfig:
    config = config_of("rollout.max_response_tokens=6", *overrides)
    return replace(config, rollout=replace(config.rollout, stage_timeout_s=30.0, **rollout))


def start_worker(
    config: ExperimentConfig,
    folder: Path,
    kind: Any = ActorRolloutWorker,
    *,
    beside: ActorRolloutWorker | None = None,
) -> Any:
    """Build a worker as a ``WorkerHost`` does, in one process with those that are there already."""
    worker = kind.__new__(kind, config, folder)
    worker.fused = {} if beside is None else beside.fused
    worker.fused["actor" if beside is None else "critic"] = worker
    kind.__init__(worker, config, folder)
    return worker


def _sums(engine: PolicyEngine) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in engine.full_weights()}


def _two_steps(rank: int, folder: Path, config: ExperimentConfig) -> None:
    worker = start_worker(config, folder)
    reference, actor = worker._reference, worker._actor
    assert isinstance(reference, PolicyEngine)
    frozen = _sums(reference)
    reward_model = worker._reward_models["model"]
    rows = lay_out_conversations([[1, 2, 3], [4]])
    scores = worker.compute_rewards(rows, model="model").rewards_B
    sent_bytes = sum(spec.num_bytes for spec in actor.weight_specs(WeightSet.BASE))
    for step in range(3):
        worker.sharding.take_metrics()
        with worker.sharding.rollout_phase() as engine:
            assert engine is not None
            for part in TrainState:
                assert reference.resident_bytes(part) == reward_model.resident_bytes(part) == 0
            with pytest.raises(PhaseError, match="the rollout engine holds the device"):
                worker.compute_rewards(rows, model="model")
            sampled = engine.checksums()
        assert reference.resident_bytes(TrainState.PARAMETERS) > 0
        assert worker.sharding.take_metrics()["memory/synced_bytes"] == Sum(sent_bytes)
        learned = _sums(actor)
        assert {name: sampled[name] for name in learned} == learned
        assert _sums(reference) == frozen
        assert torch.equal(worker.compute_rewards(rows, model="model").rewards_B, scores)
        assert (learned == frozen) == (step == 0)
        update(actor, make_rows(4, seed=step))
        worker.sharding.weights_changed(version=step + 1)
    worker.close()


@pytest.mark.shows("4.11")
def test_a_reference_and_a_reward_model_leave_the_device_in_each_phase(tmp_path: Path) -> None:
    config = small_config(
        *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1", "rollout.sleep=true"),
        num_slots=4,
    )
    args = {"path": str(make_tiny_classifier(tmp_path / "scorer"))}
    config = replace(config, reward=replace(config.reward, function="model", args=args))
    run_ranks(1, _two_steps, make_tiny_model(tmp_path / "model"), config)


def _sample(worker: ActorRolloutWorker) -> RolloutBatch:
    rollouts = worker.generate(make_prompts((4, 9)), sampling_params(group=2, tokens=6))
    assert rollouts is not None
    return rollouts


def _learn(worker: ActorRolloutWorker, rollouts: RolloutBatch) -> None:
    advantages_BL = torch.ones_like(rollouts.sampler_logprobs_BL)
    batch = build_train_batch(rollouts, worker.compute_logprobs(rollouts), advantages_BL)
    worker.update(batch, kl_coefficient=0.0)


def _learn_until_weights_are_wrong(rank: int, folder: Path, config: ExperimentConfig) -> None:
    worker = start_worker(config, folder)
    _learn(worker, _sample(worker))  # looked at, and well
    _sample(worker)  # sends the weights of this version
    with worker.sharding.rollout_phase() as engine, torch.no_grad():
        engine._tensors["model.norm.weight"].mul_(-0.5)
    rollouts, before = _sample(worker), _sums(worker._actor)
    with pytest.raises(DriftError, match="No optimizer step was taken"):
        _learn(worker, rollouts)
    assert _sums(worker._actor) == before
    worker.close()


@pytest.mark.shows("1.18")
def test_nothing_is_learned_from_an_engine_with_a_wrong_weight(tmp_path: Path) -> None:
    config = small_config(
        "rollout.sleep=false",
        *("algorithm.num_epochs=2", "algorithm.old_logprobs=recompute"),  # two updates a step
        canary_max_drift_nats=0.01,
    )
    run_ranks(1, _learn_until_weights_are_wrong, make_tiny_model(tmp_path / "model"), config)


@pytest.mark.parametrize("shift", [-64, 64])
def test_token_ids_that_the_model_lacks_are_refused(shift: int) -> None:
    prompts = make_prompts((4,))
    response = Sample(torch.tensor([5, 6]) + shift, torch.zeros(2), "stop", weight_version=0)
    rollouts = assemble_rollouts(prompts, [response], policy_version=0)
    with pytest.raises(DriftError, match=r"2 token ids outside of 0\.\.63"):
        require_known_tokens(rollouts, vocab_size=64)


def _keep_seeds(rank: int, folder: Path, config: ExperimentConfig) -> None:
    seeds = []

    def build(config: ExperimentConfig, *args: Any, **options: Any) -> RolloutEngine:
        seeds.append(config.seed)
        return build_rollout_engine(config, *args, **options)

    build_module.build_rollout_engine = build
    worker = start_worker(config, folder)
    gathered = worker.sharding._control.gather("seeds", str(seeds))
    assert gathered == [f"[{config.seed}]", f"[{config.seed + 1}]"]
    worker.close()


def test_engines_of_two_ranks_draw_other_random_numbers(tmp_path: Path) -> None:
    config = small_config("cluster.num_ranks_per_node=2")
    run_ranks(2, _keep_seeds, make_tiny_model(tmp_path / "model"), config)


def _three_cycles(rank: int, folder: Path, config: ExperimentConfig) -> None:
    actor = start_worker(config, folder)
    critic = start_worker(config, folder, CriticWorker, beside=actor)
    engine = critic._engine
    for cycle in range(3):
        with actor.sharding.rollout_phase() as rollout_engine:
            assert rollout_engine is not None
            assert not any(engine.resident_bytes(part) for part in TrainState)
            with pytest.raises(PhaseError, match="the rollout engine holds the device"):
                critic.compute_values(to_rollouts(make_rows(2)))
        rollouts = actor.generate(make_prompts((4, 9, 5)), sampling_params(group=2, tokens=6))
        assert rollouts is not None
        assert engine.resident_bytes(TrainState.PARAMETERS) > 0
        assert bool(engine.resident_bytes(TrainState.OPTIMIZER)) == (cycle > 0)
        values_BL = critic.compute_values(rollouts).values_BL
        assert bool(values_BL.values().any()) == (cycle > 0)
        rewards_BL = torch.ones_like(values_BL)
        estimate = gae(rewards_BL, values_BL, rollouts.response_mask_BL)
        targets = Targets(estimate.advantages_BL, estimate.returns_BL, charged={})
        metrics = critic.update(build_critic_batch(rollouts, values_BL, targets))
        assert metrics.get("critic/updates", metrics["critic/lr"]).value > 0
        assert {"time/critic_values_s", "time/critic_update_s"} <= set(metrics)
        peaks = {f"memory/{name}_peak_bytes/max" for name in ("sync", "values", "critic_update")}
        assert peaks <= set(metrics)  # told each step, also where the policy does not learn yet
    critic.close()
    actor.close()


def test_a_fused_critic_leaves_the_device_in_each_rollout_phase_and_learns_after_it(
    tmp_path: Path,
) -> None:
    config = small_config(
        *("algorithm=ppo", "rollout.sleep=true", "critic.num_minibatches=2"),
        *("trainer.num_prompts_per_step=3", "rollout.num_responses_per_prompt=2"),
        num_slots=4,
    )
    config = replace(config, cluster=replace(config.cluster, num_ranks_per_node=2))
    run_ranks(2, _three_cycles, make_tiny_model(tmp_path / "model"), config)


NUM_RANKS = 4

Split = tuple[int, ...]


def _splits_of_a_start(rank: int, folder: Path, config: ExperimentConfig) -> list[Split]:
    """Start a worker; return the groups for which this rank would split NCCL's communicator.

    By torch's rule for a default group that is bound to a GPU: a member does for a group with NCCL,
    another rank that is asked always.
    """
    splits: list[Split] = []
    make = distributed_c10d._new_group_with_tag

    def record(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        members = tuple(range(NUM_RANKS) if ranks is None else sorted(ranks))
        backend = args[1] if len(args) > 1 else options.get("backend")
        if rank in members:
            is_split = backend != "gloo"
        else:
            is_split = not options.get("use_local_synchronization")
        if is_split:
            splits.append(members)
        return make(ranks, *args, **options)

    distributed_c10d._new_group_with_tag = record
    start_worker(config, folder).close()
    return splits


@pytest.mark.parametrize("actor", ["fsdp2", "two replicas", "shared tokens", "megatron"])
def test_all_ranks_would_split_nccls_communicator_for_the_same_groups(
    actor: str, tmp_path: Path
) -> None:
    overrides = {
        "fsdp2": (),
        "two replicas": ("actor.fsdp2.num_replicas=2",),
        "shared tokens": ("actor.fsdp2.context_parallel_size=2",),
        "megatron": ("actor=megatron", "megatron.tensor_parallel_size=2"),
    }
    config = small_config(
        f"cluster.num_ranks_per_node={NUM_RANKS}", *overrides[actor], tensor_parallel_size=2
    )
    folder = make_tiny_model(tmp_path / "model")
    first, *others = run_ranks(NUM_RANKS, _splits_of_a_start, folder, config)
    assert others == [first] * (NUM_RANKS - 1)
    assert (first != []) == (actor != "fsdp2")
