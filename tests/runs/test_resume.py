"""Runs that are broken off and go on as if they never had been."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hybridrl.errors import CheckpointError, DataError, RunFolderError
from hybridrl.trainer.child import to_yaml
from hybridrl.trainer.launch import run
from tests.runs.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

TIMED = ("time/", "throughput/", "memory/")
TWO_RANKS = (
    *("cluster.num_ranks_per_node=2", "rollout.sleep=true"),
    *("algorithm.num_minibatches=2", "algorithm.old_logprobs=recompute"),
)
SAVING = ("checkpoint.every_num_steps=2", "actor.optimizer.lr=1e-2")


def test_a_run_in_two_parts_is_bit_by_bit_the_run_in_one(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", "trainer.num_steps=5")
    parts = tmp_path / "parts"
    _run(parts, "trainer.num_steps=2")
    _run(parts, "trainer.num_steps=5")
    assert _metrics(parts) == _metrics(whole)
    assert _samples(parts) == _samples(whole)
    _assert_same_state(parts, whole)
    assert _weights(parts).keys() == _weights(whole).keys()
    for name, weight in _weights(whole).items():
        assert torch.equal(_weights(parts)[name], weight), name


def test_onto_another_number_of_ranks_a_run_goes_on_and_says_that_bits_may_differ(
    tmp_path: Path,
) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=2")
    _run(folder, "trainer.num_steps=4", "cluster.num_ranks_per_node=2")
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3, 4]
    told = (folder / "log.txt").read_text()
    assert "not bit by bit: cluster.num_ranks_per_node: '1' there, '2' here" in told
    _run(folder, "trainer.num_steps=5")
    one = _run(tmp_path / "one", "trainer.num_steps=5")
    drift = [
        abs(ours["reward/mean"] - theirs["reward/mean"])
        for ours, theirs in zip(read_metrics(folder)[1:], read_metrics(one)[1:], strict=True)
    ]
    assert max(drift) < 0.2


def test_a_rank_that_is_killed_is_started_again_and_no_bit_is_different(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", "trainer.num_steps=6", *TWO_RANKS)
    folder = tmp_path / "killed"
    killer = threading.Thread(target=_kill_a_rank, args=(folder / "metrics.jsonl",))
    killer.start()
    _run(folder, "trainer.num_steps=6", *TWO_RANKS)
    killer.join()
    told = (folder / "log.txt").read_text()
    assert "workers are started again and go on from step" in told
    assert "WorkerDiedError" in told
    assert _metrics(folder) == _metrics(whole)
    assert _samples(folder) == _samples(whole)
    _assert_same_state(folder, whole)


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=2")
    before = (folder / "metrics.jsonl").read_bytes()
    _run(folder, "trainer.num_steps=2")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_what_came_after_the_checkpoint_is_rolled_back_and_done_again(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", "trainer.num_steps=4")
    folder = _run(tmp_path / "run", "trainer.num_steps=3")
    shutil.rmtree(folder / "checkpoints" / "step-000000003")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # killed while it wrote
    _run(folder, "trainer.num_steps=4")
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3, 4]
    _assert_same_state(folder, whole)


@pytest.mark.parametrize("tear", ["truncate", "flip", "manifest", "remove"])
def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, tear: str) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=4")
    torn = folder / "checkpoints" / "step-000000004"
    shard = next(torn.glob("actor/*.safetensors"))
    data = bytearray(shard.read_bytes())
    if tear == "truncate":
        shard.write_bytes(data[:-100])
    elif tear == "flip":
        data[-5] ^= 1
        shard.write_bytes(data)
    elif tear == "manifest":
        (torn / "manifest.json").write_text('{"format": 1,')
    else:
        shard.unlink()
    _run(folder, "trainer.num_steps=5")
    told = (folder / "log.txt").read_text()
    assert "step-000000004 is torn" in told
    assert "going on from the checkpoint of step 2" in told
    _assert_same_state(folder, _run(tmp_path / "whole", "trainer.num_steps=5"))


def test_other_settings_are_refused_key_by_key_unless_accepted(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=2")
    changed = ("trainer.num_steps=3", "actor.optimizer.weight_decay=0.5")
    with pytest.raises(CheckpointError, match=r"weight_decay: 0.0 there, 0.5 here.*\n.*accept"):
        _run(folder, *changed)
    _run(folder, *changed, "checkpoint.accept_changes=true")
    assert (
        "change that was accepted: actor.optimizer.weight_decay" in (folder / "log.txt").read_text()
    )


def test_other_rows_are_refused_unless_accepted(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    overrides = ("data=files", f"data.train_files=[{data}]", "data.use_chat_template=false")
    overrides += ("eval.every_num_steps=0", "data.max_prompt_tokens=8")
    _write_rows(data, range(10, 30))
    folder = _run(tmp_path / "run", "trainer.num_steps=2", *overrides)
    _write_rows(data, range(11, 31))
    with pytest.raises(DataError, match=r"the data has changed.*accept_changes=true"):
        _run(folder, "trainer.num_steps=3", *overrides)
    _run(folder, "trainer.num_steps=3", *overrides, "checkpoint.accept_changes=true")


def test_a_checkpoint_of_another_model_is_refused_by_tensor_names(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=2")
    other = ("trainer.num_steps=3", "model.starter.num_layers=2", "checkpoint.accept_changes=true")
    with pytest.raises(Exception, match=r"of another model: \d+ tensors: is missing.*layers\.1"):
        _run(folder, *other)


def test_a_run_without_checkpoints_is_never_taken_up(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=1", "checkpoint.every_num_steps=0")
    with pytest.raises(RunFolderError, match=r"without checkpoints.*trainer\.overwrite=true"):
        _run(folder, "trainer.num_steps=1")


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", "trainer.num_steps=2")
    shutil.rmtree(folder / "checkpoints")
    _run(folder, "trainer.num_steps=2")
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2]


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = _run(
        tmp_path / "run",
        "trainer.num_steps=6",
        "checkpoint.every_num_steps=1",
        "checkpoint.keep_last=2",
        "checkpoint.keep_best=1",
        "eval.every_num_steps=1",
    )
    scores = {int(line["step"]): line["eval/reward/mean"] for line in read_metrics(folder)[1:]}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = {int(path.name[5:]) for path in (folder / "checkpoints").iterdir()}
    assert kept == {5, 6, best}


def test_supervised_fine_tuning_resumes_bit_by_bit(tmp_path: Path) -> None:
    tuning = ("mode=sft", "sft.batch_size=8", "sft.eval_every_num_steps=2")
    whole = _run(tmp_path / "whole", "sft.num_steps=4", *tuning)
    parts = tmp_path / "parts"
    for num_steps in (2, 4):
        _run(parts, f"sft.num_steps={num_steps}", *tuning)
    assert _metrics(parts) == _metrics(whole)
    _assert_same_state(parts, whole)


def _run(folder: Path, *overrides: str) -> Path:
    config = small_config(folder, *SAVING, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return folder


def _kill_a_rank(metrics: Path) -> None:
    """Wait for the third step's line, and kill the last of this process's ranks."""
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 4:
        time.sleep(0.01)
    below = psutil.Process().children(recursive=True)
    ranks = [process for process in below if process.name().startswith("ray::ActorRollout")]
    ranks[-1].kill()


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in line.items() if not k.startswith(TIMED) and k != "elapsed_s"}
        for line in read_metrics(folder)
    ]


def _samples(folder: Path) -> bytes:
    return (folder / "samples.jsonl").read_bytes()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf" / "model.safetensors")


def _assert_same_state(first: Path, second: Path) -> None:
    newest = [max((folder / "checkpoints").glob("step-*[0-9]")) for folder in (first, second)]
    assert newest[0].name == newest[1].name
    for path in newest[1].glob("*/*.safetensors"):
        ours, theirs = (load_file(new / path.relative_to(newest[1])) for new in newest)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


def _write_rows(path: Path, numbers: range) -> None:
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in numbers]
    path.write_text("\n".join(json.dumps(row) for row in rows))
