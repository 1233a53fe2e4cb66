"""Notes of mode=check about the machine that it runs on, and its look at a model folder."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.run.modes.check import missing_here
from hybridrl.run.modes.doctor import find_bad_weights
from tests.command_line import call_main
from tests.config.values import config_of
from tests.tiny_models import SPARSE, make_tiny_model


def set_sizes(folder: Path, **sizes: int | None) -> None:
    """Let config.json say something else than the folder's weights."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | sizes))


EIGHT = ("cluster=one_gpu", "cluster.num_ranks_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "note"),
    [
        ((), 0, None),
        (EIGHT, 0, "this machine has no GPU, and the run needs 8"),
        (EIGHT, 2, "this machine has 2 GPUs, and the run needs 8"),
        (EIGHT, 8, None),
        ((*EIGHT, "cluster.ray_address=auto"), 0, None),
    ],
)
def test_missing_gpus_are_a_note(
    overrides: tuple[str, ...], num_gpus: int, note: str | None, tmp_path: Path
) -> None:
    for name in ["nvidiactl", "null", *(f"nvidia{number}" for number in range(num_gpus))]:
        (tmp_path / name).touch()
    notes = list(missing_here(config_of(*overrides), devices=tmp_path))
    assert len(notes) == (note is not None)
    assert all(str(note) in each for each in notes)


@pytest.mark.parametrize("key", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_a_cut_distribution_is_a_note_while_training_alone(key: str) -> None:
    [note] = missing_here(config_of(key))
    assert f"{key} " in note
    assert "gradients are biased" in note
    assert "set rollout.top_p=1.0 rollout.top_k=0" in note
    assert not list(missing_here(config_of(key, "mode=sft")))


@pytest.mark.parametrize(
    ("variable", "value", "has_note"),
    [
        ("WANDB_API_KEY", "k" * 40, False),
        ("WANDB_MODE", "offline", False),
        ("WANDB_MODE", "online", True),
        ("NETRC", "keys", False),
        ("NETRC", "nowhere", True),
        ("WANDB_BASE_URL", "https://own.example", True),
    ],
)
def test_a_missing_login_of_wandb_is_a_note(
    variable: str, value: str, *, has_note: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password key")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    notes = list(missing_here(config_of("tracking.trackers=[wandb]")))
    assert ["wandb login" in note for note in notes] == [True] * has_note
    assert list(missing_here(config_of())) == []


SGLANG = ("rollout.engine=sglang", "rollout.dtype=bfloat16")

LONG = (
    *("cluster=one_gpu", "cluster.ray_address=auto", "rollout.max_response_tokens=32768"),
    *("rollout.num_slots=4", "trainer.num_prompts_per_step=4"),
    *("rollout.num_responses_per_prompt=8", "cluster.num_ranks_per_node=2"),
    "model.starter.max_position_embeddings=40000",
)


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ((), 4 * 32768 / 20),  # 32 rows on two engines of four slots are four waves
        (("rollout.num_slots=8",), None),
        ((*SGLANG, "rollout.tensor_parallel_size=2", "rollout.num_slots=8"), 4 * 32768 / 20),
        (("rollout.max_response_tokens=8192",), None),
        (("cluster=cpu",), None),
    ],
)
def test_a_rollout_phase_that_may_exceed_its_call_is_a_note(
    overrides: tuple[str, ...], seconds: float | None
) -> None:
    notes = list(missing_here(config_of(*LONG, *overrides)))
    assert len(notes) == (seconds is not None)
    for note in notes:
        assert f"set cluster.call_timeout_s={seconds:.0f}" in note
        fixed = f"cluster.call_timeout_s={math.ceil(seconds or 0)}"
        assert list(missing_here(config_of(*LONG, *overrides, fixed))) == []


@pytest.mark.parametrize(
    ("overrides", "has_note"),
    [
        (("rollout.verify_weights=first",), True),
        (("rollout=sglang", "rollout.verify_weights=never", "rollout.transport=disk"), True),
        ((), False),
    ],
)
def test_a_disk_without_room_for_the_weights_is_a_note(
    overrides: tuple[str, ...], *, has_note: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    set_sizes(folder, vocab_size=2**24, hidden_size=2**24)  # a petabyte
    config = config_of(*overrides)
    config = replace(config, model=replace(config.model, path=str(folder)))
    notes = [note for note in missing_here(config) if "set TMPDIR to a larger disk" in note]
    assert len(notes) == has_note


@pytest.mark.parametrize(
    ("package", "version", "overrides", "has_note"),
    [
        ("transformers", "5.99.0", (), True),
        ("transformers", "5.19.0", (), False),
        ("torch", "2.14.0.dev20261101+cu130", (), False),
        ("megatron-core", "0.99.0", (), False),
        ("megatron-core", "0.99.0", ("actor=megatron",), True),
        ("sglang", "0.9.0", (), False),
        ("sglang", "0.9.0", ("rollout=sglang",), True),
    ],
)
def test_an_untested_version_of_a_package_that_the_run_needs_is_a_note(
    package: str,
    version: str,
    overrides: tuple[str, ...],
    *,
    has_note: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    notes = [note for note in missing_here(config_of(*overrides)) if version in note]
    assert bool(notes) == has_note
    assert all(f"pip install '{package}" in note for note in notes)


def test_a_folder_that_was_saved_whole_is_accepted(tmp_path: Path) -> None:
    assert find_bad_weights(make_tiny_model(tmp_path / "dense")) == []
    for family in SPARSE:
        assert find_bad_weights(make_tiny_model(tmp_path / family, family)) == []


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    set_sizes(folder, intermediate_size=72)
    (error,) = find_bad_weights(folder)
    assert "mlp" in error.rule
    assert "by config.json it must be [72, " in error.rule


def test_check_refuses_a_folder_that_lacks_a_layer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    set_sizes(folder, num_hidden_layers=3, layer_types=None)
    (folder / "tokenizer.json").write_text("{}")
    model = ("model=hf_folder", f"model.path={folder}")
    done = call_main("mode=check", *model, folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("ConfigError: model.path=")
    assert "the safetensors are not those of a Qwen3ForCausalLM: " in done.stderr
    assert "Fix: download the folder again." in done.stderr
