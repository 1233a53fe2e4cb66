"""What holds for every training engine, on one rank; ranks are in test_ranks_agree.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.batch import jagged_from, response_lengths, row_lengths
from hybridrl.errors import DataError, PhaseError, RunFolderError
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.protocol import TrainEngine, TrainState
from tests.models import Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    BUILDERS,
    assert_same_weights,
    make_rows,
    rows_of,
    to_rollouts,
    to_supervised,
    update,
    weights_of,
    with_nan_advantage,
    with_optimizer,
)


@pytest.fixture(params=sorted(BUILDERS))
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def engine(engine_name: str, folder: Path) -> TrainEngine:
    return BUILDERS[engine_name](folder)


@pytest.mark.parametrize("num_siblings", [1, 6])
def test_logprobs_and_entropies_are_those_of_the_plain_model(
    engine: TrainEngine, folder: Path, num_siblings: int
) -> None:
    batch = make_rows(12, num_siblings=num_siblings)
    scored = engine.compute_logprobs(to_rollouts(batch), temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(folder)
    columns = (batch.token_ids_BL, batch.response_mask_BL)
    results = (scored.logprobs_BL, scored.entropy_BL)
    for tokens, mask, logprobs, entropies in zip(
        *(column.unbind() for column in columns + results), strict=True
    ):
        with torch.no_grad():
            all_logprobs = torch.log_softmax(model(tokens[None]).logits[0] / 0.7, dim=-1)
        expected = torch.zeros(len(tokens))
        expected[1:] = all_logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
        entropy = torch.zeros(len(tokens))
        entropy[1:] = -(all_logprobs.exp() * all_logprobs).sum(-1)[:-1]
        torch.testing.assert_close(logprobs, expected * mask, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies, entropy * mask, atol=1e-5, rtol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("num_siblings", [1, 4])
def test_an_update_does_not_depend_on_microbatches_nor_on_row_order(
    engine_name: str, folder: Path, aggregation: str, num_siblings: int
) -> None:
    batch = make_rows(12, num_siblings=num_siblings)
    whole = BUILDERS[engine_name](folder)
    parts = BUILDERS[engine_name](folder, config=replace(ACTOR, max_tokens_per_microbatch=25))
    single = BUILDERS[engine_name](folder, config=replace(ACTOR, max_tokens_per_microbatch=1))
    shuffled = rows_of(batch, torch.randperm(12, generator=torch.manual_seed(1)).tolist())
    for _ in range(3):
        one = update(whole, batch, aggregation=aggregation)
        for engine in (parts, single):
            other = update(engine, shuffled, aggregation=aggregation)
            for name in ("policy/grad_norm", "loss/policy", "data/loss_tokens"):
                assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
        assert (one["data/microbatches"], other["data/microbatches"]) == (1, 12)
    assert_same_weights(weights_of(whole), weights_of(parts), atol=2e-6)
    assert_same_weights(weights_of(whole), weights_of(single), atol=2e-6)


def test_siblings_share_the_computation_of_their_prompt(engine_name: str, folder: Path) -> None:
    batch = make_rows(12, num_siblings=4)
    prompts = row_lengths(batch.token_ids_BL) - response_lengths(batch.response_mask_BL)
    num_tokens = int(row_lengths(batch.token_ids_BL).sum()) - 12
    alone = BUILDERS[engine_name](folder, config=replace(ACTOR, max_tokens_per_microbatch=1))
    assert update(alone, batch)["data/train_tokens"] == num_tokens
    together = BUILDERS[engine_name](folder)
    num_spared = int(prompts[0] + prompts[4] + prompts[8]) * 3
    assert update(together, batch)["data/train_tokens"] == num_tokens - num_spared


def test_checkpointing_activations_changes_nothing_but_memory(
    engine_name: str, folder: Path
) -> None:
    plain = BUILDERS[engine_name](folder)
    frugal = BUILDERS[engine_name](folder, config=replace(ACTOR, gradient_checkpointing=True))
    for seed in range(2):
        update(plain, make_rows(5, seed=seed))
        update(frugal, make_rows(5, seed=seed))
    assert_same_weights(weights_of(plain), weights_of(frugal), atol=1e-7)


def test_absent_old_logprobs_are_the_detached_current_ones(engine_name: str, folder: Path) -> None:
    one, other = BUILDERS[engine_name](folder), BUILDERS[engine_name](folder)
    batch = make_rows(6)
    filled = batch.clone()
    scored = other.compute_logprobs(to_rollouts(batch), temperature=0.9)
    filled.old_logprobs_BL = scored.logprobs_BL
    assert update(one, batch)["policy/ratio/mean"] == 1.0
    update(other, filled)
    assert_same_weights(weights_of(one), weights_of(other), atol=1e-7)


def test_columns_stay_with_their_tokens(engine: TrainEngine) -> None:
    # Were old or reference log-probs mixed up between tokens, both distances would not be 0.
    batch = make_rows(7)
    scored = engine.compute_logprobs(to_rollouts(batch), temperature=1.0).logprobs_BL
    batch.old_logprobs_BL = batch.reference_logprobs_BL = batch.sampler_logprobs_BL = scored
    metrics = engine.update(
        batch,
        loss=PolicyGradientLoss(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1),
        aggregation="token_mean",
        temperature=1.0,
        max_response_tokens=8,
    )
    for name in ("kl_to_old_nats/mean", "kl_to_reference_nats/mean", "sampler_mismatch_nats/max"):
        assert metrics[f"policy/{name}"].value == pytest.approx(0.0, abs=2e-6), name


def test_supervised_steps_learn_the_answers(engine_name: str, folder: Path) -> None:
    engine = BUILDERS[engine_name](folder, config=with_optimizer(lr=0.01, eps=1e-8))
    batch = to_supervised(make_rows(6))
    losses = [engine.fit(batch)["loss/supervised_nats"].value for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_a_policy_gradient_raises_what_was_better_than_its_siblings(engine: TrainEngine) -> None:
    batch = make_rows(6)
    rollouts = to_rollouts(batch)
    before = engine.compute_logprobs(rollouts, temperature=0.9).logprobs_BL.values()
    for _ in range(3):
        update(engine, batch)
    after = engine.compute_logprobs(rollouts, temperature=0.9).logprobs_BL.values()
    assert ((after - before) * batch.advantages_BL.values()).sum() > 0


def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(
    engine_name: str, folder: Path
) -> None:
    config = with_optimizer(eps=1e-4)
    one = BUILDERS[engine_name](folder, config=config)
    other = BUILDERS[engine_name](folder, config=config)
    for seed in range(3):
        batch = make_rows(5, seed=seed)
        spoiled = update(one, with_nan_advantage(batch, row=2))
        assert (spoiled["policy/skipped_updates"], spoiled["policy/updates"]) == (1, 0)
        assert "policy/grad_norm" not in spoiled
        for engine in (one, other):
            good = update(engine, batch)
            assert (good["policy/skipped_updates"], good["policy/updates"]) == (0, 1)
    assert_same_weights(weights_of(one), weights_of(other))


def test_gradients_are_clipped_to_the_global_norm(engine_name: str, folder: Path) -> None:
    # SGD in disguise: beta1 = 0 and a huge eps make the step lr / eps * gradient.
    lazy = {"beta1": 0.0, "beta2": 0.0, "eps": 1e6, "lr": 1e6}
    free = BUILDERS[engine_name](folder, config=with_optimizer(**lazy))
    norm = update(free, make_rows(5))["policy/grad_norm"]
    tight = BUILDERS[engine_name](folder, config=with_optimizer(max_grad_norm=norm / 4, **lazy))
    start = weights_of(tight)
    assert update(tight, make_rows(5))["policy/grad_norm"] == pytest.approx(norm)
    change = torch.cat([(w - start[n]).flatten() for n, w in weights_of(tight).items()])
    assert change.norm().item() == pytest.approx(norm / 4, rel=1e-3)


def test_rows_without_a_response_count_as_rows_but_are_not_computed(engine: TrainEngine) -> None:
    batch = make_rows(4)
    lengths_B = row_lengths(batch.token_ids_BL)
    mask = batch.response_mask_BL.values().clone()
    mask[: int(lengths_B[0])] = False
    batch.response_mask_BL = jagged_from(mask, lengths_B)
    metrics = update(engine, batch)
    assert metrics["data/train_tokens"] == int(lengths_B[1:].sum()) - 3
    batch.response_mask_BL = jagged_from(torch.zeros_like(mask), lengths_B)
    before = weights_of(engine)
    assert "data/train_tokens" not in update(engine, batch)
    scored = engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    assert not scored.logprobs_BL.values().any()
    assert list(before) == list(weights_of(engine))


def test_a_row_that_begins_with_a_response_token_is_refused(engine: TrainEngine) -> None:
    batch = make_rows(3)
    lengths_B = row_lengths(batch.token_ids_BL)
    mask = batch.response_mask_BL.values().clone()
    mask[int(lengths_B[0])] = True
    batch.response_mask_BL = jagged_from(mask, lengths_B)
    with pytest.raises(DataError, match="row 1 of the batch begins with a response token"):
        update(engine, batch)


def test_batches_are_only_read(engine: TrainEngine) -> None:
    batch, untouched = make_rows(5), make_rows(5)
    update(engine, batch)
    engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    for name in ("token_ids_BL", "response_mask_BL", "advantages_BL", "sampler_logprobs_BL"):
        assert torch.equal(getattr(batch, name).values(), getattr(untouched, name).values())


def test_training_with_offloads_in_between_is_bitwise_the_same(
    engine_name: str, folder: Path
) -> None:
    resting, steady = BUILDERS[engine_name](folder), BUILDERS[engine_name](folder)
    for seed in range(4):
        for engine in (resting, steady):
            update(engine, make_rows(5, seed=seed))
        resident = {part: resting.resident_bytes(part) for part in TrainState}
        for _ in range(2):
            for part in TrainState:
                resting.offload(part)
                resting.offload(part)
                assert resting.resident_bytes(part) == 0
            for part in TrainState:
                resting.restore(part)
                resting.restore(part)
        assert resident == {part: resting.resident_bytes(part) for part in TrainState}
        assert resident[TrainState.OPTIMIZER] >= 2 * resident[TrainState.PARAMETERS] > 0
        rollouts = to_rollouts(make_rows(3))
        one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (resting, steady))
        assert torch.equal(one.logprobs_BL.values(), other.logprobs_BL.values())
    assert_same_weights(weights_of(resting), weights_of(steady))


def test_each_part_is_offloaded_alone_and_its_use_is_refused(engine: TrainEngine) -> None:
    batch = make_rows(4)
    update(engine, batch)
    for part in TrainState:
        others = {p: engine.resident_bytes(p) for p in TrainState if p is not part}
        engine.offload(part)
        assert others == {p: engine.resident_bytes(p) for p in others}
        with pytest.raises(PhaseError, match=rf"update\(\) needs {part.value}"):
            update(engine, batch)
        engine.restore(part)
    engine.offload(TrainState.OPTIMIZER)
    engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    engine.offload(TrainState.PARAMETERS)
    with pytest.raises(PhaseError, match=r"compute_logprobs\(\) needs parameters"):
        engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    with pytest.raises(PhaseError, match=r"full_weights\(\) needs parameters"):
        next(engine.full_weights())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_weights_stream_under_their_hf_names_as_announced(
    engine_name: str, tmp_path: Path, family: Family, tie_embeddings: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_embeddings=tie_embeddings)
    engine = BUILDERS[engine_name](folder)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    streamed = dict(engine.full_weights())
    assert ("lm_head.weight" in streamed) is not tie_embeddings
    assert_same_weights(streamed, {name: p.detach() for name, p in expected.items()})
    for spec, (name, tensor) in zip(engine.weight_specs(), streamed.items(), strict=True):
        assert (spec.name, spec.shape, spec.num_bytes) == (name, tensor.shape, tensor.nbytes)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_an_export_loads_elsewhere_with_the_trained_weights(
    engine_name: str, tmp_path: Path, tie_embeddings: bool
) -> None:
    source = make_tiny_model(tmp_path / "model", tie_embeddings=tie_embeddings)
    (source / "tokenizer.json").write_text("{}")
    engine = BUILDERS[engine_name](source)
    update(engine, make_rows(4))
    target = tmp_path / "deep" / "exported"
    engine.export_hf(target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["exported"]
    assert (target / "tokenizer.json").read_text() == "{}"
    assert "hybridrl" not in (target / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(target)
    trained = {name: p.detach() for name, p in loaded.named_parameters()}
    assert_same_weights(weights_of(engine), trained)
    assert_same_weights(weights_of(BUILDERS[engine_name](target)), trained)


def test_an_export_never_overwrites_and_a_failed_one_leaves_nothing(
    engine: TrainEngine, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunFolderError, match="taken exists; export to a new folder"):
        engine.export_hf(tmp_path / "taken")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be written"):
        engine.export_hf(tmp_path / "file" / "exported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model", "taken"]
    update(engine, make_rows(3))
