from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import LogprobBatch
from hybridrl.config.topology import Fused
from hybridrl.errors import DriftError, EngineError, LedgerError
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers.rollout.buckets import stage_by_reference
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_files import load_weights
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.sglang.engines import server_spec, sglang_config
from tests.sglang.lora_device import GREEDY, PROMPTS, SAMPLING, ForgetfulEngine, ServedDevice
from tests.sglang.weights import assert_serves
from tests.workers.rollout.engines import stop, tokens_of
from tests.workers.sharding.faulty_streams import tear
from tests.workers.train.engines import CPU, build_fsdp2
from tests.workers.train.lora_engines import build_lora, randomize, with_lora


def fused(engine: SGLangEngine, trainer: PolicyEngine) -> FusedEngines:
    """The engine as it is synced, without the life cycle, that would restart it after a failure."""
    config = sglang_config(verify_weights="first")
    stop(engine)
    engines = FusedEngines(
        ManagedEngine(engine, config=config, device=CPU),
        engines=Fused(1, 1).engines,
        config=config,
        device=CPU,
        control=ControlGroup(timeout_s=60.0),
    )
    engines.attach(trainer, resends_base=True)
    return engines


def is_proved(engines: FusedEngines) -> bool:
    assert engines.managed is not None
    return engines.managed.is_proved


@pytest.mark.shows("1.6")
def test_a_true_first_sync_is_proved_and_later_ones_are_only_sent(
    engine: SGLangEngine, served_model: Path
) -> None:
    trainer = build_fsdp2(served_model)
    engines = fused(engine, trainer)
    for version in range(3):
        engines.trained_version = version
        assert engines.sync() == {}
        assert is_proved(engines)
        tear(trainer, word="norm", at_pass=99)
    engine.continue_generation()
    assert engine.run(single_turn(PROMPTS, GREEDY))


def test_so_it_is_with_a_merged_adapter(engine: SGLangEngine, served_model: Path) -> None:
    trainer = build_lora(served_model, lora=with_lora(sync="merged"))
    randomize(trainer)
    engines = fused(engine, trainer)
    for version in range(2):
        engines.trained_version = version
        assert engines.sync() == {}
    assert is_proved(engines)


@pytest.mark.shows("1.6")
def test_one_wrong_number_in_the_stream_is_found_by_tensor_name(
    engine: SGLangEngine, served_model: Path
) -> None:
    trainer = build_fsdp2(served_model)
    engines = fused(engine, trainer)
    tear(trainer, word="q_proj", at_pass=1)
    (reason,) = engines.sync().values()
    assert reason.startswith("LedgerError: 1 weights of the rollout engine are not the trainer's")
    assert "model.layers.1.self_attn.qkv_proj.weight" in reason  # as the server calls it
    assert not is_proved(engines)


def test_weights_that_a_transport_lost_are_found(
    engine: SGLangEngine, served_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger believes a delivery; only what was scrambled in between tells that none came."""
    engines = fused(engine, build_fsdp2(served_model))
    monkeypatch.setattr(engine.transport, "load", lambda server, staged, handles: None)
    (reason,) = engines.sync().values()
    assert "weights of the rollout engine are not the trainer's" in reason
    assert not is_proved(engines)


@pytest.mark.shows("1.6")
def test_ranks_behind_the_first_may_load_files_late_and_are_compared(
    served_model: Path, tmp_path: Path
) -> None:
    """SGLang answers from its first rank, whatever the others do."""
    late = tmp_path / "late"
    late.write_text("1")
    spec = server_spec(
        served_model, tensor_parallel_size=2, transport="disk", verify_weights="always"
    )
    engine = SGLangEngine(spec, variables={"LATE_RANK": str(late)})
    try:
        stop(engine)
        managed = ManagedEngine(engine, config=spec.rollout, device=CPU)
        load = partial(load_weights, managed, source=served_model, bucket_bytes=2**14)
        load(version=0)
        engine.continue_generation()
        assert_serves(engine, served_model)
        stop(engine)
        late.write_text("never")
        with pytest.raises(LedgerError, match=r"are not the trainer's .*_proj\.weight \(rank 1\)"):
            load(version=1)
    finally:
        engine.shutdown()


def test_a_whole_run_begins_with_the_proof_and_goes_on(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    device = ServedDevice(lora_engine, served_model, "resend", verify_weights="first")
    answers = []
    for _ in range(2):
        assert device.mismatch_nats() < 1e-4
        answers.append(tokens_of(device.sample(GREEDY)))
        engines = device.manager._engines
        assert isinstance(engines, FusedEngines)
        assert is_proved(engines)
        device.train()
    assert answers[0] != answers[1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rollout\.verify_weights=never"):
        folder = WeightFolder(tmp_path / "missing", dtype=torch.float32)
        folder.write(stage_by_reference([("w", torch.zeros(2))]), [])


def _learn(device: ServedDevice) -> None:
    rollouts = device.rollouts()
    none = LogprobBatch(batch_size=[len(rollouts)])
    batch = build_train_batch(rollouts, none, rollouts.sampler_logprobs_BL)
    device.trainer.update(
        batch,
        loss=PolicyGradientLoss(policy_loss=Part.of(ppo_clip), max_drift_nats=0.01),
        aggregation=TOKEN_MEAN,
        temperature=SAMPLING.temperature,
        max_response_tokens=8,
    )
    device.version += 1
    device.manager.weights_changed(version=device.version)


@pytest.mark.shows("1.18")
def test_a_base_that_did_not_survive_a_sleep_is_not_learned_from(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    """The garbage of an adapter on memory that nobody refilled."""
    device = ServedDevice(lora_engine, served_model, "resident")
    _learn(device)
    _learn(device)
    lora_engine.scramble()
    with pytest.raises(DriftError, match="are not the same policy"):
        _learn(device)
