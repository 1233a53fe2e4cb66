"""The lines at the end of a run."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.run.record import describe_end, resume_command
from tests.config.values import config_of

COMMAND = ("python", "-m", "hybridrl.main", "seed=3", "trainer.overwrite=true")


def config_in(folder: Path, *overrides: str) -> ExperimentConfig:
    return config_of(f"trainer.run_dir={folder}", "trainer.num_steps=3", *overrides)


def write_run(folder: Path, rewards: Sequence[float], *places: str) -> None:
    lines = [
        {"step": step, "elapsed_s": 2.0 * step, "eval/reward/mean": reward, "reward/mean": step}
        for step, reward in enumerate(rewards)
    ]
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 4, "rew')
    for place in places:
        (folder / place).mkdir(parents=True)


def rows_of(text: str) -> dict[str, str]:
    return dict(
        line.split(maxsplit=1) for line in text.replace("to continue", "continue").splitlines()
    )


def test_a_finished_run_says_what_it_learned_and_where_all_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder)
    write_run(folder, [0.5, 0.8, 0.6, 0.7], "hf", "checkpoints/step-000000003")
    (folder / "report.html").touch()
    rows = rows_of(describe_end(config, command=COMMAND, error=None))
    assert rows["finished"] == "after step 3 of 3, 6 s"
    assert rows["eval/reward/mean"] == "0.5 -> 0.7, best 0.8 after step 1"
    assert rows["reward/mean"] == "0.5 -> 2.5 (means of 2 steps)"
    assert rows["model"] == str(folder / "hf")
    assert rows["report"] == str(folder / "report.html")
    assert rows["checkpoint"] == str(folder / "checkpoints" / "step-000000003")
    assert shlex.split(rows["continue"]) == [
        *COMMAND[:4],
        f"trainer.run_dir={folder}",
        "trainer.num_steps=6",
    ]


def test_a_run_that_epochs_ended_is_continued_with_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder, "trainer.num_epochs=1.5", "trainer.num_steps=50")
    write_run(folder, [0.5, 0.8, 0.6], "checkpoints/step-000000002")
    rows = rows_of(describe_end(config, command=COMMAND, error=None))
    assert rows["finished"] == "after step 2 of 2, 4 s"
    assert shlex.split(rows["continue"])[-2:] == ["trainer.num_steps=100", "trainer.num_epochs=3"]


def test_a_stopped_run_says_the_command_that_resumes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder)
    write_run(folder, [0.5, 0.8], "checkpoints/step-000000001")
    rows = rows_of(describe_end(config, command=COMMAND, error=KeyboardInterrupt()))
    assert rows["reward/mean"] == "0 -> 1 (first and last step)"
    assert rows["stopped"] == "after step 1 of 3, 2 s"
    assert shlex.split(rows["continue"]) == [*COMMAND[:4], f"trainer.run_dir={folder}"]
    assert "model" not in rows


def test_a_run_stopped_in_its_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    text = describe_end(config_in(tmp_path / "run"), command=(), error=KeyboardInterrupt())
    assert text.split() == ["stopped", "before", "step", "1", "of", "3"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        pytest.param(["checkpoint.every_num_steps=0"], KeyboardInterrupt(), id="saves nothing"),
        pytest.param([], RuntimeError(), id="failed before its first checkpoint"),
    ],
)
def test_a_run_without_checkpoints_promises_no_way_to_go_on(
    tmp_path: Path, overrides: list[str], error: BaseException
) -> None:
    config = config_in(tmp_path / "run", *overrides)
    write_run(tmp_path / "run", [0.5, 0.8])
    assert "to continue" not in describe_end(config, command=COMMAND, error=error)


def test_a_command_is_quoted_where_a_shell_would_change_it() -> None:
    command = resume_command(("python", "a=1", "b=[x, y]"), run_dir="my runs", changes=("a=2",))
    assert command == "python 'b=[x, y]' 'trainer.run_dir=my runs' a=2"
