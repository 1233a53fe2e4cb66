"""The prompts of whole runs: mixes, epochs, turns, and those that stay open over phases."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.data import row_table
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from hybridrl.run.starter import write_random_model
from tests.end_to_end.runs import samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _write_rows(folder: Path) -> None:
    for name, size in (("a", 6), ("b", 3)):
        rows = [{"prompt": f"{n}{size}=", "answer": str(n)} for n in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_a_mix_resumes_with_the_rows_of_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_table, "ROWS_IN_MEMORY", 4)  # one source in a file, one in memory
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    mixed = (
        *("data=files", "data.use_chat_template=false", "data.max_prompt_tokens=8"),
        *("model.starter.num_warmup_steps=0", "eval.every_num_steps=0", VARIED),
        f"++data.sources.a.files=[{tmp_path}/a.jsonl]",
        f"++data.sources.b={{files: [{tmp_path}/b.jsonl], weight: 2}}",
        *("checkpoint.every_num_steps=2", "trainer.num_epochs=2"),
    )
    _write_rows(tmp_path)
    lines = train(tmp_path / "unbroken", *mixed, "trainer.num_steps=50")
    assert len(lines) == 5  # 2 epochs of 9 rows, 4 rows a step
    assert {"reward/by_source/a", "reward/by_source/b"} <= lines[0].keys()
    for num_steps in (2, 50):
        _write_rows(tmp_path)
        resumed = train(tmp_path / "resumed", *mixed, f"trainer.num_steps={num_steps}")
    # The files are written again for each run: read again, with the same fingerprint.
    assert len(list((tmp_path / "cache/rows").iterdir())) == 3
    for name in ("reward/mean", "policy/grad_norm", "data/epoch"):
        assert [line[name] for line in lines] == [line[name] for line in resumed]
    (tmp_path / "b.jsonl").write_text('{"prompt": "9=", "answer": "9"}')
    more = ("trainer.num_steps=50", "trainer.num_epochs=9", "checkpoint.accept_changes=false")
    with pytest.raises(DataError, match=r"the data has changed \(b: \w{12} there, \w{12} here\)"):
        train(tmp_path / "resumed", *mixed, *more)


def test_all_turns_of_conversations_are_learned(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    small = small_config(tmp_path / "small")
    assert small.model.starter is not None
    write_random_model(small.model.starter, tmp_path / "model", seed=0)
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    for name, num_tokens in (("last", 2), ("all", 5)):
        (line,) = train(
            tmp_path / name,
            *("mode=sft", f"sft.turns={name}", "trainer.num_steps=1"),
            *("trainer.num_prompts_per_step=1", "eval.every_num_steps=0"),
            *("model.starter=null", f"model.path={tmp_path}/model"),
            *("data=files", f"data.train_files=[{tmp_path}/chats.jsonl]", "data.answer_key=null"),
            *("data.prompt_key=messages", "data.max_prompt_tokens=16"),
        )
        assert line["data/loss_tokens"] == num_tokens


NUM_STEPS, NUM_PROMPTS = 6, 4
OVERSAMPLED = (
    *("cluster.num_ranks_per_node=2", "actor.max_tokens_per_microbatch=64"),
    *(f"trainer.num_steps={NUM_STEPS}", "eval.every_num_steps=3", "eval.num_prompts=4"),
    *("rollout.oversample=2", "algorithm.rollout_correction=importance"),
    *("rollout.canary_max_drift_nats=0.1", "rollout.num_slots=6", "rollout.max_response_tokens=12"),
    *("checkpoint.every_num_steps=1", "checkpoint.keep_last=10", VARIED),
    *("tracking.num_samples_per_step=1000", "actor.optimizer.lr=1e-3"),
    # Without these steps hardly a response ends before its limit, and where all end at once none is
    # interrupted.
    "model.starter.num_warmup_steps=40",
)


def learned_by_step(folder: Path) -> list[set[int]]:
    """The indices of the prompts that were learned from, up to each step."""
    store, learned = CheckpointStore(folder / "checkpoints"), []
    for step in range(1, NUM_STEPS + 1):
        manifest = json.loads((store.folder_of(step) / "manifest.json").read_text())
        sampler = manifest["run"]["sampler"]
        learned.append(set(range(sampler["num_drawn"])) - set(sampler["open_prompts"]))
    return learned


def learned_once(folder: Path) -> list[str]:
    """The texts of all prompts, sorted; each index was learned from in one step alone."""
    learned = learned_by_step(folder)
    assert [len(indices) for indices in learned] == [
        NUM_PROMPTS * step for step in range(1, NUM_STEPS + 1)
    ]
    assert all(before < after for before, after in pairwise(learned))
    prompts = [sample["prompt"] for sample in samples_of(folder, "train")]
    assert len(prompts) == NUM_STEPS * NUM_PROMPTS
    return sorted(prompts)


def test_open_prompts_continue_and_are_learned_from_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *OVERSAMPLED)
    prompts = learned_once(folder)
    steps = {int(line["step"]): line for line in read_metrics(folder)}
    is_open = [steps[step]["rollout/open_prompts"] for step in range(1, NUM_STEPS + 1)]
    assert is_open == [NUM_PROMPTS] * (NUM_STEPS - 1) + [0]
    assert steps[1]["rollout/staleness_steps/max"] == 0
    assert max(line.get("rollout/staleness_steps/max", 0) for line in steps.values()) >= 1
    assert sum(line.get("rollout/interrupted_tokens", 0) for line in steps.values()) > 0

    for step in range(4, NUM_STEPS + 1):  # as if it had died in step 4
        shutil.rmtree(folder / "checkpoints" / f"step-{step:09}")
    newest = CheckpointStore(folder / "checkpoints").newest()
    assert newest is not None
    assert len(newest.manifest.run.sampler.open_prompts) == NUM_PROMPTS
    shutil.rmtree(folder / "hf")
    train(folder, *OVERSAMPLED)
    assert learned_once(folder) == prompts
