"""A GRPO run from end to end, through Ray and the command line, that learns the default task."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_parts.bench import Bench

_ROOT = Path(__file__).resolve().parents[2]
_FEW = 5
_RISE = 0.1
"""Rise of the mean reward over the run that counts as learning."""


def run(bench: Bench) -> None:
    """Train the starter model to sort digits, and compare the first steps with the last."""
    folder = bench.record.path.parent / "learn_run"
    on_cuda = bench.device.type == "cuda"
    words = [
        f"rollout={bench.engine}",
        f"cluster={'one_gpu' if on_cuda else 'cpu'}",
        "rollout.sleep=true",
        f"trainer.num_steps={bench.size(60, dry=2)}",
        f"trainer.run_dir={folder}",
        "trainer.overwrite=true",
        "cluster.object_store_mib=512",
        f"eval.every_num_steps={bench.size(20, dry=0)}",
    ]
    if on_cuda:
        words += ["actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16"]
    if bench.engine == "sglang":
        words += [f"+rollout.engine_args.{word}" for word in bench.engine_args]
    if bench.is_dry:
        words += ["model.starter.num_warmup_steps=2", "model.starter.hidden_size=48"]
    environment = {**os.environ, "HYBRIDRL_CACHE": str(bench.scratch / "cache")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.main", *words],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr[-3000:]}")
    _read(bench, folder / "metrics.jsonl")


def _read(bench: Bench, path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    first, last = statistics.mean(rewards[:_FEW]), statistics.mean(rewards[-_FEW:])
    bench.record.figure("reward_first", first, "reward")
    bench.record.figure("reward_last", last, "reward")
    bench.record.figure("steps", len(rewards), "1")
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if steps:
        bench.record.figure("step_s", statistics.median(steps), "s")
    for name in ("policy/sampler_mismatch_nats/mean", "policy/sampler_mismatch_nats/max"):
        found = [row[name] for row in rows if name in row]
        if found:
            figure = name.removeprefix("policy/").replace("/", "_")
            bench.record.figure(figure, statistics.median(found), "nats")
    if bench.is_dry:
        bench.record.not_exercised("learning: two steps teach nothing")
        return
    bench.record.figure("learns", float(last - first >= _RISE), "yes")
