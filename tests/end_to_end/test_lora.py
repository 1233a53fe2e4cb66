from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl import export
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import CheckpointError, ConfigErrors, RunFolderError
from hybridrl.run.export_checkpoint import export_checkpoint
from hybridrl.serving.finished_groups import read_groups
from tests.end_to_end.runs import assert_same_weights, prompts_of, samples_of, train
from tests.end_to_end.small import VARIED, small_config
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("ray_cluster")

LORA = ("lora=default", "lora.rank=4", "actor.optimizer.lr=1e-2")


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(48, 58)[None]).logits


def _check_exports(folder: Path) -> None:
    """The adapter beside the model that the run started from is the merged model."""
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    started_from = _logits(base)
    adapted = _logits(peft.PeftModel.from_pretrained(base, folder / "adapter"))
    merged = _logits(AutoModelForCausalLM.from_pretrained(folder / "hf"))
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, started_from, atol=1e-4)


def test_engines_of_their_own_get_the_adapter_alone_and_change_no_bit_of_a_run(
    tmp_path: Path,
) -> None:
    keys = (*LORA, VARIED, "rollout.num_slots=4", "eval.every_num_steps=0")
    faults = "serving.faults={kills: {kind: kill, every_num_phases: 2, within_requests: 2}}"
    lines = train(tmp_path / "own", *keys, "serving=own", faults)
    train(tmp_path / "fused", *keys)
    assert_same_weights(tmp_path / "own", tmp_path / "fused")
    assert samples_of(tmp_path / "own") == samples_of(tmp_path / "fused")
    assert sum(line["rollout/lost_engines"] for line in lines) == 1  # its successor has both
    adapter = load_file(tmp_path / "own/adapter/adapter_model.safetensors").values()
    weights = load_file(tmp_path / "own/hf/model.safetensors").values()
    base_bytes, num_bytes = (sum(t.nbytes for t in tensors) for tensors in (weights, adapter))
    sent = [line["memory/synced_bytes"] for line in lines]
    assert sent == [base_bytes + num_bytes, num_bytes, num_bytes]


def test_open_responses_go_on_with_the_next_adapter(tmp_path: Path) -> None:
    keys = ("serving=own", "trainer.max_staleness=2", "algorithm.rollout_correction=importance")
    # So long that a step ends before the open responses, however slow the trainer is.
    slow = (
        *("rollout.num_slots=1", "rollout.max_response_tokens=400", "trainer.num_steps=3"),
        *("trainer.num_prompts_per_step=2", "rollout.num_responses_per_prompt=2"),
    )
    lines = train(tmp_path, *LORA, VARIED, *keys, *slow, "eval.every_num_steps=0")
    assert sum(line["rollout/interrupted_tokens"] for line in lines) > 0
    assert max(line["rollout/staleness_steps/max"] for line in lines) > 0
    name = "policy/sampler_mismatch_nats/max"  # of tokens of the newest adapter
    assert 0 < max(line.get(name, 0.0) for line in lines) < 1e-4


def test_open_responses_end_with_the_adapter_that_they_began_with_and_no_update_waits(
    tmp_path: Path,
) -> None:
    """Also where an engine is killed between: what it had begins anew with the newest adapter."""
    keys = (
        *(*LORA, VARIED, "serving=own", "trainer.max_staleness=4", "serving.on_update=finish"),
        *("algorithm.rollout_correction=importance", "eval.every_num_steps=0"),
        *("checkpoint.every_num_steps=1", "checkpoint.keep_last=8", "trainer.num_steps=8"),
        "serving.faults={kills: {kind: kill, every_num_phases: 3, within_requests: 1}}",
        # A step needs the group of one of two engines, so one is open for two steps.
        *("trainer.num_prompts_per_step=1", "rollout.num_responses_per_prompt=4"),
        *("rollout.num_slots=1", "rollout.max_response_tokens=250"),
    )
    lines = train(tmp_path, *keys)
    waits = [line["time/update_engines_s"] > 0 for line in lines]
    assert waits[0]
    assert sum(waits) < 4  # each update does if there is one adapter, or if both engines are lost
    assert 0 < sum(line["rollout/lost_engines"] for line in lines) < 4
    kept = re.findall(r"kept=\[(.*)\]", (tmp_path / "servers/manager.txt").read_text())
    assert len(kept) == waits.count(False)
    assert any("," in versions for versions in kept)  # an open response had not the newest
    assert max(len(versions.split(",")) for versions in kept) <= 4  # and one comes: K + 1
    _check_waiting_groups(tmp_path, prompts_of(small_config(tmp_path, *keys), 8))


def _check_waiting_groups(run: Path, prompts: Sequence[Tensor]) -> None:
    """Log-probs of responses that wait in checkpoints are those of the adapter that they name."""
    base = json.loads((run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    models = {0: AutoModelForCausalLM.from_pretrained(base)}  # B is 0
    for step in range(1, 8):
        _, groups = read_groups(run / f"checkpoints/step-{step:09d}/groups")
        for index, group in groups.items():
            for sample in group.samples:
                assert sample.weight_versions is None  # it has one
                version, tokens_L = sample.weight_version, sample.token_ids
                if version not in models:
                    (folder, _) = export_checkpoint(run, step=version)
                    models[version] = AutoModelForCausalLM.from_pretrained(folder)
                context = torch.cat([prompts[index], tokens_L])
                with torch.no_grad():
                    logits = models[version](context[None]).logits[0, -len(tokens_L) - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, tokens_L[:, None])[:, 0]
                torch.testing.assert_close(sample.logprobs, logprobs, rtol=0, atol=1e-4)
    assert len(models) > 2


@pytest.mark.shows("1.4", "1.8")
@pytest.mark.parametrize(
    ("sync", "sleep", "num_ranks"),
    [
        ("adapter", "true", 2),
        pytest.param("merged", "true", 1, marks=pytest.mark.nightly),
        pytest.param("adapter", "false", 1, marks=pytest.mark.nightly),
        pytest.param("merged", "false", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_run_trains_an_adapter_and_leaves_it_alone_and_merged(
    tmp_path: Path, sync: str, sleep: str, num_ranks: int
) -> None:
    folder = tmp_path / "run"
    _, first, second, last = train(
        folder,
        *(*LORA, VARIED, f"lora.sync={sync}", f"rollout.sleep={sleep}"),
        f"cluster.num_ranks_per_node={num_ranks}",
        *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
    )
    _check_exports(folder)
    assert first["policy/updates"] == last["policy/updates"] == 1
    adapter = load_file(folder / "adapter/adapter_model.safetensors").values()
    assert last["policy/trained_parameters"] == sum(tensor.numel() for tensor in adapter)
    kl = "policy/kl_to_reference_nats/mean"
    assert first[kl] == pytest.approx(0.0, abs=1e-9)
    assert last[kl] > 1e-6
    assert last["policy/sampler_mismatch_nats/max"] < 1e-4
    weights = load_file(folder / "hf/model.safetensors").values()
    base_bytes, adapter_bytes = (sum(t.nbytes for t in tensors) for tensors in (weights, adapter))
    sent = [line["memory/synced_bytes"] / num_ranks for line in (first, second)]
    num_syncs = 2 if sleep == "true" and sync == "merged" else 1  # evaluation slept in between
    expected = [num_syncs * base_bytes, base_bytes]
    if sync == "adapter":
        expected = [base_bytes + adapter_bytes, adapter_bytes]
    assert sent == expected


def test_a_run_goes_on_from_the_adapter_of_another(tmp_path: Path) -> None:
    tuning = ("mode=sft", "trainer.num_steps=4", "trainer.num_prompts_per_step=8")
    train(tmp_path / "one", *LORA, *tuning)
    _check_exports(tmp_path / "one")
    start = f"lora.init_from={tmp_path / 'one/adapter'}"
    train(tmp_path / "two", *LORA, start, "trainer.num_steps=1")
    before, after = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("one", "two")
    )
    assert all(bool(tensor.any()) for tensor in before.values())
    for name, tensor in before.items():  # nothing was rewarded, so the step had no gradient
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0.03)
    with pytest.raises(ConfigErrors, match=r"lora\.rank=8: the adapter .* was made with 4"):
        small_config(tmp_path / "three", *LORA, start, "lora.rank=8")


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.nightly)])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> tuple[Path, bool]:
    """The folder of a run of two ranks, and whether it trained an adapter."""
    folder = tmp_path_factory.mktemp("made") / "run"
    lora = ("lora=default",) if request.param else ()
    train(folder, "checkpoint.every_num_steps=2", "cluster.num_ranks_per_node=2", *lora)
    return folder, request.param


def test_a_checkpoint_of_two_ranks_becomes_the_folders_that_the_run_itself_wrote(
    made: tuple[Path, bool], tmp_path: Path
) -> None:
    folder, lora = shutil.copytree(made[0], tmp_path / "run"), made[1]
    written = export_checkpoint(folder, step=3)
    assert [path.name for path in written] == ["hf-step-3", "adapter-step-3"][: 1 + lora]
    given = export_checkpoint(folder, output=tmp_path / "digits")
    assert [path.name for path in given] == ["digits", "digits-adapter"][: 1 + lora]
    ours, theirs = (load_file(folder / n / "model.safetensors") for n in ("hf-step-3", "hf"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (folder / "hf-step-3" / "tokenizer.json").is_file()
    if lora:
        ours, theirs = (
            load_file(folder / name / "adapter_model.safetensors")
            for name in ("adapter-step-3", "adapter")
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_command_names_the_folder_it_wrote_and_what_it_cannot_do(
    made: tuple[Path, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(made[0], tmp_path / "run")
    result = _command(str(folder))
    assert result.returncode == 0, result
    assert result.stdout.splitlines()[0] == str(folder / "hf-step-3")
    monkeypatch.setattr("sys.argv", ["export", str(folder), "--step", "7"])
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 1
    assert "has no checkpoint of step 7; it has: 2, 3" in capsys.readouterr().err
    with pytest.raises(RunFolderError, match="exists; export to a new folder with --output"):
        export_checkpoint(folder)
    elsewhere = tmp_path / "models" / "digits"
    monkeypatch.setattr("sys.argv", ["export", str(folder), "--output", str(elsewhere)])
    export.main()
    assert capsys.readouterr().out.splitlines()[:1] == [str(elsewhere)]
    ours, own = (load_file(f / "model.safetensors") for f in (elsewhere, folder / "hf-step-3"))
    assert all(torch.equal(ours[name], own[name]) for name in own)
    (checkpoint,) = (folder / "checkpoints").glob("step-*2")
    monkeypatch.setattr("sys.argv", ["export", str(checkpoint)])
    export.main()
    assert capsys.readouterr().out.splitlines()[0] == str(folder / "hf-step-2")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        export_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="it has: 2, 3"):
        export_checkpoint(folder, step=1)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridrl.export", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_experts_train_sleep_resume_and_are_exported(tmp_path: Path) -> None:
    folder, run_folder = tmp_path / "model", tmp_path / "run"
    make_tiny_model(folder, "qwen3_moe", vocab_size=258, num_layers=3, mlp_only_layers=[1])
    build_starter_tokenizer().save_pretrained(folder)
    still = (
        *("model.starter=null", f"model.path={folder}", "data.use_chat_template=false"),
        *(VARIED, "rollout.sleep=true", "checkpoint.every_num_steps=1", "eval.every_num_steps=0"),
        "rollout.canary_max_drift_nats=1e-3",
    )
    train(run_folder, *still, "cluster.num_ranks_per_node=2", "trainer.num_steps=2")
    lines = train(run_folder, *still, "trainer.num_steps=3")
    assert [line["policy/updates"] for line in lines] == [1, 1, 1]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    assert all(line["memory/released_bytes"] > 0 for line in lines)
    first, last = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, run_folder / "hf"))
    last_weights = last.state_dict()
    equal = [n for n, t in first.state_dict().items() if torch.equal(t, last_weights[n])]
    assert not equal
