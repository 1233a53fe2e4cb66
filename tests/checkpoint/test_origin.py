"""What a run must have in common with the one that it goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.checkpoint.fingerprint import (
    check_fingerprints,
    check_recipe,
    environment_changes,
    environment_of,
    folder_fingerprints,
    recipe_of,
)
from hybridrl.checkpoint.store import RunFingerprint
from hybridrl.errors import CheckpointError
from hybridrl.run.checkpoints import run_fingerprint
from tests.config.values import config_of
from tests.tiny_models import make_tiny_classifier, make_tiny_model

WHERE = Path("runs/it")


def test_engine_and_parallel_sizes_change_only_the_rounding() -> None:
    cut = ("actor=megatron", "cluster.num_ranks_per_node=2", "megatron.tensor_parallel_size=2")
    plain, megatron = config_of(), config_of(*cut)
    assert recipe_of(megatron) == recipe_of(plain)
    assert "megatron-core" not in environment_of(plain)
    size = "actor.fsdp2.context_parallel_size"  # a checkpoint goes on with any
    sharing = config_of("cluster.num_ranks_per_node=2", f"{size}=2")
    alone = config_of("cluster.num_ranks_per_node=2")
    assert recipe_of(sharing) == recipe_of(alone)
    assert environment_of(sharing) == {**environment_of(alone), size: "2"}
    here = environment_of(megatron)
    assert (here["actor.engine"], here["megatron.tensor_parallel_size"]) == ("megatron", "2")
    assert "megatron-core" in here
    other = config_of(*cut, "megatron.transformer_args={bias_activation_fusion: true}")
    assert recipe_of(other) != recipe_of(plain)


@pytest.mark.shows("R2.6")
@pytest.mark.parametrize(
    "change",
    [
        *("checkpoint.every_num_steps=7", "checkpoint.keep_last=5", "tracking.live=lines"),
        *("trainer.run_dir=moved", "cluster.num_threads_per_rank=2", "reward.timeout_s=9"),
        *("trainer.num_steps=1000", "trainer.export_hf=false", "rollout.drain_timeout_s=9"),
    ],
)
def test_what_does_not_say_what_is_learnt_may_change(change: str) -> None:
    assert recipe_of(config_of(change)) == recipe_of(config_of())


@pytest.mark.shows("R2.6")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("actor.optimizer.lr=0.5", r"actor\.optimizer\.lr: .* there, 0\.5 here"),
        ("seed=9", "seed: 0 there, 9 here"),
        ("rollout.temperature=0.7", r"rollout\.temperature"),
        ("data.max_prompt_tokens=9", r"data\.max_prompt_tokens"),
        ("trainer.num_prompts_per_step=32", r"trainer\.num_prompts_per_step"),
    ],
)
def test_changed_learning_key_is_rejected_unless_accepted(change: str, words: str) -> None:
    saved, now = recipe_of(config_of()), recipe_of(config_of(change))
    with pytest.raises(CheckpointError, match=words) as refused:
        check_recipe(saved, now, where=WHERE, accept=False)
    for remedy in ("trainer.run_dir", "trainer.overwrite=true", "checkpoint.accept_changes=true"):
        assert remedy in str(refused.value)
    (told,) = check_recipe(saved, now, where=WHERE, accept=True)
    assert told.startswith(change.partition("=")[0])


@pytest.mark.shows("R2.6")
def test_a_run_goes_on_though_keys_of_it_are_constants_now() -> None:
    now = recipe_of(config_of())
    saved = {**now, "data.min_digits": 2, "actor.reduce_dtype": "float32", "trainer.export_hf": 1}
    saved["model.starter.num_attention_heads"] = 8  # files of the model are compared
    saved["rollout.routed_experts"] = saved.pop("actor.replay_routing")  # it was renamed
    check_recipe(saved, now, where=WHERE, accept=False)
    with pytest.raises(CheckpointError, match=r"data\.min_digits: 3 there"):
        check_recipe({**saved, "data.min_digits": 3}, now, where=WHERE, accept=False)
    assert not [*environment_changes({"rollout.num_threads": "1"}, {})]
    assert [*environment_changes({"rollout.num_threads": "2"}, {})]


@pytest.mark.shows("R2.6")
def test_number_of_steps_matters_to_a_falling_schedule() -> None:
    falling = "actor.optimizer.schedule=cosine"
    longer = recipe_of(config_of(falling, "trainer.num_steps=1000"))
    with pytest.raises(CheckpointError, match=r"trainer\.num_steps"):
        check_recipe(recipe_of(config_of(falling)), longer, where=WHERE, accept=False)


def test_many_changes_are_counted_and_the_first_named() -> None:
    now = {f"k{number:02}": number for number in range(11)}
    with pytest.raises(CheckpointError, match=r"k07: None there, 7 here\n  and 3 more"):
        check_recipe({}, now, where=WHERE, accept=False)


@pytest.mark.shows("R2.7")
@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
        ("config.json", "model configuration"),
        ("model.safetensors", "frozen weights"),
    ],
)
def test_changed_model_files_are_rejected_unless_accepted(
    tmp_path: Path, file: str, what: str
) -> None:
    for name in ("tokenizer.json", "config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    saved = _origin(tmp_path)
    (tmp_path / "README.md").write_text("this one is read by nobody")
    assert not check_fingerprints(saved, _origin(tmp_path), where=WHERE, accept=False)
    (tmp_path / file).write_text("other")
    now = _origin(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"files of model\.path or .*: {what}: .*accept_changes"
    ):
        check_fingerprints(saved, now, where=WHERE, accept=False)
    (told,) = check_fingerprints(saved, now, where=WHERE, accept=True)
    assert told.startswith(what)


def test_unread_weights_are_not_fingerprinted(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("a")
    before = folder_fingerprints(tmp_path, with_weights=False)
    (tmp_path / "model.safetensors").write_text("b")
    assert folder_fingerprints(tmp_path, with_weights=False) == before


def test_what_rounding_depends_on_is_noted() -> None:
    one, two = (
        environment_of(config_of(f"cluster.num_threads_per_rank={number}")) for number in (1, 2)
    )
    assert {key for key in one if one[key] != two[key]} == {"cluster.num_threads_per_rank"}
    assert {"processor", "torch", "python", "cluster.num_ranks_per_node"} <= one.keys()


def test_a_changed_setup_hook_is_noted_with_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "hook_of_this_test.py"
    noted = [environment_of(config_of())]
    for text in ("def install(): pass", "def install(): print()"):
        module.write_text(text)
        config = config_of("cluster.worker_setup_hook=hook_of_this_test.install")
        noted.append(environment_of(config))
    hooks = [environment.get("cluster.worker_setup_hook") for environment in noted]
    assert hooks[0] is None
    assert hooks[1] != hooks[2]
    assert str(hooks[1]).startswith("hook_of_this_test.install ")


def _origin(folder: Path) -> RunFingerprint:
    # Of a run that reads its frozen weights again.
    return run_fingerprint(config_of("lora=default"), folder)


def test_another_reward_model_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    scorer = make_tiny_classifier(tmp_path / "scorer")
    config = config_of()
    reward = replace(config.reward, function="model", args={"path": str(scorer)})
    config, folder = replace(config, reward=reward), make_tiny_model(tmp_path / "model")
    before = run_fingerprint(config, folder)
    assert run_fingerprint(config, folder) == before
    make_tiny_classifier(scorer, seed=1)
    changed = [
        kind
        for kind, value in run_fingerprint(config, folder).fingerprints.items()
        if before.fingerprints[kind] != value
    ]
    assert changed == ["frozen weights of reward model model"]
