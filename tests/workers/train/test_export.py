from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.export import configs_of, write_hf_folder
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.protocol import WeightSpec
from hybridrl.workers.train.value_engines import CriticEngine
from tests.tiny_models import SEEING, make_seeing_model, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    build_fsdp2,
    make_rows,
    to_rollouts,
    update,
)


class _Written:
    """A configuration that transformers writes without a setting that it does not know."""

    def save_pretrained(self, save_directory: str | Path) -> None:
        settings = {"model_type": "deepseek_v3", "dtype": "float32", "vocab_size": 4}
        Path(save_directory, "config.json").write_text(json.dumps(settings))


def test_an_export_keeps_settings_that_transformers_does_not_write(tmp_path: Path) -> None:
    source = {
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(source))
    folder = tmp_path / "exported"
    write_hf_folder(folder, [], specs=[], configs=[_Written()], source=tmp_path)
    assert json.loads((folder / "config.json").read_text()) == {
        **{"model_type": "deepseek_v3", "dtype": "float32", "vocab_size": 4},
        "topk_method": "noaux_tc",
    }


@pytest.mark.parametrize("kind", SEEING)
def test_a_language_model_is_trained_alone_and_exported_within_the_model_that_sees(
    kind: str, tmp_path: Path
) -> None:
    folder = make_seeing_model(tmp_path / "whole", kind)
    (folder / "video_preprocessor_config.json").write_text("{}")  # with one for images it sees
    engine = build_fsdp2(folder)
    rows = make_rows(4, seed=1)
    update(engine, rows)
    trained = dict(engine.full_weights())
    engine.export_hf(tmp_path / "exported")

    before, after = (
        AutoModelForImageTextToText.from_pretrained(path)
        for path in (folder, tmp_path / "exported")
    )
    assert type(before) is type(after)
    old, new = before.state_dict(), after.state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])} - {"lm_head.weight"}
    assert {f"model.{name.partition('language_model.')[2]}" for name in changed} == {*trained}
    row = rows.token_ids_BL.unbind()[0]
    with torch.no_grad():
        expected = after(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
    expected_L = expected.gather(1, row[1:, None])[:, 0]
    scored = engine.compute_logprobs(to_rollouts(rows), temperature=1.0).logprobs_BL.unbind()[0]
    mask = rows.response_mask_BL.unbind()[0].bool()
    torch.testing.assert_close(scored[mask], expected_L[mask[1:]], atol=1e-5, rtol=0)
    assert (tmp_path / "exported" / "video_preprocessor_config.json").exists()


def test_a_critic_is_exported_without_the_model_that_sees(tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path / "whole", "qwen3_5")
    backend = FSDP2Backend(
        folder, config=ACTOR, model_config=MODEL, num_total_steps=10, device=CPU, kind="critic"
    )
    CriticEngine(backend, value_clip=0.0).export_hf(tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert settings["architectures"] == ["Qwen3_5ForTokenClassification"]
    assert "text_config" not in settings
    stored = WeightFiles(tmp_path / "exported").names
    assert {"score.weight", "model.norm.weight"} <= stored
    assert not any("visual" in name or "language_model" in name for name in stored)


def test_weights_are_cut_into_files_that_load_as_one(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", tie_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    specs = [WeightSpec(name, tuple(t.shape), t.nbytes) for name, t in weights]
    target = tmp_path / "target"
    write_hf_folder(
        target,
        iter(weights),
        specs=specs,
        configs=configs_of(model),
        source=source,
        max_file_bytes=20_000,
    )
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        with safe_open(path, framework="pt") as stored:
            names = stored.keys()
            assert len(names) == 1 or path.stat().st_size < 20_000 + 2_000
    loaded = AutoModelForCausalLM.from_pretrained(target)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(weights)[name])
