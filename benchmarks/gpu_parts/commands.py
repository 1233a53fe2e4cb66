"""Parts that are a command: the tests that need a GPU, and a run from end to end that learns."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET

from benchmarks.gpu_parts.bench import Bench
from benchmarks.sides.measure import ROOT, read_metrics, train

_FORGIVING = ("-W", "default", "--continue-on-collection-errors", "-p", "no:cacheprovider")
"""Another machine's versions warn of other things: a warning is no reason to prove nothing."""

_DIED = (2, 3, 4)
"""Exit codes of pytest for: interrupted, internal error, wrong usage."""


def run_checks(bench: Bench) -> None:
    report = bench.record.path.with_name("checks.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "tests"]
    command += _FORGIVING
    if bench.is_dry:
        command.append("--collect-only")
    environment = {**os.environ, "HYBRIDRL_TEST_ENGINE_ARGS": ",".join(bench.engine_args)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode in _DIED:
        raise RuntimeError(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-1000:]}")
    if bench.is_dry:
        bench.record.note(done.stdout.strip().splitlines()[-1])
        bench.record.not_exercised("the tests: they were collected alone")
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        detail = (bad[0].get("message") or "")[:300] if bad else ""
        bench.record.note(f"{outcome} {name} {detail}".strip())
    bench.record.figures({name: float(n) for name, n in counts.items()}, "1")
    is_good = counts["passed"] > 0 and counts["failed"] == 0
    bench.record.figure("all_passed", float(is_good), "yes")
    if counts["failed"]:
        bench.record.note(done.stdout[-4000:])


_FEW = 5
_RISE = 0.1
"""Rise of the mean reward over the run that counts as learning."""


def run_learn(bench: Bench) -> None:
    """Train the starter model to sort digits, and compare the first steps with the last."""
    words = [
        *(f"rollout={bench.engine}", f"cluster={'one_gpu' if bench.on_cuda else 'cpu'}"),
        *("rollout.sleep=true", "trainer.overwrite=true"),
        f"trainer.num_steps={bench.size(60, dry=2)}",
        f"eval.every_num_steps={bench.size(20, dry=0)}",
    ]
    if bench.on_cuda:
        words += ["actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16"]
    if bench.engine == "sglang":
        words += [f"+rollout.engine_args.{word}" for word in bench.engine_args]
    if bench.is_dry:
        words += ["model.starter.num_warmup_steps=2", "model.starter.hidden_size=48"]
    os.environ["HYBRIDRL_CACHE"] = str(bench.scratch / "cache")
    rows = read_metrics(train(words, bench.record.path.parent / "learn"))
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    first, last = statistics.mean(rewards[:_FEW]), statistics.mean(rewards[-_FEW:])
    bench.record.figures({"reward_first": first, "reward_last": last}, "reward")
    bench.record.figure("steps", len(rewards), "1")
    for name, unit in {
        "time/step_s": "s",
        "policy/sampler_mismatch_nats/mean": "nats",
        "policy/sampler_mismatch_nats/max": "nats",
    }.items():
        found = [row[name] for row in rows if name in row]
        if found:
            figure = name.partition("/")[2].replace("/", "_")
            bench.record.figure(figure, statistics.median(found), unit)
    if bench.is_dry:
        bench.record.not_exercised("learning: two steps teach nothing")
        return
    bench.record.figure("learns", float(last - first >= _RISE), "yes")
