"""``mode=check`` of a model folder whose files are not those of its config.json."""

from __future__ import annotations

import json
from pathlib import Path

from hybridrl.run.doctor import find_bad_weights
from tests.command_line import call_main
from tests.tiny_models import SPARSE, make_tiny_model


def test_a_folder_that_was_saved_whole_is_accepted(tmp_path: Path) -> None:
    assert find_bad_weights(make_tiny_model(tmp_path / "dense")) == []
    for family in SPARSE:
        assert find_bad_weights(make_tiny_model(tmp_path / family, family)) == []


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(settings))
    (error,) = find_bad_weights(folder)
    size = settings["intermediate_size"]
    assert "mlp" in error.rule
    assert f"by config.json it must be [{size}, " in error.rule


def test_check_refuses_a_folder_that_lacks_a_layer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] += 1
    settings.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    model = ("model=hf_folder", f"model.path={folder}")
    done = call_main("mode=check", *model, folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("ConfigError: model.path=")
    assert "the safetensors are not those of a Qwen3ForCausalLM: " in done.stderr
    assert "Fix: download the folder again." in done.stderr
