"""Results as Markdown: figures against goals, and the page of the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_parts.bench import PASSED, Part, Result, read_results


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of one part, and its limit."""

    part: str
    figure: str
    rule: str
    """``yes``, or ``at most`` or ``at least`` a number, with the figure's unit."""

    text: str

    def is_reached(self, value: float) -> bool:
        if self.rule == "yes":
            return value >= 1
        _, kind, limit, *_ = self.rule.split()
        return value <= float(limit) if kind == "most" else value >= float(limit)

    def state(self, results: Mapping[str, Result]) -> str:
        """Say where it stands: reached, missed, or why nothing is known."""
        result = results.get(self.part)
        if result is None or result.is_dry:
            return "unproved"
        if self.figure in result.figures:
            value = float(result.figures[self.figure][0])
            return "**reached**" if self.is_reached(value) else "**missed**"
        return "unproved" if result.status == PASSED else f"unproved: {result.status}"


_GOALS = """
checks | all_passed | yes | every test marked `gpu`
cycle_0_5b | tokens_equal | yes | 0.5B: greedy tokens of ten whole cycles are equal
cycle_0_5b | logprob_difference_nats | at most 0 nats | 0.5B: log-probs of ten whole cycles differ
cycle_0_5b | graph_captures | at most 1 | 0.5B: captures of CUDA graphs over ten cycles
cycle_0_5b | free_spread_mib | at most 64 MiB | 0.5B: free memory after each cycle varies
cycle_7b | tokens_equal | yes | 7B: greedy tokens of ten whole cycles are equal
cycle_7b | logprob_difference_nats | at most 0 nats | 7B: log-probs of ten whole cycles differ
cycle_7b | graph_captures | at most 1 | 7B: captures of CUDA graphs over ten cycles
cycle_7b | free_spread_mib | at most 64 MiB | 7B: free memory after each cycle varies
cycle_7b | wake_s | at most 0.6 s | 7B: resume weights + sync + resume KV
cycle_7b | drain_release_s | at most 0.3 s | 7B: drain and release, idle
cycle_7b | offload_share | at least 0.8 | 7B: optimizer and masters to the host, share of pinned
cycle_7b | restore_share | at least 0.8 | 7B: optimizer and masters back, share of pinned
cycle_7b | overhead_share | at most 0.05 | 7B: neither generates nor trains, of a step of 120 s
sync_8b | sync_s | at most 0.25 s | 8B bf16: full sync
lora_backup | adapter_sync_s | at most 0.3 s | 7B, LoRA rank 32, base in host copy: sync
lora_backup | tokens_equal | yes | LoRA with a copy: greedy tokens of ten whole cycles are equal
lora_resident | adapter_sync_s | at most 0.3 s | 7B, LoRA rank 32, base resident: sync
lora_resident | tokens_equal | yes | LoRA, base resident: greedy tokens of ten whole cycles are equal
lora_garbage | garbage_seen | yes | LoRA without copy, guard off, on purpose: garbage
lora_garbage | refused_with_guard | yes | the same with the guard on is refused or mended
wake | single_stage_fails | yes | 7B, fraction 0.9: waking in a single stage does not fit
fraction_90 | steps | at least 10 | 7B GRPO steps at fraction 0.9
fraction_95 | steps | at least 10 | 7B GRPO steps at fraction 0.95
rollout | share_of_sglang | at least 0.97 | 7B: rollout tokens/s, share of SGLang alone
mfu_8b | mfu | at least 0.45 | 8B: training MFU, packs of 8k tokens, 6ND
megatron_mfu_3b | mfu | at least 0.45 | megatron-core, 3B: training MFU, packs of 8k tokens, 6ND
megatron_mfu_8b_lora | mfu | at least 0.45 | megatron-core, 8B with LoRA: the same, 4ND
megatron_offload | left_bytes | at most 0 bytes | megatron-core: bytes left while away
megatron_offload | offload_share | at least 0.8 | megatron-core, 3B: to the host, share of pinned
learn | learns | yes | GRPO from end to end learns the default task
"""  # noqa: E501  # a table, one goal a line
GOALS = [Goal(*row.split(" | ")) for row in _GOALS.strip().splitlines()]
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
    lines = ["| what | goal | measured | state | part |", "|---|---:|---:|---|---|"]
    for goal in GOALS:
        result = results.get(goal.part)
        measured = ""
        if result is not None and not result.is_dry and goal.figure in result.figures:
            measured = spell(*result.figures[goal.figure])
        state = goal.state(results)
        lines.append(f"| {goal.text} | {goal.rule} | {measured} | {state} | `{goal.part}` |")
    return "\n".join(lines) + "\n"


def parts_list(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return a line a part: how it ended, when, and on what."""
    return _items(f"`{part.name}`: {part.title}: {_end(results.get(part.name))}" for part in parts)


def _end(result: Result | None) -> str:
    if result is None or result.is_dry:
        return "unproved"
    first_line = result.error.partition("\n")[0].replace("|", "/")
    why = "" if result.status == PASSED else f" ({first_line[:160]})"
    device = result.machine.get("device", "")
    return (
        f"**{result.status}**{why}, {result.date}, commit {result.commit}, {device}, "
        f"{result.seconds:.0f} s"
    )


def figures_table(results: Mapping[str, Result]) -> str:
    lines = ["| part | figure | value |", "|---|---|---:|"]
    lines += [
        f"| {result.part} | {name} | {spell(*value)} |"
        for result in results.values()
        for name, value in result.figures.items()
    ]
    return "\n".join(lines) + "\n"


def summary(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    sections = [parts_list(parts, results), goals_table(results), figures_table(results)]
    for result in results.values():
        sections += [f"not exercised, {result.part}: {text}\n" for text in result.not_exercised]
        if result.error:
            sections.append(f"{result.part} {result.status}: {result.error}\n")
    return "\n".join(sections)


def document(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    real = {name: result for name, result in results.items() if not result.is_dry}
    pieces = [
        _HEAD,
        "## Goals\n\n",
        goals_table(real),
        "\n## Parts\n\n",
        parts_list(parts, real),
        "\n## Several GPUs\n\n",
        "No part measures these yet; tests marked `gpus(n)` are skipped with fewer devices.\n\n",
        "| what | state |\n|---|---|\n",
        *(f"| {text} | unproved |\n" for text in _SEVERAL),
    ]
    if real:
        machines = {", ".join(f"{k} {v}" for k, v in r.machine.items()) for r in real.values()}
        notes = (f"{result.part}: {note}" for result in real.values() for note in result.notes)
        pieces += ["\n## Figures\n\n", figures_table(real)]
        pieces += ["\n## Machines\n\n", _items(sorted(machines)), "\n## Notes\n\n", _items(notes)]
    return "".join(pieces)


def write_document(parts: Iterable[Part], kept: Path, page: Path) -> None:
    page.write_text(document(parts, read_results(kept)), encoding="utf-8")


def spell(value: float | str, unit: str) -> str:
    """Spell a number with its unit, four digits at most."""
    if unit == "yes":
        return "yes" if float(value) >= 1 else "no"
    if unit == "bytes":
        return f"{float(value) / 1e6:,.1f} MB"
    number = f"{float(value):,.0f}" if abs(float(value)) >= 1000 else f"{float(value):.4g}"
    return number if unit == "1" else f"{number} {unit}"


def _items(texts: Iterable[str]) -> str:
    lines = (textwrap.fill(f"- {text}", 120, subsequent_indent="  ") for text in texts)
    return "".join(f"{line}\n" for line in lines)
