"""Which published table comes from which command, and from which sources it was made.

A table stands on its page between two comments. The first one holds a digest of the sources that
the figures depend on: where they have changed since, the table is stale. Comments, docstrings,
layout, imports and the names of files do not count.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/performance.md", "docs/memory.md", "docs/algorithms.md")
"""Pages with published tables. The first two have no other table."""

_STEP = (
    *("hybridrl/workers/rollout/*.py", "hybridrl/workers/rollout/embedded/*.py"),
    *("hybridrl/models/*.py", "hybridrl/workers/train/*.py", "hybridrl/trainer/step.py"),
)
_CONTROLLER = (
    *(f"hybridrl/single_controller/{name}.py" for name in ("actors", "dispatch", "payload")),
    *(f"hybridrl/single_controller/{name}.py" for name in ("remote_call", "worker")),
    *("hybridrl/payload.py", "hybridrl/diagnostics/activity.py", "hybridrl/diagnostics/trace.py"),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One published table."""

    name: str
    """Of the script in benchmarks/."""

    measured: tuple[str, ...]
    """Globs of the sources that the figures depend on; the script is one of them anyway."""

    arguments: tuple[str, ...] = ()
    one_thread: bool = False
    """Whether it runs with ``OMP_NUM_THREADS=1``."""

    page: str = PAGES[0]
    """Where the table stands."""

    @property
    def command(self) -> str:
        """What to type to get the table."""
        words = ["python", "-m", f"benchmarks.{self.name}", *self.arguments]
        return " ".join(["OMP_NUM_THREADS=1"] * self.one_thread + words)

    def digest(self, root: Path = ROOT) -> str:
        """Digest what the sources do."""
        return digest_of(self.command, (f"benchmarks/{self.name}.py", *self.measured), root)


def digest_of(command: str, patterns: Iterable[str], root: Path = ROOT) -> str:
    """Digest a command, and what the sources that match the patterns do."""
    digest = hashlib.sha256(command.encode())
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    for meaning in sorted(_meaning(path) for path in paths):
        digest.update(meaning.encode())
    return digest.hexdigest()[:16]


FIGURES = (
    Figures(name="against_trl", measured=("benchmarks/sides/*_side.py", *_STEP)),
    Figures(name="startup", measured=("hybridrl/run/launch.py", "hybridrl/run/cluster.py")),
    Figures(name="dispatch", measured=_CONTROLLER),
    Figures(
        name="rollout",
        measured=("hybridrl/workers/rollout/*.py", "hybridrl/workers/rollout/embedded/*.py"),
        one_thread=True,
    ),
    Figures(
        name="agents",
        measured=(
            *(f"hybridrl/agents/{name}.py" for name in ("agent", "conversation", "rollout")),
            *(f"hybridrl/agents/{name}.py" for name in ("templates", "tools", "trajectory")),
            *("hybridrl/workers/rollout/event_loop.py", "hybridrl/workers/rollout/embedded/*.py"),
        ),
        one_thread=True,
    ),
    Figures(
        name="advantages",
        measured=(
            "hybridrl/algorithms/advantages/*.py",
            *("hybridrl/algorithms/discounting.py", "hybridrl/algorithms/groups.py"),
            *("hybridrl/algorithms/response_tokens.py", "hybridrl/algorithms/whitening.py"),
        ),
    ),
    Figures(
        name="algorithms",
        measured=(
            *(f"hybridrl/algorithms/advantages/{name}.py" for name in ("gae", "grpo")),
            *(f"hybridrl/algorithms/advantages/{name}.py" for name in ("reinforce", "rloo")),
            *(f"hybridrl/algorithms/policy_losses/{name}.py" for name in ("ppo", "reinforce")),
            "hybridrl/algorithms/policy_losses/sequence.py",
            *("hybridrl/algorithms/aggregate.py", "hybridrl/trainer/step.py"),
            *(f"hydra_configs/algorithm/{name}.yaml" for name in ("grpo", "dr_grpo", "ppo")),
            *(f"hydra_configs/algorithm/{name}.yaml" for name in ("dapo", "rloo", "gspo")),
            *(f"hydra_configs/algorithm/{name}.yaml" for name in ("cispo", "reinforce_plus_plus")),
            *(f"recipes/{name}_cpu.yaml" for name in ("dr_grpo", "ppo", "dapo", "rloo", "gspo")),
            *(f"recipes/{name}_cpu.yaml" for name in ("cispo", "reinforce_plus_plus")),
        ),
        page=PAGES[2],
    ),
    Figures(
        name="policy_losses",
        measured=(
            "hybridrl/algorithms/policy_losses/*.py",
            *("hybridrl/algorithms/kl.py", "hybridrl/algorithms/rollout_correction.py"),
            *("hybridrl/algorithms/token_masks.py", "hybridrl/algorithms/token_rows.py"),
        ),
    ),
    Figures(
        name="checkpoint", measured=("hybridrl/checkpoint/*.py", "hybridrl/run/checkpoints.py")
    ),
    Figures(
        name="overhead",
        measured=(
            "hybridrl/diagnostics/trac*.py",
            "hybridrl/run/samples.py",
        ),
    ),
    Figures(name="report", measured=("hybridrl/report/*.py",)),
    Figures(
        name="lora",
        arguments=("--rank", "8"),
        measured=("hybridrl/models/adapter*.py", "hybridrl/workers/rollout/**/adapt*.py"),
        one_thread=True,
    ),
    Figures(
        name="weight_sync",
        measured=(
            "hybridrl/workers/rollout/sglang/transports.py",
            "hybridrl/workers/rollout/buckets.py",
        ),
        one_thread=True,
    ),
    Figures(
        name="megatron",
        arguments=("--rounds", "7"),
        measured=("hybridrl/workers/train/megatron/*.py", "hybridrl/models/onednn.py"),
    ),
    Figures(
        name="serving",
        arguments=("--picture", "docs/images/killed_engine.svg"),
        measured=(
            *("benchmarks/sides/answering_engines.py", "benchmarks/sides/timed_engine.py"),
            "hybridrl/serving/engine_pool.py",
            *(f"hybridrl/serving/{name}.py" for name in ("recovery", "server")),
            *("hybridrl/workers/sharding/lifecycle.py", "hybridrl/workers/rollout/embedded/*.py"),
        ),
        one_thread=True,
    ),
    Figures(
        name="asynchronous",
        arguments=("--picture", "docs/images/asynchronous.svg"),
        measured=(
            *("benchmarks/sides/asynchronous_runs.py", "benchmarks/sides/measured_costs.py"),
            *("benchmarks/sides/simulated_*.py", "hybridrl/trainer/batches.py"),
            "hybridrl/serving/background.py",
        ),
        one_thread=True,
    ),
    Figures(
        name="memory_plan",
        measured=(
            *("benchmarks/sides/memory_rank.py", "hybridrl/planning/*.py"),
            "hybridrl/rehearsal/*.py",
        ),
        page=PAGES[1],
    ),
)


@dataclass(frozen=True)
class Block:
    """A table as it stands on the page."""

    name: str
    digest: str
    text: str
    """Between the two comments."""


_BLOCK = re.compile(
    r"<!-- figures (?P<name>\w+) (?P<digest>\w+) -->\n(?P<text>.*?)<!-- end of figures -->\n",
    re.DOTALL,
)
_MADE_BY = re.compile(r"^`(?P<command>[^`]+)` at commit \w{7,} on \d{4}-\d\d-\d\d", re.MULTILINE)


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the tables of a page."""
    for match in _BLOCK.finditer(page):
        yield Block(match["name"], match["digest"], match["text"])


def read_page(page: str) -> str:
    """Return the text of one of the pages."""
    return (ROOT / page).read_text(encoding="utf-8")


def find_all_faults() -> list[str]:
    """Say of each published table of each page what is wrong with it, and what to type."""
    return [
        fault
        for page in PAGES
        for fault in find_faults(read_page(page), [one for one in FIGURES if one.page == page])
    ]


def find_faults(page: str, figures: Sequence[Figures], root: Path = ROOT) -> list[str]:
    """Say of each of these tables what is wrong with it in the text of their page."""
    blocks = {block.name: block for block in blocks_of(page)}
    faults = []
    for one in figures:
        block = blocks.pop(one.name, None)
        remedy = f"type: python -m benchmarks.publish {one.name}"
        made_by = None if block is None else _MADE_BY.search(block.text)
        if block is None:
            faults.append(f"{one.name}: the page does not hold its table; {remedy}")
        elif block.digest != one.digest(root):
            faults.append(f"{one.name}: its table is older than what it measures; {remedy}")
        elif made_by is None or made_by["command"] != one.command:
            faults.append(f"{one.name}: its table lacks command, commit and date; {remedy}")
    faults += [f"{name}: no command is known for this table; remove it" for name in blocks]
    has_own_tables = any(one.page == PAGES[2] for one in figures)
    if not has_own_tables and re.search(r"^\|", _BLOCK.sub("", page), re.MULTILINE):
        faults.append("a table stands outside the comments that say where it comes from")
    return faults


def put(page: str, block: Block) -> str:
    """Return the page with this table in the place of the one of its name.

    Raises:
        ValueError: the page has no place for it.
    """
    text = f"<!-- figures {block.name} {block.digest} -->\n{block.text}<!-- end of figures -->\n"
    for match in _BLOCK.finditer(page):
        if match["name"] == block.name:
            return page[: match.start()] + text + page[match.end() :]
    raise ValueError(
        f"the page has no '<!-- figures {block.name} ... -->'; put one where it belongs"
    )


def _meaning(path: Path) -> str:
    """Return a YAML file's values, or a program without what does not run.

    It is the same under every version of Python.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return repr(yaml.safe_load(source))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | _FUNCTIONS) else []
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            end = body[0].end_lineno or body[0].lineno
            lines[body[0].lineno - 1 : end] = [""] * (end - body[0].lineno + 1)
    return "".join("".join(lines).split())


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
