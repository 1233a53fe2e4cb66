"""Results as Markdown: figures against goals, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_parts.bench import PASSED, Part, Result, read_results


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of one part, and its limit."""

    part: str
    figure: str
    text: str
    limit: float
    unit: str
    is_at_most: bool = True

    @property
    def rule(self) -> str:
        """The limit in words."""
        if self.unit == "yes":
            return "yes"
        unit = "" if self.unit == "1" else f" {self.unit}"
        return f"{'at most' if self.is_at_most else 'at least'} {self.limit:g}{unit}"

    def is_reached(self, value: float) -> bool:
        """Return whether ``value`` keeps the limit."""
        return value <= self.limit if self.is_at_most else value >= self.limit

    def state(self, results: Mapping[str, Result]) -> str:
        """Say where it stands: reached, missed, or why nothing is known."""
        result = results.get(self.part)
        if result is None or result.is_dry:
            return "unproved"
        if self.figure in result.figures:
            value = float(result.figures[self.figure][0])
            return "**reached**" if self.is_reached(value) else "**missed**"
        return "unproved" if result.status == PASSED else f"unproved: {result.status}"


_TEN = "of ten whole cycles"
_PINNED = "share of pinned"
_MFU = "training MFU, packs of 8k tokens, 6ND"


def _at_most(part: str, figure: str, text: str, limit: float, unit: str = "1") -> Goal:
    return Goal(part, figure, text, limit, unit)


def _at_least(part: str, figure: str, text: str, limit: float, unit: str = "1") -> Goal:
    return Goal(part, figure, text, limit, unit, is_at_most=False)


def _yes(part: str, figure: str, text: str) -> Goal:
    return _at_least(part, figure, text, 1, "yes")


def _of_cycles(part: str, size: str) -> tuple[Goal, ...]:
    return (
        _yes(part, "tokens_equal", f"{size}: greedy tokens {_TEN} are equal"),
        _at_most(part, "logprob_difference_nats", f"{size}: log-probs {_TEN} differ", 0.0, "nats"),
        _at_most(part, "graph_captures", f"{size}: captures of CUDA graphs over ten cycles", 1),
        _at_most(
            part, "free_spread_mib", f"{size}: free memory after each cycle varies", 64, "MiB"
        ),
    )


GOALS = (
    _yes("checks", "all_passed", "every test marked `gpu`"),
    *_of_cycles("cycle_0_5b", "0.5B"),
    *_of_cycles("cycle_7b", "7B"),
    _at_most("cycle_7b", "wake_s", "7B: resume weights + sync + resume KV", 0.6, "s"),
    _at_most("cycle_7b", "drain_release_s", "7B: drain and release, idle", 0.3, "s"),
    _at_least(
        "cycle_7b", "offload_share", f"7B: optimizer and masters to the host, {_PINNED}", 0.8
    ),
    _at_least("cycle_7b", "restore_share", f"7B: optimizer and masters back, {_PINNED}", 0.8),
    _at_most(
        "cycle_7b", "overhead_share", "7B: neither generates nor trains, of a step of 120 s", 0.05
    ),
    _at_most("sync_8b", "sync_s", "8B bf16: full sync", 0.25, "s"),
    _at_most(
        "lora_backup", "adapter_sync_s", "7B, LoRA rank 32, base in host copy: sync", 0.3, "s"
    ),
    _yes("lora_backup", "tokens_equal", f"LoRA with a copy: greedy tokens {_TEN} are equal"),
    _at_most("lora_resident", "adapter_sync_s", "7B, LoRA rank 32, base resident: sync", 0.3, "s"),
    _yes("lora_resident", "tokens_equal", f"LoRA, base resident: greedy tokens {_TEN} are equal"),
    _yes("lora_garbage", "garbage_seen", "LoRA without copy, guard off, on purpose: garbage"),
    _yes("lora_garbage", "refused_with_guard", "the same with the guard on is refused or mended"),
    _yes("wake", "single_stage_fails", "7B, fraction 0.9: waking in a single stage does not fit"),
    _at_least("fraction_90", "steps", "7B GRPO steps at fraction 0.9", 10),
    _at_least("fraction_95", "steps", "7B GRPO steps at fraction 0.95", 10),
    _at_least("rollout", "share_of_sglang", "7B: rollout tokens/s, share of SGLang alone", 0.97),
    _at_least("mfu_8b", "mfu", f"8B: {_MFU}", 0.45),
    _at_least("megatron_mfu_3b", "mfu", f"megatron-core, 3B: {_MFU}", 0.45),
    _at_least("megatron_mfu_8b_lora", "mfu", "megatron-core, 8B with LoRA: the same, 4ND", 0.45),
    _at_most("megatron_offload", "left_bytes", "megatron-core: bytes left while away", 0, "bytes"),
    _at_least(
        "megatron_offload", "offload_share", f"megatron-core, 3B: to the host, {_PINNED}", 0.8
    ),
    _yes("learn", "learns", "GRPO from end to end learns the default task"),
)
"""In the order of the table."""

_SEVERAL = (
    "tensor-parallel engines: one leader talks HTTP, every rank contributes to the weight stream",
    "sharded training over NCCL: weights gathered bucket by bucket while the engine receives",
    "release and resume on several ranks, each stage finished on all before the next",
    "megatron-core over NCCL: tensor, pipeline, context and expert parallelism",
)
"""What needs more than one GPU, so that no part shows it."""

_HEAD = """# What a GPU has to show

Written by `python benchmarks/gpu.py --write-docs` from the files in `docs/gpu-results/`, one a
part, each by the run that its row names. What no run has shown is **unproved**; nothing here is a
guess. How to run it: [running on a GPU](gpu.md); one part: `python benchmarks/gpu.py PART`.

"""


def goals_table(results: Mapping[str, Result]) -> str:
    """Return a row a goal: figure, limit, state, and which run says so."""
    lines = [
        "| what | goal | measured | state | part |",
        "|---|---:|---:|---|---|",
    ]
    for goal in GOALS:
        result = results.get(goal.part)
        measured = ""
        if result is not None and not result.is_dry and goal.figure in result.figures:
            measured = spell(*result.figures[goal.figure])
        state = goal.state(results)
        lines.append(f"| {goal.text} | {goal.rule} | {measured} | {state} | `{goal.part}` |")
    return "\n".join(lines) + "\n"


def parts_table(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return a row a part: when, on what, and how it ended."""
    lines = [
        "| part | shows | state | date | commit | machine | s |",
        "|---|---|---|---|---|---|---:|",
    ]
    for part in parts:
        result = results.get(part.name)
        if result is None or result.is_dry:
            lines.append(f"| {part.name} | {part.title} | unproved | | | | |")
            continue
        state = result.status
        if result.status != PASSED:
            state += f": {_first_line(result.error)}"
        device = result.machine.get("device", "")
        lines.append(
            f"| {part.name} | {part.title} | {state} | {result.date} | {result.commit} | {device} "
            f"| {result.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def figures_table(results: Mapping[str, Result]) -> str:
    """Return every figure of every part."""
    lines = ["| part | figure | value |", "|---|---|---:|"]
    lines += [
        f"| {result.part} | {name} | {spell(*value)} |"
        for result in results.values()
        for name, value in result.figures.items()
    ]
    return "\n".join(lines) + "\n"


def summary(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return what a run prints at its end."""
    sections = [parts_table(parts, results), goals_table(results), figures_table(results)]
    for result in results.values():
        sections += [f"not exercised, {result.part}: {text}\n" for text in result.not_exercised]
        if result.error:
            sections.append(f"{result.part} {result.status}: {result.error}\n")
    return "\n".join(sections)


def document(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return the whole of docs/gpu-results.md."""
    real = {name: result for name, result in results.items() if not result.is_dry}
    pieces = [
        _HEAD,
        "## Goals\n\n",
        goals_table(real),
        "\n## Parts\n\n",
        parts_table(parts, real),
        "\n## Several GPUs\n\n",
        "No part measures these yet; tests marked `gpus(n)` are skipped with fewer devices.\n\n",
        "| what | state |\n|---|---|\n",
        *(f"| {text} | unproved |\n" for text in _SEVERAL),
    ]
    if real:
        pieces += ["\n## Figures\n\n", figures_table(real), "\n## Machines\n\n", _machines(real)]
        pieces += ["\n## Notes\n\n", _notes(real)]
    return "".join(pieces)


def write_document(parts: Iterable[Part], kept: Path, page: Path) -> None:
    """Write the page from the folder of kept results."""
    page.write_text(document(parts, read_results(kept)), encoding="utf-8")


def spell(value: float | str, unit: str) -> str:
    """Spell a number with its unit, four digits at most."""
    if unit == "yes":
        return "yes" if float(value) >= 1 else "no"
    if unit == "bytes":
        return f"{float(value) / 1e6:,.1f} MB"
    number = f"{float(value):,.0f}" if abs(float(value)) >= 1000 else f"{float(value):.4g}"
    return number if unit == "1" else f"{number} {unit}"


def _machines(results: Mapping[str, Result]) -> str:
    texts = {", ".join(f"{k} {v}" for k, v in r.machine.items()) for r in results.values()}
    return "".join(f"- {text}\n" for text in sorted(texts))


def _notes(results: Mapping[str, Result]) -> str:
    return "".join(f"- {r.part}: {note}\n" for r in results.values() for note in r.notes)


def _first_line(text: str) -> str:
    line = text.partition("\n")[0].replace("|", "/")
    return line[:160]
