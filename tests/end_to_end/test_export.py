"""Checkpoints as Hugging Face and peft folders, without a cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl import export
from hybridrl.errors import CheckpointError, RunFolderError
from hybridrl.run.export_checkpoint import export_checkpoint
from tests.end_to_end.runs import train

pytestmark = pytest.mark.usefixtures("ray_cluster")
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
    with pytest.raises(RunFolderError, match="is not a run folder"):
        export_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="it has: 2, 3"):
        export_checkpoint(folder, step=1)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridrl.export", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
