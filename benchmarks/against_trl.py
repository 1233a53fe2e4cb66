"""A GRPO step beside TRL's GRPOTrainer doing the same, in turns within one run.

Same checkpoint, prompts in the same order, group size, lengths, optimizer, precision, threads and
environment variables; one update per rollout. Both sides stay alive for the whole run, each in an
environment of its own, and work in turns of a few steps, so that a busy machine slows both.
The learning rate is so small that neither policy moves, and with it the length of responses.
TRL runs with what makes it fastest here: torch.compile (needs a C++ compiler; 7% of its step).
A static cache changes nothing, and continuous batching makes its sampling ten times slower.

TRL's environment and the starter model are made on the first run, in .cache/benchmarks.

How far ahead hybridrl is depends on the lengths of responses: where they are short and uneven, TRL
computes on padding. So there are several cases, those of full length with a tokenizer whose stop
token is never drawn.

    python -m benchmarks.against_trl [--cases NAME ...] [--trl KEY=JSON] [--ours KEY=VALUE]

``--alone`` runs our side without TRL, to try the script.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.sides.measure import CACHE, ROOT, print_head, print_row, train
from hybridrl import env
from hybridrl.data.tasks import build_sort_digits_rows

_TRL_PYTHON = CACHE / "trl" / "bin" / "python"
_TRL = "trl==1.16.*"
_PHASES = ("step", "generate", "update", "rest")
_TURN_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_TAIL_LINES = 30
# What hybridrl gives its own workers, for both: TRL's threads gain from it as well.
_ENVIRONMENT = env.process_environment(num_threads=2) | {"HF_HUB_OFFLINE": "1"}
_OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}

_NEVER = "<|never|>"

Step = dict[str, float]
Round = Mapping[str, Sequence[Step]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a step does."""

    num_prompts: int = 16
    max_response_tokens: int = 24
    is_full_length: bool = False
    num_steps: int = 3
    """Of one turn."""


_CASES = {
    "default": Case(),
    "64 prompts": Case(num_prompts=64, num_steps=1),
    "24 full tokens": Case(is_full_length=True),
    "96 full tokens": Case(is_full_length=True, max_response_tokens=96, num_steps=1),
}


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(_CASES), default=list(_CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup-steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; the starter model")
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--raw", type=Path, help="write every step's numbers here, as JSON")
    parser.add_argument(
        "--trl", action="append", default=["torch_compile=true"], help="key=JSON, of GRPOConfig"
    )
    parser.add_argument("--ours", action="append", default=[], help="override of hybridrl")
    options = parser.parse_args()
    if not options.alone:
        make_trl_environment()
    model = options.model or make_model()
    rounds = {name: race_in(_CASES[name], model, options) for name in options.cases}
    if options.raw:
        options.raw.write_text(json.dumps(rounds), encoding="utf-8")
    if options.alone:
        for name, several in rounds.items():
            print(f"{name}: {median_of(several, 'hybridrl', 'step'):.3f} s a step")
        return
    print_cases(rounds)
    print_parts(options.cases[0], rounds[options.cases[0]])


def race_in(case: Case, model: Path, options: argparse.Namespace) -> list[Round]:
    with tempfile.TemporaryDirectory(prefix="against-trl-") as folder:
        scratch = Path(folder)
        settings = {
            "num_prompts": case.num_prompts,
            "num_responses": 8,
            "max_response_tokens": case.max_response_tokens,
            "optimizer": _OPTIMIZER | {"lr": options.lr},
            "model": str(without_end(model, scratch) if case.is_full_length else model),
            "rows": str(write_rows(scratch / "rows.jsonl")),
            "scratch": folder,
            "num_warmup_steps": options.warmup_steps,
            "num_steps": options.warmup_steps + options.rounds * case.num_steps,
        }
        text = json.dumps(settings)
        commands = {
            "TRL": [str(_TRL_PYTHON), "-m", "benchmarks.sides.trl_side", text, *options.trl],
            "hybridrl": [sys.executable, "-m", "benchmarks.sides.hybridrl_side", text],
        }
        commands["hybridrl"] += options.ours
        with ExitStack() as started:
            sides = [
                started.enter_context(start(name, command, log_path=scratch / f"{name}.log"))
                for name, command in commands.items()
                if name == "hybridrl" or not options.alone
            ]
            return race(sides, num_rounds=options.rounds, num_steps=case.num_steps)


def make_trl_environment() -> None:
    """Install TRL beside this torch and this transformers, without vLLM."""
    if _TRL_PYTHON.exists():
        return
    folder = _TRL_PYTHON.parents[1]
    pip = [str(_TRL_PYTHON), "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "torch"], check=True, cwd=ROOT)  # first: no other build of it
        subprocess.run([*pip, _TRL], check=True, cwd=ROOT)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder)
        raise


def make_model() -> Path:
    """Let a run of one step, whose learning rate is 1e-9, make the starter model and export it."""
    folder = CACHE / "starter"
    if not (folder / "run" / "hf").is_dir():
        words = ["trainer.num_steps=1", "actor.optimizer.lr=1e-9", "eval.every_num_steps=0"]
        train([*words, "trainer.overwrite=true"], folder)
    return folder / "run" / "hf"


def without_end(model: Path, scratch: Path) -> Path:
    """Copy a model folder and give it a stop token that it was never taught, so never draws."""
    folder = scratch / "model"
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = tokenizer["added_tokens"]
    token = 1 + max(one["id"] for one in special)
    special.append(special[0] | {"id": token, "content": _NEVER})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    changes = {
        "tokenizer_config.json": {"eos_token": _NEVER},
        "config.json": {"eos_token_id": token},
        "generation_config.json": {"eos_token_id": token},
    }
    for name, change in changes.items():
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(settings | change), encoding="utf-8")
    return folder


def write_rows(path: Path) -> Path:
    rows = build_sort_digits_rows(10_000, split="train", seed=0, min_digits=2, max_digits=20)
    lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@contextmanager
def start(name: str, command: Sequence[str], *, log_path: Path) -> Iterator[Side]:
    """Start one side, wait until it has warmed up, and in the end let it stop by itself."""
    connection, its_end = Pipe()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--connection", str(its_end.fileno())],
            cwd=ROOT,
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
    except (EOFError, ConnectionError):
        said = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise SystemExit("\n".join([f"{name} ended early; its last words:", *said])) from None
    finally:
        process.kill()
        process.wait()


def race(sides: Sequence[Side], *, num_rounds: int, num_steps: int) -> list[Round]:
    """Let all take their turns; who begins alternates."""
    rounds: list[Round] = []
    for number in range(num_rounds):
        order = sides if number % 2 else sides[::-1]
        rounds.append({side.name: side.take(num_steps) for side in order})
    return rounds


def print_cases(rounds: Mapping[str, Sequence[Round]]) -> None:
    print("Seconds are medians over steps; TRL / hybridrl is the median over rounds of the ratio")
    print("between turns that were neighbours, with quartiles.\n")
    print_head("case", "tokens a response", "TRL, s", "hybridrl, s", "step", "generate", "update")
    for name, several in rounds.items():
        tokens = mean_of(several, "hybridrl", "response_tokens")
        seconds = (median_of(several, side, "step") for side in ("TRL", "hybridrl"))
        step, generate, update = (ratio_of(several, p) for p in ("step", "generate", "update"))
        print_row(
            *(name, f"{tokens:.1f}", *(f"{one:.3f}" for one in seconds), spread(step)),
            *(f"{generate[1]:.2f}", f"{update[1]:.2f}"),
        )


def print_parts(name: str, rounds: Sequence[Round]) -> None:
    """Print where the time of one case goes, and that both sides did the same."""
    num_steps = sum(len(one["TRL"]) for one in rounds)
    print(f"\nThe parts of a step of {name!r}, {num_steps} steps each in {len(rounds)} rounds:\n")
    print_head("part of the step", "TRL, s", "hybridrl, s", "TRL / hybridrl")
    for part in _PHASES:
        seconds = (f"{median_of(rounds, side, part):.3f}" for side in ("TRL", "hybridrl"))
        print_row(part, *seconds, spread(ratio_of(rounds, part)))
    print()
    print_head("mean over steps", "TRL", "hybridrl")
    for what in ("prompt_tokens", "response_tokens", "reward", "entropy"):
        print_row(what, *(f"{mean_of(rounds, side, what):.3f}" for side in ("TRL", "hybridrl")))


def spread(quartiles: tuple[float, float, float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ratio_of(rounds: Sequence[Round], part: str) -> tuple[float, float, float]:
    """Return quartiles over rounds of TRL's time for a part over ours."""
    totals = [{side: sum(s[part] for s in steps) for side, steps in one.items()} for one in rounds]
    ratios = [one["TRL"] / one["hybridrl"] for one in totals]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return low, middle, high


def median_of(rounds: Sequence[Round], side: str, what: str) -> float:
    return statistics.median(step[what] for one in rounds for step in one[side])


def mean_of(rounds: Sequence[Round], side: str, what: str) -> float:
    return statistics.mean(step[what] for one in rounds for step in one[side])


if __name__ == "__main__":
    main()
