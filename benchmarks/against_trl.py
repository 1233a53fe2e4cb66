"""A GRPO step beside TRL's GRPOTrainer doing the same, in turns within one run.

Same checkpoint, prompts in the same order, group size, lengths, optimizer, precision, threads and
environment variables; one update per rollout. Both sides stay alive for the whole run, each in an
environment of its own, and work in turns of a few steps, so that a busy machine slows both.
The learning rate is so small that neither policy moves, and with it the length of responses.
TRL runs with what makes it fastest here: torch.compile (needs a C++ compiler; 7% of its step).
A static cache changes nothing, and continuous batching makes its sampling ten times slower.

TRL's environment and the starter model are made on the first run, in .cache/benchmarks.

    python -m benchmarks.against_trl [--trl torch_compile=false] [--ours KEY=VALUE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from hybridrl import env
from hybridrl.data.sort_digits import build_sort_digits_rows

_ROOT = Path(__file__).resolve().parents[1]
_CACHE = _ROOT / ".cache" / "benchmarks"
_TRL_PYTHON = _CACHE / "trl" / "bin" / "python"
_TRL = "trl==1.16.*"
_PHASES = ("step", "generate", "update", "rest")
_TURN_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
# What hybridrl gives its own workers, for both: TRL's threads gain from it as well.
_ENVIRONMENT = env.process_environment(num_threads=2) | {"HF_HUB_OFFLINE": "1"}
_SETTINGS: dict[str, object] = {
    "num_prompts": 16,
    "num_responses": 8,
    "max_response_tokens": 24,
}
_OPTIMIZER = {
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}

Step = dict[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """One framework at work in its own process."""

    name: str
    connection: Connection

    def take(self, num_steps: int) -> list[Step]:
        """Let it do some steps; returns what each took."""
        self.connection.send(num_steps)
        return self.report()

    def report(self) -> list[Step]:
        """Return the steps it was last allowed to do."""
        if not self.connection.poll(_TURN_TIMEOUT_S):
            raise SystemExit(f"{self.name} did not answer within {_TURN_TIMEOUT_S:.0f} s")
        steps: list[Step] = self.connection.recv()
        for step in steps:
            step["rest"] = step["step"] - step["generate"] - step["update"]
        return steps


def main() -> None:
    """Race and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--warmup-steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--raw", type=Path, help="write every step's numbers here, as JSON")
    parser.add_argument(
        "--trl", action="append", default=["torch_compile=true"], help="key=JSON, of GRPOConfig"
    )
    parser.add_argument("--ours", action="append", default=[], help="override of hybridrl")
    options = parser.parse_args()
    make_trl_environment()
    with tempfile.TemporaryDirectory(prefix="against-trl-") as folder:
        scratch = Path(folder)
        settings = {
            **_SETTINGS,
            "optimizer": _OPTIMIZER | {"lr": options.lr},
            "model": str(make_model()),
            "rows": str(write_rows(scratch / "rows.jsonl")),
            "scratch": folder,
            "num_warmup_steps": options.warmup_steps,
            "num_steps": options.warmup_steps + options.rounds * options.steps,
        }
        text = json.dumps(settings)
        ours = [sys.executable, "-m", "benchmarks.sides.hybridrl_side", text, *options.ours]
        theirs = [str(_TRL_PYTHON), "-m", "benchmarks.sides.trl_side", text, *options.trl]
        with start("TRL", theirs) as trl, start("hybridrl", ours) as hybridrl:
            rounds = race(trl, hybridrl, num_rounds=options.rounds, num_steps=options.steps)
    if options.raw:
        options.raw.write_text(json.dumps(rounds), encoding="utf-8")
    print_table(rounds)


def make_trl_environment() -> None:
    """Install TRL beside this torch and this transformers, without vLLM."""
    if _TRL_PYTHON.exists():
        return
    folder = _TRL_PYTHON.parents[1]
    pip = [str(_TRL_PYTHON), "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "torch"], check=True, cwd=_ROOT)  # first: no other build of it
        subprocess.run([*pip, _TRL], check=True, cwd=_ROOT)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder)
        raise


def make_model() -> Path:
    """Let a run of one step, whose learning rate is 1e-9, make the starter model and export it."""
    run_dir = _CACHE / "starter"
    if not (run_dir / "hf").is_dir():
        words = ["trainer.num_steps=1", "actor.optimizer.lr=1e-9", "eval.every_num_steps=0"]
        paths = [f"trainer.run_dir={run_dir}", "trainer.overwrite=true"]
        command = [sys.executable, "-m", "hybridrl.main", *words, *paths]
        subprocess.run(command, check=True, cwd=_ROOT, stdout=sys.stderr)
    return run_dir / "hf"


def write_rows(path: Path) -> Path:
    """Write the default task's training rows, which both sides take in this order."""
    rows = build_sort_digits_rows(10_000, split="train", seed=0, min_digits=2, max_digits=20)
    lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@contextmanager
def start(name: str, command: Sequence[str]) -> Iterator[Side]:
    """Start one side, wait until it has warmed up, and in the end let it stop by itself."""
    connection, its_end = Pipe()
    log_path = _CACHE / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--connection", str(its_end.fileno())],
            cwd=_ROOT,
            env=os.environ | _ENVIRONMENT,
            pass_fds=[its_end.fileno()],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    its_end.close()  # so that its death ends our wait
    try:
        side = Side(name, connection)
        side.report()
        yield side
        connection.send(0)
        process.wait(_STOP_TIMEOUT_S)
    except EOFError:
        raise SystemExit(f"{name} ended early; {log_path} says why") from None
    finally:
        process.kill()
        process.wait()


def race(
    trl: Side, hybridrl: Side, *, num_rounds: int, num_steps: int
) -> list[Mapping[str, list[Step]]]:
    """Let both take their turns; who begins alternates."""
    rounds = []
    for number in range(num_rounds):
        order = (trl, hybridrl) if number % 2 else (hybridrl, trl)
        rounds.append({side.name: side.take(num_steps) for side in order})
    return rounds


def print_table(rounds: Sequence[Mapping[str, Sequence[Step]]]) -> None:
    """Print medians over steps, and the ratio of turns that were neighbours."""
    num_steps = sum(len(one["TRL"]) for one in rounds)
    print(
        f"{num_steps} steps each, in {len(rounds)} rounds; seconds are medians over steps, ratios"
    )
    print("are taken within a round, between turns that were neighbours, as medians (quartiles).\n")
    print("| part of the step | TRL, s | hybridrl, s | TRL / hybridrl |")
    print("|---|---:|---:|---:|")
    for phase in _PHASES:
        seconds = {name: [s[phase] for one in rounds for s in one[name]] for name in rounds[0]}
        trl, hybridrl = (statistics.median(seconds[name]) for name in ("TRL", "hybridrl"))
        ratios = [
            sum(s[phase] for s in one["TRL"]) / sum(s[phase] for s in one["hybridrl"])
            for one in rounds
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {phase} | {trl:.3f} | {hybridrl:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    print("\n| mean over steps | TRL | hybridrl |\n|---|---:|---:|")
    for what in ("prompt_tokens", "response_tokens", "reward", "entropy"):
        trl, hybridrl = (
            statistics.mean(step[what] for one in rounds for step in one[name])
            for name in ("TRL", "hybridrl")
        )
        print(f"| {what} | {trl:.3f} | {hybridrl:.3f} |")


if __name__ == "__main__":
    main()
