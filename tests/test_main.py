import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import hybridrl
from hybridrl import main as main_module
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.main import compose
from tests.command_line import call_main
from tests.end_to_end.small import read_metrics, small_overrides
from tests.ranks import FORKSERVER

ROOT = Path(hybridrl.__file__).parents[1]


def start_main(
    *arguments: str, folder: Path, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridrl.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def refusal_of(*arguments: str, folder: Path) -> str:
    """What a refused command says: status 2, no traceback, and no file is left."""
    before = files_in(folder)
    done = call_main(*arguments, folder=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("ConfigError")
    assert done.stdout == ""
    assert files_in(folder) == before
    return done.stderr


def files_in(folder: Path) -> list[Path]:
    """All but what Python keeps of a module that it has compiled."""
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


def test_cfg_job_prints_the_configuration_of_a_recipe_with_overrides(tmp_path: Path) -> None:
    done = call_main("--cfg", "job", "recipes=algorithms/dapo", "rollout.top_k=5", folder=tmp_path)
    printed = yaml.safe_load(done.stdout)
    assert printed["algorithm"]["clip_high"] == 0.28
    assert printed["rollout"]["top_k"] == 5
    assert list(tmp_path.iterdir()) == []


def test_check_validates_says_what_follows_and_starts_nothing(tmp_path: Path) -> None:
    done = call_main("mode=check", "trainer.num_steps=7", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "batch sizes       ok" in done.stdout
    assert "128 (16 prompts x 8 responses)" in done.stdout
    assert "7 (1 a step x 7 steps)" in done.stdout
    assert "memory            mode=plan executes a step without values" in done.stdout
    assert done.stdout.endswith(
        "\n\nA run would train the starter model with grpo and ppo_clip on 16 prompts x 8 "
        "responses a step of sort_digits, learning rate 3e-05, 7 steps, on 1 CPU rank.\n"
    )
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


CHECKED_AND_PLANNED = """
import sys, hybridrl.main as m
try:
    for words in (["mode=check"], ["mode=plan", "model=hf_folder", "model.path=."]):
        sys.argv[1:] = words
        m.main()
finally:
    assert not {"torch", "ray", "transformers"} & set(sys.modules)
"""


def test_check_and_plan_import_neither_torch_nor_ray_and_start_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    done = subprocess.run(
        [sys.executable, "-c", CHECKED_AND_PLANNED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=200,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "checked, nothing started" in done.stdout
    assert done.stderr.startswith("ConfigError: model.path=")
    assert "'mamba'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_plan_is_printed_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a process imports torch for 7 s.
    monkeypatch.setattr("hybridrl.rehearsal.plan.get_context", lambda _: FORKSERVER)
    done = call_main("mode=plan", "cluster.device_memory_gib=0.9", folder=tmp_path)
    assert done.returncode == 2
    assert "update *" in done.stdout
    assert "Does not fit" in done.stdout
    *progress, refusal = done.stderr.splitlines()
    assert refusal.startswith("ConfigError: cluster.device_memory_gib=0.9: peak of a rank ")
    assert "Fix: set " in refusal
    assert all("executions on fake devices" in line for line in progress)
    assert list(tmp_path.iterdir()) == []


MISTYPED = {
    "recipes=dapoo": ["recipes='dapoo'", "'algorithms/dapo'"],
    "recipes=dapo_cpu": ["set recipes=algorithms/dapo"],
    "actor=fdsp2": ["actor='fdsp2'", "'fsdp2'"],
    "recipes=clip_higher_kl_cpu": ["set recipes=algorithms/dapo"],
    "algorithm=dpo": ["set mode=dpo"],
    "recipes=grpo": ["did you mean 'gpu/grpo_", "'gpu/grpo_gsm8k", "? --help lists all"],
    "rollout.n=8": ["set rollout.num_responses_per_prompt=8"],
    "rollout.temprature=1": ["rollout.temprature='1'", "did you mean rollout.temperature=1"],
    "rollot.temperature=1": ["rollot.temperature", "did you mean rollout.temperature=1"],
    "actr=fsdp2": ["actr", "did you mean actor=fsdp2"],
    "~rollout.topk": ["rollout.topk", "did you mean rollout.top_k"],
    "rollout.top_k=[": ["rollout.top_k='['", "quote"],
    "seed=1,2": ["seed='1,2'", "--multirun"],
    "trainer.num_steps=${trainer.num_stps}": ["trainer.num_stps", "did you mean"],
    "rollout.top_p=2": ["rollout.top_p=2", "set rollout.top_p=1.0"],
    "+rollout.topk=2": ["rollout.topk=2", "use rollout.top_k=2"],
}


@pytest.mark.parametrize("argument", ["rollout.n=8", "trainer.num_steps=${trainer.num_stps}"])
def test_a_mistyped_argument_is_one_short_message_with_what_was_meant(
    argument: str, tmp_path: Path
) -> None:
    message = refusal_of(argument, folder=tmp_path)
    assert all(word in message for word in MISTYPED[argument])
    assert len(message.splitlines()) == 1


FILES = ("mode=check", "data=files", "data.train_files=[rows.jsonl]", "data.max_prompt_tokens=8")
PROBLEMS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "flags of other frameworks": (
        ("--rollout-batch-size", "32", "--lr=1e-6", "--colocate", "--rollout.top_p", "0.9"),
        4,
        (
            "--rollout-batch-size='32': it is a key of another framework. Fix: set trainer.num_pro",
            "set actor.optimizer.lr=1e-6",
            "--colocate=''",
            "keys are typed without dashes. Fix: set rollout.top_p=0.9",
        ),
    ),
    "what Hydra refuses and what the rules refuse": (
        (
            *("rollout.temprature=1", "recipes=dapo_cpo", "cluster.num_ranks_per_node=2"),
            "trainer.num_prompts_per_step=15",
        ),
        3,
        ("rollout.temprature", "recipes", "trainer.num_prompts_per_step=15"),
    ),
    "bad rows beside a bad configuration": (
        (*FILES, "rollout.n=4", "data.eval_files=[none.jsonl]", "trainer.num_steps=0"),
        5,
        (
            "set rollout.num_responses_per_prompt=4",
            "trainer.num_steps=0",
            "data.use_chat_template=True",
            "'none.jsonl': the file is empty, 0 bytes",
            "rows.jsonl:1: 'prompt' is 5, must be text",
        ),
    ),
    "a bad reward beside bad rows": (
        (
            *(*FILES, "data.use_chat_template=false", "eval.every_num_steps=0"),
            "reward.function=mine.py:right",
        ),
        2,
        ("No module named 'nowhere' (mine.py:1)", "rows.jsonl:1: 'prompt' is 5"),
    ),
}


@pytest.mark.parametrize(("typed", "num_problems", "words"), PROBLEMS.values(), ids=PROBLEMS)
def test_all_problems_of_a_command_are_told_at_once(
    typed: tuple[str, ...], num_problems: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": 5, "answer": "2"}\n')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "mine.py").write_text("import nowhere\ndef right(response, answer): ...\n")
    message = refusal_of(*typed, folder=tmp_path)
    assert message.startswith(f"ConfigErrors: {num_problems} problems:\n")
    for word in words:
        assert word in message


def test_each_mistyped_argument_of_one_command_has_its_line(tmp_path: Path) -> None:
    first, *lines = refusal_of(*MISTYPED, folder=tmp_path).splitlines()
    assert first == f"ConfigErrors: {len(MISTYPED)} problems:"
    assert len(lines) == len(MISTYPED)
    for words in MISTYPED.values():
        assert any(all(word in line for word in words) for line in lines), words


def test_what_hydra_cannot_read_is_explained_without_traceback(tmp_path: Path) -> None:
    expected = {
        "trainer=5": "trainer='5': a section is chosen by the name of one of its files",
        "lora=true": "Fix: set lora=NAME; known: default, none",
        "recipes=null": "known: algorithms/",
        "rollout=[1]": "known: hf, sglang",
        f"actor={'a' * 300}": "there is no such file in this group",
        f"seed={'9' * 5000}": "a number of thousands of digits",
        f"eval.num_prompts={'[' * 2000}1{']' * 2000}": "it cannot be read: maximum recursion depth",
        f"data.seed={'9' * 400}": "9': there is no such key",
    }
    message = refusal_of(*expected, folder=tmp_path)
    assert message.startswith(f"ConfigErrors: {len(expected)} problems:\n")
    for words in expected.values():
        assert words in message


def test_a_reference_that_leads_nowhere_is_named_with_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    expected = {
        "trainer.num_steps=${no.such.key}": "Interpolation key 'no.such.key' not found",
        "seed=${seed}": "seed='${seed}': Recursive interpolation detected",
        "trainer.run_dir=${oc.env:NOWHERE}": "Environment variable 'NOWHERE' not found",
        "data.train_files=[a,${nores:x}]": "train_files[1]='${nores:x}': Unsupported",
    }
    message = refusal_of(*expected, folder=tmp_path)
    for words in expected.values():
        assert words in message


def test_a_check_loads_a_reward_file(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(**_): ...\n")
    done = call_main("mode=check", "reward.function=r.py:score", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_mistyped_key_beside_a_flag_is_explained_too(tmp_path: Path) -> None:
    message = refusal_of("--cfg", "job", "rollout.temprature=1", folder=tmp_path)
    assert "rollout.temprature='1'" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout: {top_k: 1\n", ["mine.yaml", "line 2"]),
        ("rollout: {topk: 1}\n", ["rollout.topk=1", "use rollout.top_k=1"]),
        ("defaults: [override /actor: fsdp3]\n", ["actor='fsdp3'", "'fsdp2'"]),
        pytest.param(
            "defaults: [override /actr: fsdp2]\n", ["actr", "mean actor"], marks=pytest.mark.nightly
        ),
    ],
)
def test_a_broken_recipe_of_the_user_is_explained(
    text: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("# @package _global_\n" + text)
    message = refusal_of(f"hydra.searchpath=[file://{tmp_path}]", "recipes=mine", folder=tmp_path)
    for word in words:
        assert word in message


def test_recipes_of_the_current_folder_are_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("# @package _global_\nseed: 7\n")
    done = call_main("--cfg", "job", "recipes=mine", folder=tmp_path)
    assert yaml.safe_load(done.stdout)["seed"] == 7, done.stderr
    assert "'mine'" in refusal_of("recipes=mines", folder=tmp_path)
    assert "recipes/NAME.yaml of the current folder" in refusal_of("recipes=q", folder=tmp_path)


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "line 3 has an alias, *a0"),
        ("a: &a [*a]\n", "line 2 has an alias, *a"),
        (f"a: {'[' * 51}{']' * 51}\n", "nested more than 50 deep"),
        (f"a: {'[' * 1000}{']' * 1000}\n", "nested more than 50 deep"),
        ("# " + "x" * 300_000, "bytes is no recipe"),
        (f"seed: {'9' * 5000}\n", "a number of thousands of digits"),
        ("project: M\xfcller\n", "line 2 is not UTF-8: byte 0xfc"),
        ("mode: !!set {a}\n", "not a supported primitive type"),
        (
            "".join(f"a{n}: {f'${{a{n - 1}}}' * 10}\n" for n in range(1, 9)) + "a0: text\n",
            "its references spell out more than 1000000 characters",
        ),
    ],
)
def test_a_recipe_that_would_fill_the_memory_is_refused_unread(
    text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    file = tmp_path / "recipes/mine.yaml"
    file.write_bytes(b"# @package _global_\n" + text.encode("latin-1"))
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        compose([f"hydra.searchpath=[file://{tmp_path}]", "recipes=mine"])
    assert words in str(refused.value)


def test_unknown_keys_cost_no_composition_each(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[list[str]] = []

    def counted(overrides: list[str]) -> object:
        composed.append(overrides)
        return compose(overrides)

    monkeypatch.setattr(main_module, "compose", counted)
    typed = [f"foo{n}.bar={n}" for n in range(20)]
    violations = main_module._explain_all(ConfigError("a", None, "b"), [*typed, "seed=1"])
    assert [violation.key for violation in violations] == [key.partition("=")[0] for key in typed]
    assert [*composed[0]] == ["seed=1"]
    assert len(composed) <= 2


def test_multirun_runs_the_configuration_of_each_value(tmp_path: Path) -> None:
    done = call_main("--multirun", "trainer.num_steps=3,4", "mode=check", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "x 3 steps" in done.stdout
    assert "x 4 steps" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_check_counts_one_as_one_and_keeps_its_columns(tmp_path: Path) -> None:
    sizes = ("num_prompts_per_step=1", "num_steps=1")
    done = call_main("mode=check", *(f"trainer.{size}" for size in sizes), folder=tmp_path)
    assert "on 1 prompt x 8 responses a step" in done.stdout
    assert ", 1 step, on 1 CPU rank" in done.stdout
    assert "1 (1 a step x 1 step)" in done.stdout
    title, *rows = filter(None, done.stdout.split("\n\nA run")[0].splitlines())
    assert title == "checked, nothing started:"
    assert all(row[17] == " " and row[18] != " " for row in rows)


def test_help_keeps_its_columns_and_lists_the_recipes(tmp_path: Path) -> None:
    done = call_main("--help", folder=tmp_path)
    sections = done.stdout.split("first:\n")[1].split("\n\n")[0].splitlines()
    assert all(line[54] == " " and line[55] != " " for line in sections)
    assert max(map(len, sections)) <= 100
    assert "recipes: algorithms/" in done.stdout
    assert "recipes/cluster" not in done.stdout  # files for clusters, and no recipes
    assert "kuberay" not in done.stdout
    assert ".venv" not in done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this checkout was unpacked."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # a build writes beside its sources
    for name in ("hybridrl", "hydra_configs", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    command = [sys.executable, "-c", build]  # as pip does it
    done = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_brings_recipes_and_configuration_inside_the_package(
    installed: Path, tmp_path: Path
) -> None:
    assert not (installed / "recipes").exists()
    shown = start_main("--info", "searchpath", folder=tmp_path, root=installed)
    assert str(installed / "hybridrl") in shown.stdout
    assert str(ROOT / "hydra_configs") not in shown.stdout
    done = start_main("mode=check", "recipes=algorithms/dapo", folder=tmp_path, root=installed)
    assert done.returncode == 0, done.stderr
    assert "checked, nothing started" in done.stdout
    foreign = start_main("mode=check", "rollout.n=8", folder=tmp_path, root=installed)
    assert "set rollout.num_responses_per_prompt=8" in foreign.stderr
    assert list(tmp_path.iterdir()) == []
    assert {path.name for path in (installed / "hybridrl/recipes/cluster").iterdir()} == {
        path.name for path in (ROOT / "recipes/cluster").iterdir()
    }


@pytest.mark.nightly
def test_the_wheel_trains_from_another_folder(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    done = start_main(*small_overrides(tmp_path / "run"), folder=tmp_path, root=installed)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert (tmp_path / "run/hf/config.json").is_file()
