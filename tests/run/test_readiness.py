"""Notes of mode=check about the machine that it runs on."""

from pathlib import Path

import pytest

from hybridrl.run.readiness import missing_here
from tests.config.values import config_of

EIGHT = ("cluster=one_gpu", "cluster.num_ranks_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "words"),
    [
        ((), 0, []),
        (EIGHT, 0, ["this machine has no GPU, and the run needs 8"]),
        (EIGHT, 2, ["this machine has 2 GPUs, and the run needs 8"]),
        (EIGHT, 8, []),
        ((*EIGHT, "cluster.ray_address=auto"), 0, []),
    ],
)
def test_missing_gpus_are_a_note(
    overrides: tuple[str, ...], num_gpus: int, words: list[str], tmp_path: Path
) -> None:
    for name in ["nvidiactl", "null", *(f"nvidia{number}" for number in range(num_gpus))]:
        (tmp_path / name).touch()
    notes = list(missing_here(config_of(*overrides), devices=tmp_path))
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


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
