from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.report.charts import build_charts
from hybridrl.report.findings import _ADD_KL
from hybridrl.report.page import try_machine, try_report, write_report
from hybridrl.report.run import read_run, read_samples
from hybridrl.run.run_folder import last_step
from tests.report.folders import chart, page_of, sample, write_folder


def test_a_run_without_a_step_has_a_page_without_charts_and_their_library(tmp_path: Path) -> None:
    text = page_of(write_folder(tmp_path)).text
    assert "unfinished\n: step 0 of 4" in text
    assert "Learning" not in text
    assert (tmp_path / "report.html").stat().st_size < 100_000


def test_a_running_run_has_a_page_of_its_complete_lines(tmp_path: Path) -> None:
    metrics = [{"step": n, "elapsed_s": 1.5 * n, "reward/mean": 0.1 * n} for n in (1, 2, 3)]
    folder = write_folder(tmp_path, metrics=metrics, samples=[sample(1)], torn='{"step": 4, "rew')
    assert "unfinished\n: step 3 of 4, 4 s" in page_of(folder).text
    assert chart(folder, "Reward").figure["data"][0]["x"] == [1, 2, 3]
    assert list(read_samples(folder / "samples.jsonl").train) == [1]


@pytest.mark.parametrize("step", ['"2"', '"two"', "[2]", "1" + "0" * 400, "null"])
def test_damaged_lines_are_counted_and_left_out(tmp_path: Path, step: str) -> None:
    metrics = [{"step": n, "elapsed_s": 1.5 * n, "reward/mean": 0.1 * n} for n in (1, 2, 3)]
    folder = write_folder(tmp_path, metrics=metrics, torn='{"step": 4, "rew')
    file = folder / "metrics.jsonl"
    good, damaged, cut, torn = file.read_text().splitlines()
    damaged = damaged.replace('"step": 2', f'"step": {step}')
    file.write_text(f"{good}\n{cut[:20]}\n{damaged}\n{torn}")
    assert "2 lines of metrics.jsonl cannot be read" in page_of(folder).text
    assert read_run(folder).history.steps == [1]
    assert last_step(folder) == 1


@pytest.mark.parametrize("config", [b"\xff\x00", b"trainer: {num_steps: .inf}", b"- 1"])
def test_a_damaged_configuration_is_told_on_the_page(tmp_path: Path, config: bytes) -> None:
    folder = write_folder(tmp_path, metrics=[{"step": 1, "reward/mean": 1.0}])
    (folder / "config.yaml").write_bytes(config)
    is_told = "config.yaml cannot be read" in page_of(folder).text
    assert is_told == (b"trainer" not in config)


def test_a_value_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    metrics: list[dict[str, float | None]] = [
        {"step": 1, "reward/mean": 1.0, "policy/grad_norm": None},
        {"step": 2, "reward/mean": None, "policy/grad_norm": None},
        {"step": 3, "reward/mean": float("nan"), "policy/grad_norm": None},
        {"step": 4, "reward/mean": 2.0, "policy/grad_norm": float("inf")},
    ]
    folder = write_folder(tmp_path, metrics=metrics)
    assert chart(folder, "Reward").figure["data"][0]["y"] == [1.0, None, None, 2.0]
    run = read_run(folder)
    assert [c.title for c in build_charts(run.history, run.settings)] == ["Reward"]
    page_of(folder)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 1e308, -1e308, 10**400, "many", None, [1.0], {"a": math.inf}, True],
    ids=str,
)
def test_a_page_is_made_whatever_the_rows_hold(tmp_path: Path, value: object) -> None:
    names = (
        "reward/mean",
        "policy/grad_norm",
        "policy/skipped_updates",
        "time/step_s",
        "elapsed_s",
    )
    rows = [{"step": step, **dict.fromkeys(names, value)} for step in range(1, 41)]
    shown = [sample(step, reward=value, logprobs=[value], tokens=["1"]) for step in (1, 2)]
    shown += [sample(3, logprobs=value, tokens=value, split="eval", response=value, answer=value)]
    folder = write_folder(tmp_path, metrics=rows, samples=shown, torn="[" * 100_000)
    page = page_of(folder)
    assert "step 40 of 4" in page.text
    assert not any("Infinity," in script or "NaN" in script for script in page.scripts[1:])
    samples = read_samples(folder / "samples.jsonl")
    assert (list(samples.train), len(samples.held_out)) == ([1, 2], 1)


def test_of_two_lines_of_a_step_the_later_counts_or_adds_its_evaluation(tmp_path: Path) -> None:
    metrics = [{"step": n, "reward/mean": r} for n, r in ((1, 0.1), (2, 0.2), (2, 0.3), (3, 0.4))]
    metrics.insert(3, {"step": 2, "eval/reward/mean": 0.5})
    folder = write_folder(tmp_path, metrics=metrics)
    history = read_run(folder).history
    assert (history.get("eval/reward/mean").steps, history.steps) == ([2], [1, 2, 3])
    line = chart(folder, "Reward").figure["data"][0]
    assert (line["x"], line["y"]) == ([1, 2, 3], [0.1, 0.3, 0.4])


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "$data & é", "<b onclick=x>"]
)
def test_text_of_a_model_is_never_markup(tmp_path: Path, text: str) -> None:
    shown = [
        sample(1, prompt=text, response=text, answer=text, tokens=[text], logprobs=[-0.5]),
        sample(1, split="eval", prompt=text, response=text, answer=text, tokens=[]),
    ]
    metrics = [{"step": n, "reward/mean": 1.0 + n} for n in range(3)]
    page = page_of(write_folder(tmp_path, metrics=metrics, samples=shown))
    assert page.text.count(text) == 5  # prompts, responses, and the answer of the held-out one
    assert len(page.scripts) == 2  # the library, and the one chart
    assert page.sources == []  # nothing is loaded from anywhere


def test_a_page_fits_a_phone_and_runs_no_code_but_plotlys(tmp_path: Path) -> None:
    metrics = [{"step": n, "reward/mean": 1.0 + n} for n in range(3)]
    folder = write_folder(tmp_path, metrics=metrics, samples=[sample(1, split="eval")])
    page = page_of(folder)
    assert all("Plotly" in script for script in page.scripts)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width' in text
    assert text.count("<table>") == text.count('<div class="scroll"><table>')
    assert '"responsive": true' in text


def test_the_head_answers_what_a_reader_asks_first(tmp_path: Path) -> None:
    metrics = [{"step": n, "eval/reward/mean": r} for n, r in ((0, 0.4), (2, 0.7), (4, 0.6))]
    folder = write_folder(tmp_path, metrics=metrics)
    starter = "hidden_size: 192, num_layers: 4, num_attention_heads: 6, num_key_value_heads: 2"
    starter += ", intermediate_size: 512"
    starter += ", num_warmup_steps: 120, warmup_lr: 1e-3"
    config = (folder / "config.yaml").read_text()
    config += f"model: {{path: null, starter: {{{starter}}}}}\nseed: 7\n"
    config += "algorithm: {advantage: grpo, policy_loss: gspo}\n"
    config += "data: {task: null, train_files: [math.jsonl]}\nreward: {function: numeric}\n"
    (folder / "config.yaml").write_text(config)
    try_machine(folder)
    (folder / "checkpoints/step-000000004").mkdir(parents=True)
    lines = page_of(folder).texts
    facts = dict(itertools.pairwise(lines))
    assert facts["algorithm"] == "grpo, gspo"
    assert facts["model"] == "the starter model, 1.67 M parameters"
    assert facts["learning rate"] == "0.0001"
    assert facts["seed"] == "7"
    assert "math.jsonl" in facts["data"]
    assert facts["reward"] == "numeric"
    assert facts["to continue"] == f"the same command with trainer.run_dir={folder}"
    assert facts["best evaluation"] == "0.7, at step 2"
    assert f"{os.uname().nodename}, " in facts["machine of the driver"]


def test_a_failed_run_says_so_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    log = (
        "10:00:00 I hybridrl.trainer: hello\nthe run ended with an error\nTraceback (most recent\n"
        "hybridrl.errors.RewardError: reward.py raised\n10:00:01 I hybridrl.run.record: "
        "run folder: runs/mine\n"
    )
    text = page_of(write_folder(tmp_path, log=log)).text
    assert "failed\n: step 0" in text
    assert text.count("hybridrl.errors.RewardError: reward.py raised") == 3  # finding, quote, log


def test_a_run_resumed_after_an_error_has_not_failed(tmp_path: Path) -> None:
    log = "the run ended with an error\nE: x\n10:00:01 I hybridrl.run.resume: from step 3\n"
    assert "unfinished\n: step 0" in page_of(write_folder(tmp_path, log=log)).text


def test_ten_thousand_steps_are_thinned_without_losing_a_spike(tmp_path: Path) -> None:
    metrics = [
        {
            "step": n,
            "elapsed_s": n,
            "reward/mean": 5.0 if n == 4321 else n / 1e4,
            "time/generate_s": 1.0 + n % 3,
            "time/update_s": 2.0 + n % 2,
            "length/response_tokens/mean": 8.0 + n % 3,
        }
        for n in range(1, 10_001)
    ]
    folder = write_folder(tmp_path, metrics=metrics, samples=[sample(n) for n in range(1, 10_001)])
    run = read_run(folder)
    for drawn in build_charts(run.history, run.settings):
        for line in drawn.figure["data"]:
            assert len(line["x"]) == len(line["y"]) <= 1000
    steps, running_mean = chart(folder, "Reward").figure["data"]
    assert steps["y"][steps["x"].index(4321)] == 5.0
    assert max(running_mean["y"]) < 1.0
    train = read_samples(folder / "samples.jsonl").train
    assert (len(train), list(train)[-1]) == (12, 10_000)
    page = page_of(folder)
    assert len((folder / "report.html").read_bytes()) - len(page.scripts[0].encode()) < 500_000


def test_answers_to_the_same_held_out_prompt_are_together(tmp_path: Path) -> None:
    samples = [
        sample(step, split="eval", prompt=prompt, response=f"{prompt}{step}")
        for step in (0, 2, 4)
        for prompt in ("a=", "b=")
    ]
    folder = write_folder(tmp_path, samples=samples)
    held_out = read_samples(folder / "samples.jsonl").held_out
    assert list(held_out) == ["a=", "b="]
    assert [answer["response"] for answer in held_out["b="]] == ["b=0", "b=2", "b=4"]
    assert "b=0\n1\n2\nb=2" in page_of(folder).text


def test_prompts_whose_rewards_changed_most_come_first(tmp_path: Path) -> None:
    samples = [
        sample(step, split="eval", prompt=prompt, reward=reward)
        for step in (0, 2)
        for prompt, reward in (("right=", 1.0), ("learned=", step / 2), ("nearly=", step / 4))
    ]
    folder = write_folder(tmp_path, samples=samples)
    held_out = read_samples(folder / "samples.jsonl").held_out
    assert list(held_out) == ["learned=", "nearly=", "right="]


def test_metrics_without_a_chart_are_in_a_table(tmp_path: Path) -> None:
    metrics = [{"step": n, "data/epoch": 0.5 * n, "policy/lr": 1e-4} for n in (1, 2, 3)]
    text = page_of(write_folder(tmp_path, metrics=metrics)).text
    assert "data/epoch\n0.5\n1.5\n0.5\n1.5\npasses over the prompts, with fraction (epochs)" in text
    assert "policy/lr\n0.0001\n0.0001" in text  # always the same: no curve


def test_stages_too_short_to_see_are_left_out(tmp_path: Path) -> None:
    times = {"sample": 1.0, "sync": 0.5, "pause": 1e-5}
    metrics = [{"step": n, **{f"time/{k}_s": s * n for k, s in times.items()}} for n in (1, 2)]
    title = "Inside generate: stages of the life cycle"
    lines = chart(write_folder(tmp_path, metrics=metrics), title).figure["data"]
    assert [line["name"] for line in lines] == ["sync", "sample"]


def test_bytes_are_shown_in_binary_units(tmp_path: Path) -> None:
    metrics = [{"step": n, "memory/synced_bytes": n * 2**30} for n in (1, 2, 3)]
    drawn = chart(write_folder(tmp_path, metrics=metrics), "Memory moved in a step")
    assert (drawn.unit, drawn.figure["data"][0]["y"]) == ("GiB", [1.0, 2.0, 3.0])


def test_a_limit_is_drawn_where_it_is_near_the_values(tmp_path: Path) -> None:
    for name, longest, num_lines in (("near", 20.0, 1), ("far", 2.0, 0)):
        metrics = [{"step": n, "length/response_tokens/mean": longest - n / 9} for n in range(3)]
        drawn = chart(write_folder(tmp_path / name, metrics=metrics), "Response length")
        assert len(drawn.figure["layout"]["shapes"]) == num_lines


def test_a_report_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 1.0}])
    (folder / "report.html").mkdir()
    try_report(folder)
    assert "no report was made" in caplog.text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_warnings_of_a_report_are_logged_with_their_advice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = [{"step": step, "eval/reward/mean": 0.5 - 0.1 * step} for step in range(5)]
    try_report(write_folder(tmp_path / "run", metrics=metrics))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Training made the model worse. Held-out reward was 0.5 at first")
    assert warning.endswith(f" Try actor.optimizer.lr=1e-05 or {_ADD_KL}.")


def test_the_command_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 1.0}])
    code = (
        "import runpy, sys\n"
        "sys.argv = ['report', sys.argv[1], '--output', sys.argv[2]]\n"
        "runpy.run_module('hybridrl.report', run_name='__main__')\n"
        "heavy = {'torch', 'ray', 'transformers', 'tensordict', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1_000_000


def test_the_command_compares_several_runs(tmp_path: Path) -> None:
    folders = [tmp_path / "slow", tmp_path / "fast"]
    for folder, rate in zip(folders, (0.001, 0.002), strict=True):
        metrics = [
            {"step": n, "reward/mean": rate * n, "eval/reward/mean": rate * n} for n in range(5)
        ]
        write_folder(folder, metrics=metrics)
        config = (folder / "config.yaml").read_text().replace("0.0001", str(rate))
        (folder / "config.yaml").write_text(config)
    output = tmp_path / "both.html"
    command = [sys.executable, "-m", "hybridrl.report", *map(str, folders), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(output), done.stderr
    page = output.read_text(encoding="utf-8")
    for row in (
        ("slow", "4 of 4", "0", "0.004 at step 4", "0.004"),
        ("fast", "4 of 4", "0", "0.008 at step 4", "0.008"),
        ("actor.optimizer.lr", "0.001", "0.002"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in row) in page
    assert "max_grad_norm" not in page  # the same in both
    charts = json.dumps(page.split("Plotly.newPlot(")[1:])
    assert charts.count('\\"name\\":\\"fast\\"') == 2


def test_the_command_refuses_a_folder_that_is_no_run_and_names_what_it_lacks(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "hybridrl.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"RunFolderError: {tmp_path} is no run folder: it has no config")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_images_that_a_model_saw_stand_with_the_prompt_and_tell_prompts_apart(
    tmp_path: Path,
) -> None:
    one, other = ("data:image/png;base64," + letter * 8 for letter in "AB")
    shown = [
        sample(1, images=[one, 'data:image/png;base64,"onerror="x', "http://x/y.png"]),
        *(sample(step, split="eval", images=[url]) for url in (one, other) for step in (1, 2)),
    ]
    folder = write_folder(tmp_path, metrics=[{"step": 1, "reward/mean": 1.0}], samples=shown)
    text = (write_report(folder)).read_text(encoding="utf-8")
    tags = [f'<img src="{url}" alt="an image of the prompt">' for url in (one, other)]
    assert [text.count(each) for each in tags] == [2, 1]
    assert text.count("<img") == 3  # other texts are no images


def test_a_conversation_is_a_chat_that_shows_what_is_trained(tmp_path: Path) -> None:
    turns = [
        {"role": "assistant", "text": "f()", "num_tokens": 2, "reward": 0.5}
        | {"calls": [{"name": "f<", "arguments": "{}", "is_error": True}]},
        {"role": "tool", "text": "t:<b>7", "num_tokens": 3},
        {"role": "assistant", "text": "cut", "num_tokens": 9},
    ]
    strange = [None, {"role": 3, "num_tokens": "x", "calls": [1], "reward": math.nan}]
    shown = [
        sample(1, turns=turns, tokens=["f", "()", "7"], logprobs=[-0.7, 0.0, 0.0]),
        sample(2, turns=strange),
        sample(3, turns=3),
    ]
    folder = write_folder(tmp_path, metrics=[{"step": 1, "reward/mean": 1.0}], samples=shown)
    text = (write_report(folder)).read_text(encoding="utf-8")
    chat = text[text.index('<div class="chat">') :]

    assert '<div class="turn sampled"><div class="soft">assistant, 2 tokens, reward 0.5<' in chat
    assert '<div class="turn"><div class="soft">tool, 3 tokens, no loss<' in chat
    assert 'style="--u:50"' in chat.partition("tool, 3 tokens")[0]  # tokens of that turn
    assert "\N{RIGHTWARDS ARROW} f&lt; {} answered with an error" in chat
    assert "t:&lt;b&gt;7" in chat
    assert ">cut</div>" in chat  # of a turn beyond the kept tokens there is the text


def test_a_run_that_samples_ahead_shows_ages_and_who_waits(tmp_path: Path) -> None:
    metrics = [
        {
            "step": step,
            "rollout/staleness_steps/mean": age - 0.5,
            "rollout/staleness_steps/max": age,
            "rollout/staleness_fraction/0": 1 - age / 4,
            "rollout/staleness_fraction/4_to_7": age / 4,
            "rollout/interrupted_tokens": 10 * age,
            "policy/effective_sample_fraction": 1 / (1 + age),
            "time/wait_for_groups_s": 0.1 * age,
            "time/engines_idle_s": 0.2 * age,
            "time/update_engines_s": 0.3 * age,
        }
        for step, age in enumerate((1, 2, 2), start=1)
    ]
    folder = write_folder(tmp_path, metrics=metrics)
    config = (folder / "config.yaml").read_text().replace("num_steps: 4", "max_staleness: 2")
    (folder / "config.yaml").write_text(config)
    assert chart(folder, "Who waits for whom").names == [
        *("time/wait_for_groups_s", "time/engines_idle_s", "time/update_engines_s")
    ]
    age = chart(folder, "Age of the tokens").figure
    assert [line["name"] for line in age["data"]] == ["mean", "oldest"]
    assert [shape["y0"] for shape in age["layout"]["shapes"]] == [2]
    shares = chart(folder, "Tokens by age in steps").figure["data"]
    assert [line["name"] for line in shares] == ["0", "4 to 7"]
    assert chart(folder, "Interrupted by new weights").figure["data"][0]["y"] == [10, 20, 20]
    assert chart(folder, "Effective sample size").figure["data"][0]["y"] == [0.5, 0.33333, 0.33333]
    assert "rows are at most 2 steps old" in page_of(folder).text
