"""Files of the newest weights, kept without the folder that they came in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hybridrl.serving.kept_weights import KeptWeights


def folder_with(path: Path, text: str) -> Path:
    (path / "more").mkdir(parents=True)
    (path / "model.safetensors").write_text(text)
    (path / "more" / "other.safetensors").write_text(text)
    return path


def test_the_newest_files_outlive_their_folder(tmp_path: Path) -> None:
    kept = KeptWeights(tmp_path)
    folders = []
    for text in ("old", "new"):
        source = folder_with(tmp_path / text, text)
        folder = kept.keep(source)
        assert isinstance(folder, Path)
        [file] = folder.iterdir()  # of the folder alone, and not of those below it
        assert os.path.samefile(file, source / "model.safetensors")  # a link, which costs no disk
        shutil.rmtree(source)
        assert file.read_text() == text
        folders.append(folder)
    assert not folders[0].exists()
    kept.clear()
    kept.clear()
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_linked_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", refuse)
    folder = KeptWeights(tmp_path).keep(folder_with(tmp_path / "source", "new"))
    assert isinstance(folder, Path)
    shutil.rmtree(tmp_path / "source")
    assert [file.read_text() for file in folder.iterdir()] == ["new"]
