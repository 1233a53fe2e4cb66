"""Every snippet of README and docs works: commands are composed and checked, Python is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import pytest

from hybridrl.config.load import load_config
from hybridrl.config.reference import help_text
from hybridrl.errors import ConfigErrors
from tests.composing import composed
from tests.config.test_checks import NO_TENSORS
from tests.docs.blocks import PAGES, ROOT, Block, blocks, blocks_of, commands_of
from tests.planning.models import QWEN2_5_0_5B, QWEN2_5_VL_3B, QWEN3_8B

BLOCKS = blocks()
PYTHON = [b for b in BLOCKS if b.language == "python"]
QUOTED = [b for b in PYTHON if b.title.startswith("hybridrl/")]
CONSOLE = [b for b in BLOCKS if b.language == "console"]
WITH_COMMANDS = [page for page in PAGES if any(commands_of(page))]
RUN_KEYS = ("cluster.ray_address", "trainer.run_dir=/")  # of machines that are not here
SETS_A_VARIABLE = re.compile(r"[A-Z_]+=")
FILE = re.compile(r"(?:benchmarks|recipes|tests)/[\w/.]+$")
SCORER = {
    **QWEN2_5_0_5B,
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that a reader of the documents has by then."""
    for name, settings in {
        "models/Qwen2.5-0.5B-Instruct": QWEN2_5_0_5B,
        "models/Qwen3-8B": QWEN3_8B,
        "models/Qwen2.5-VL-3B-Instruct": QWEN2_5_VL_3B,
        "models/my_reward_model": SCORER,
        "models/teacher": {**QWEN2_5_0_5B, "vocab_size": 512},  # as the starter model has
    }.items():
        model = tmp_path / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(settings))
        (model / "model.safetensors").write_text(NO_TENSORS)
        (model / "tokenizer.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "data" / "math", tmp_path / "data" / "gsm8k"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("train.jsonl", "test.jsonl"):
            (folder / name).write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "cities.md").write_text("Lima lies at the sea.")
    for name in ("pairs.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1", "chosen": "1", "rejected": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows, as ``my_reward.py``."""
    for block in blocks_of(page):
        if block.title and not block.title.startswith("hybridrl/"):
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_a_page_pass_every_check(page: Path, user_folder: Path) -> None:
    write_files(page, user_folder)
    refused = {}
    for words in commands_of(page):
        if problem := problem_of(words):
            refused[" ".join(words)] = problem
    assert refused == {}


def problem_of(words: Sequence[str]) -> str:
    """Say why a command would not start; empty if it would."""
    words = list(dropwhile(SETS_A_VARIABLE.match, words))
    missing_files = [w for w in words if FILE.match(w) and not (ROOT / w).exists()]
    if missing_files:
        return f"no file {missing_files}"
    if words[0].startswith("recipes/"):
        return _problem_of_run(words[1:])
    if words[0] == "make":
        return _problem_of_make(words[1:])
    if words[:2] == ["pip", "install"]:
        extras = {name for word in words for name in re.findall(r"\[(.*)\]", word)}
        known = (ROOT / "setup.py").read_text()
        missing = {e for names in extras for e in names.split(",") if f'"{e}": [' not in known}
        return f"no extra {missing}" if missing else ""
    if words[:2] != ["python", "-m"]:
        return ""
    module, *arguments = words[2:]
    if find_spec(module) is None and module.partition(".")[0] in ("hybridrl", "benchmarks"):
        return f"no module {module}"
    return _problem_of_run(arguments) if module == "hybridrl.main" else ""


def _problem_of_make(words: Sequence[str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    if unknown := [target for target in targets if f"\n{target}:" not in makefile]:
        return f"no target {unknown}"
    (arguments,) = [w.removeprefix("ARGS=") for w in words if w.startswith("ARGS=")] or [""]
    return _problem_of_run(arguments.split()) if targets == ["train"] else ""


def _problem_of_run(arguments: Sequence[str]) -> str:
    if "--help" in arguments:
        help_text([a for a in arguments if a != "--help"], ROOT / "hydra_configs", [])
        return ""
    overrides = [a for a in arguments if "=" in a and not a.startswith(RUN_KEYS)]
    if "--multirun" in arguments:
        overrides = [override.split(",")[0] for override in overrides]
    try:
        load_config(composed(*overrides))
    except ConfigErrors as errors:
        return "; ".join(str(e) for e in errors.violations if not _needs_a_machine(str(e)))
    return ""


def _needs_a_machine(refusal: str) -> bool:
    """Whether it is an optional package, or a cluster, that this machine lacks."""
    return "installed" in refusal or "cluster.num_nodes" in refusal


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.page)
def test_quoted_code_is_the_code(block: Block) -> None:
    source = (ROOT / block.title).read_text(encoding="utf-8")
    versions = [textwrap.indent(block.text, " " * depth) for depth in (0, 4, 8)]
    assert any(version in source for version in versions), block.text


@pytest.mark.parametrize(
    "block", [b for b in PYTHON if b not in QUOTED], ids=lambda b: f"{b.page}:{b.title}"
)
def test_python_of_a_page_runs(block: Block, user_folder: Path) -> None:
    write_files(ROOT / block.page, user_folder)
    exec(compile(block.text, block.page, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_rows_of_a_page_have_a_prompt_and_an_answer(block: Block) -> None:
    rows = [json.loads(line) for line in block.text.splitlines()]
    assert all({"prompt", "answer"} <= row.keys() for row in rows)


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.page)
def test_output_of_a_command_is_what_a_page_shows(block: Block, user_folder: Path) -> None:
    command, *shown = block.text.splitlines()
    words = command.removeprefix("$ python ").split()
    done = subprocess.run(
        [sys.executable, *words],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed = " ".join((done.stdout + done.stderr).split())
    assert printed == " ".join(" ".join(shown).split())
