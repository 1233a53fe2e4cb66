from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.load import load_config
from hybridrl.env import ROOT, python_path
from hybridrl.errors import ConfigErrors
from hybridrl.run.modes.check import rehearsed_configs
from hybridrl.workers.rollout.sglang import rehearsal as server_rehearsal
from hybridrl.workers.rollout.sglang.arguments import environment, server_spec
from hybridrl.workers.rollout.sglang.rehearsal import case_of, rehearse_server
from tests.composing import composed
from tests.planning.models import (
    GLM4_5_AIR,
    GPT_OSS_20B,
    PREPROCESSOR,
    QWEN2_5_0_5B,
    QWEN2_5_VL_3B,
    QWEN3_5_9B,
    QWEN3_8B,
    QWEN3_30B_A3B,
)
from tests.sglang import warm

ON_CUDA = "tests.sglang.on_cuda"
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", QWEN2_5_0_5B),
    "qwen3": ("Qwen3ForCausalLM", QWEN3_8B),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN3_30B_A3B),
    "glm4_moe": ("Glm4MoeForCausalLM", GLM4_5_AIR),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS_20B),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", QWEN3_5_9B),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_3B),
}


def recipes_on_sglang() -> list[str]:
    texts = {path.stem: path.read_text() for path in (ROOT / "recipes/gpu").glob("*.yaml")}
    on_gpus = {name for name, text in texts.items() if "override /cluster: one_gpu" in text}
    return sorted(name for name in on_gpus if "override /rollout: sglang" in texts[name])


def model_of(recipe: str) -> str:
    text = (ROOT / "recipes" / "gpu" / f"{recipe}.yaml").read_text()
    path = yaml.safe_load(text)["model"]["path"]
    sizes = {
        "Qwen2.5-0.5B-Instruct": "qwen2",
        "Qwen3-4B": "qwen3",
        "Qwen3-8B": "qwen3",
        "Qwen3-32B": "qwen3",
    }
    sizes |= {"Qwen3-30B-A3B": "qwen3_moe", "GLM-4.5-Air": "glm4_moe"}
    sizes |= {"gpt-oss-20b": "gpt_oss", "Qwen3.5-9B": "qwen3_5"}
    sizes |= {"Qwen2.5-VL-3B-Instruct": "qwen2_5_vl"}
    return sizes[Path(path).name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of real sizes as far as their config.json, and a file of rows."""
    folder = tmp_path_factory.mktemp("models")
    for name, (architecture, values) in MODELS.items():
        (folder / name).mkdir()
        whole = values | {"architectures": [architecture], "dtype": "bfloat16"}
        (folder / name / "config.json").write_text(json.dumps(whole))
        (folder / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        (folder / name / "tokenizer.json").write_text("{}")
        save_file({}, folder / name / "model.safetensors")
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    return folder


def config_of(folder: Path, model: str, *overrides: str) -> ExperimentConfig:
    return load_config(composed("model=hf_folder", f"model.path={folder / model}", *overrides))


def config_of_recipe(folder: Path, name: str) -> ExperimentConfig:
    rows = [f"data.{split}_files=[{folder}/rows.jsonl]" for split in ("train", "eval")]
    given = [f"recipes=gpu/{name}", f"model.path={folder / model_of(name)}", *rows]
    return load_config(composed(*given, "reward=exact_match", "mode=check"))


GPU = (
    *("rollout=sglang", "cluster=one_gpu", "rollout.dtype=bfloat16"),
    *("model.attention=varlen", "actor.compute_dtype=bfloat16"),
)
ASLEEP, LORA = "rollout.sleep=true", "lora=default"
TP2 = ("cluster.num_ranks_per_node=2", "rollout.tensor_parallel_size=2")
DETERMINISTIC = "+rollout.engine_args.enable_deterministic_inference=true"
TRITON = "+rollout.engine_args.attention_backend=triton"
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "asleep": ("qwen3", *GPU, ASLEEP),
    "awake": ("qwen3", *GPU),
    "without graphs": ("qwen3", *GPU, ASLEEP, "rollout.engine_args={disable_cuda_graph: true}"),
    "adapter": ("qwen3", *GPU, ASLEEP, LORA),
    "adapter with a backup": ("qwen3", *GPU, ASLEEP, LORA, "lora.base=backup", *TP2),
    "tensor parallel": ("qwen2", *GPU, ASLEEP, *TP2),
    "deterministic": ("qwen3", *GPU, ASLEEP, DETERMINISTIC),
    "deterministic, tensor parallel": ("qwen3", *GPU, ASLEEP, *TP2, DETERMINISTIC),
    "triton": ("qwen3", *GPU, ASLEEP, TRITON),
    "float32": ("qwen3", *GPU, "rollout.dtype=float32", TRITON),
}


def rehearsed(configs: Sequence[ExperimentConfig], folder: Path) -> list[dict[str, Any]]:
    """What became of each, in a single process that answers as a machine with an H100."""
    cases = []
    for config in configs:
        spec = server_spec(config, Path(str(config.model.path)))
        cases.append(case_of(spec) | {"variables": environment(spec)})
    case_file, result_file = folder / "cases.json", folder / "results.json"
    case_file.write_text(json.dumps(cases))
    subprocess.run(
        [sys.executable, "-m", ON_CUDA, str(case_file), str(result_file)],
        env=os.environ | {"PYTHONPATH": python_path()},
        check=True,
        timeout=190,
        capture_output=True,
    )
    results: list[dict[str, Any]] = json.loads(result_file.read_text())
    return results


def configs_of_recipes(folder: Path) -> dict[str, ExperimentConfig]:
    """Those whose engines are servers on a GPU, each of their groups, and our combinations."""
    names = recipes_on_sglang()
    assert len(names) >= 4
    configs = {name: config_of_recipe(folder, name) for name in names}
    served = {name: config for name, config in configs.items() if config.has_servers}
    assert len(served) >= 4
    configs |= {
        f"{name} {group.key}": of_engine
        for name, config in served.items()
        for group, of_engine in rehearsed_configs(config)
    }
    return configs | {name: config_of(folder, *given) for name, given in COMBINATIONS.items()}


REFUSED: dict[str, dict[str, ArgumentValue]] = {
    "a page that does not divide": {"page_size": 7, "chunked_prefill_size": 100},
    "another number of speculative steps": {"speculative_algorithm": "WARP"},
    "no such attention": {"attention_backend": "warp"},
    "no number": {"chunked_prefill_size": "many"},
    "no such argument": {"chunked_prefil_size": 512},
}


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    base = config_of(folder, *COMBINATIONS["asleep"])
    configs = configs_of_recipes(folder)
    for name, given in REFUSED.items():  # past our own rules, so that SGLang's are asked
        configs[name] = replace(base, rollout=replace(base.rollout, engine_args=given))
    return dict(zip(configs, rehearsed(list(configs.values()), folder), strict=True))


@pytest.mark.timeout(200)
def test_sglang_starts_on_a_gpu_with_what_every_recipe_sends(
    results: dict[str, dict[str, Any]],
) -> None:
    sent = {name: result for name, result in results.items() if name not in REFUSED}
    assert len(sent) > len(COMBINATIONS) + 8
    assert all(result["has_device"] for result in sent.values())
    assert {name: each["refusals"] for name, each in sent.items() if each["refusals"]} == {}


@pytest.mark.timeout(200)
def test_what_sglang_refuses_at_its_start_is_found_with_the_argument(
    results: dict[str, dict[str, Any]],
) -> None:
    refused = {name: results[name] for name in REFUSED}
    names = {name: [r["names"] for r in result["refusals"]] for name, result in refused.items()}
    assert names == {name: [list(given)] for name, given in REFUSED.items()}
    assert "fa3" in str(refused["no such attention"]["refusals"][0]["reason"])
    assert "chunked_prefill_size" in refused["no such argument"]["refusals"][0]["fix"]


@pytest.mark.timeout(200)
def test_check_names_our_key_for_what_sglang_refuses_and_a_remedy_that_it_accepts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_rehearsal, "_CHILD", warm.__name__)
    given = (
        "qwen3",
        "rollout=sglang",
        "+rollout.engine_args={chunked_prefill_size: 100, page_size: 7}",
    )
    with pytest.raises(ConfigErrors, match="must be divisible by page_size") as raised:
        rehearse_server(config_of(folder, *given))
    (violation,) = raised.value.violations
    assert violation.key.startswith("rollout.engine_args.")
    (remedy,) = violation.remedies
    assert "accepts the arguments" in rehearse_server(config_of(folder, *given, *remedy))


@pytest.mark.timeout(150)
@pytest.mark.nightly
def test_where_there_is_no_gpu_check_says_what_it_did_not_see(folder: Path) -> None:
    line = rehearse_server(config_of(folder, *COMBINATIONS["asleep"]))
    assert "rehearsed where there is a GPU" in line


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_check_of_the_default_model_goes_through_sglang(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.main", "mode=check", "rollout=sglang"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accepts the arguments of its servers" in done.stdout
    assert list(tmp_path.iterdir()) == []
