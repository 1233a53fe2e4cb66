"""A mix of sources and a number of epochs, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.data import row_table
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from hybridrl.run.launch import run
from hybridrl.run.starter import write_random_model
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _mixed(folder: Path, *overrides: str) -> tuple[str, ...]:
    for name, size in (("a", 6), ("b", 3)):
        rows = [{"prompt": f"{n}{size}=", "answer": str(n)} for n in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        *("data=files", "data.use_chat_template=false", "data.max_prompt_tokens=8"),
        *("model.starter.num_warmup_steps=0", "eval.every_num_steps=0", VARIED),
        f"++data.sources.a.files=[{folder}/a.jsonl]",
        f"++data.sources.b={{files: [{folder}/b.jsonl], weight: 2}}",
        *("checkpoint.every_num_steps=2", "trainer.num_epochs=2", *overrides),
    )


def test_a_mix_resumes_with_the_rows_of_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_table, "ROWS_IN_MEMORY", 4)  # one source in a file, one in memory
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    whole = small_config(tmp_path / "unbroken", *_mixed(tmp_path, "trainer.num_steps=50"))
    run(whole, resolved_yaml="")
    lines = read_metrics(tmp_path / "unbroken")
    assert len(lines) == 5  # 2 epochs of 9 rows, 4 rows a step
    assert {"reward/by_source/a", "reward/by_source/b"} <= lines[0].keys()
    for num_steps in (2, 50):
        overrides = _mixed(tmp_path, f"trainer.num_steps={num_steps}")
        run(small_config(tmp_path / "resumed", *overrides), resolved_yaml="mode: train\n")
    # The files are written again for each run: read again, with the same fingerprint.
    assert len(list((tmp_path / "cache/rows").iterdir())) == 3
    resumed = read_metrics(tmp_path / "resumed")
    for name in ("reward/mean", "policy/grad_norm", "data/epoch"):
        assert [line[name] for line in lines] == [line[name] for line in resumed]
    (tmp_path / "b.jsonl").write_text('{"prompt": "9=", "answer": "9"}')
    overrides = ("trainer.num_epochs=9", "checkpoint.accept_changes=false")
    changed = small_config(tmp_path / "resumed", *_mixed_again(tmp_path, *overrides))
    with pytest.raises(DataError, match=r"the data has changed \(b: \w{12} there, \w{12} here\)"):
        run(changed, resolved_yaml="mode: train\n")


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
        config = small_config(
            tmp_path / name,
            *(
                "mode=sft",
                f"sft.turns={name}",
                "trainer.num_steps=1",
                "trainer.num_prompts_per_step=1",
            ),
            *("eval.every_num_steps=0", "model.starter=null", f"model.path={tmp_path}/model"),
            *("data=files", f"data.train_files=[{tmp_path}/chats.jsonl]", "data.answer_key=null"),
            *("data.prompt_key=messages", "data.max_prompt_tokens=16", "eval.every_num_steps=0"),
        )
        run(config, resolved_yaml="")
        assert read_metrics(tmp_path / name)[0]["data/loss_tokens"] == num_tokens


def _mixed_again(folder: Path, *overrides: str) -> tuple[str, ...]:
    """The same mix, with the files as they stand now."""
    texts = {name: (folder / f"{name}.jsonl").read_text() for name in ("a", "b")}
    mixed = _mixed(folder, "trainer.num_steps=50", *overrides)
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    return mixed
