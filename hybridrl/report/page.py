"""The page of one run."""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from hybridrl.atomic_io import atomic_write_text
from hybridrl.checkpoint.fingerprint import processor_name
from hybridrl.config.model import ModelConfig, StarterConfig
from hybridrl.errors import ModelError, RunFolderError
from hybridrl.json_text import to_json_text
from hybridrl.metrics import find_declaration, format_duration, format_value
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.split import count_parameters
from hybridrl.report.charts import SECTIONS, Chart, build_charts
from hybridrl.report.findings import Finding, diagnose
from hybridrl.report.markup import (
    Html,
    card,
    details,
    figure_html,
    html_of,
    images_of,
    page,
    sample_cells,
    section,
    table,
    tag,
)
from hybridrl.report.run import (
    Run,
    Samples,
    Settings,
    parse_row,
    read_defaults,
    read_run,
    read_samples,
    to_text,
)

NAME = "report.html"

log = logging.getLogger(__name__)

_FEW_STEPS = 5
_KEY_METRICS = (
    *("reward/mean", "eval/reward/mean", "loss/supervised_nats", "eval/loss_nats"),
    *("loss/preference", "preference/accuracy", "eval/accuracy"),
    *("agent/turns/mean", "agent/tool_calls/mean", "agent/tool_error_fraction"),
    *("length/response_tokens/mean", "time/step_s", "throughput/tokens_per_s"),
)


def write_report(folder: Path, *, output: Path | None = None) -> Path:
    """Make the report of a run folder, ``report.html`` in it unless ``output`` says otherwise."""
    run = read_run(folder)
    return write_page(output or folder / NAME, build_page(run, diagnose(run)))


def write_page(path: Path, text: str) -> Path:
    """Write a page, complete or not at all; raises a RunFolderError if that fails."""
    try:
        atomic_write_text(path, text, errors="replace")
    except OSError as err:
        raise RunFolderError(f"cannot write {path}: {err}; write elsewhere with --output") from err
    return path


def try_report(folder: Path) -> None:
    """Make the report at the end of a run, and repeat its warnings in the log.

    A failure costs a warning, never the run's results.
    """
    try:
        run = read_run(folder)
        findings = diagnose(run)
        log.info("report: %s", write_page(folder / NAME, build_page(run, findings)))
        for finding in findings:
            if finding.severity == "warning":
                advice = f" Try {' or '.join(finding.overrides(run))}." if finding.remedies else ""
                log.warning("%s. %s%s", finding.title, finding.text, advice)
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        log.warning(
            "no report was made: %s: %s; try python -m hybridrl.report %s",
            *(type(error).__name__, error, folder),
        )


def build_page(run: Run, findings: Sequence[Finding]) -> str:
    """Return the page as HTML."""
    charts = build_charts(run.history, run.settings)
    grids = {name: _grid([c for c in charts if c.section == name]) for name in SECTIONS}
    silent = "No rule found anything to say. That alone does not make a run good."
    charted = {name for chart in charts for name in chart.names}
    others = [name for name in run.history.names if name not in charted]
    parts: dict[str, Sequence[object]] = {
        "What stands out": [_finding(run, finding) for finding in findings] or [silent],
        "Learning": [*grids.pop("Learning"), *_explanation(run)],
        "What the model writes": list(_samples(read_samples(run.folder / "samples.jsonl"))),
        **grids,
        "Everything else": [details("metrics without a chart", _summary(run, others))],
        "Configuration": [_configuration(run.settings)],
        "Log": [details("the last lines", tag("pre", "\n".join(run.log_lines[-60:])))],
    }
    shown = (section(title, *children) for title, children in parts.items() if children)
    return page(run.folder.name, *_head(run, findings), *shown)


def _head(run: Run, findings: Sequence[Finding]) -> Iterator[Html]:
    state = "finished" if 0 < run.num_steps <= run.num_done else "unfinished"
    if any(finding.severity == "error" for finding in findings):
        state = "failed"
    elapsed = format_duration((run.history.elapsed_s or [0.0])[-1] or 0.0)
    made = time.strftime("%Y-%m-%d %H:%M")
    done = f": step {run.num_done} of {run.num_steps}, {elapsed}. Page made {made}."
    yield tag("h1", run.folder.name)
    yield tag("p", tag("b", state, cls=state), done)
    if run.num_unreadable:
        damaged = f"{run.num_unreadable} lines of metrics.jsonl cannot be read, and are absent."
        yield tag("p", damaged)
    if not run.settings.flat:
        yield tag("p", "config.yaml cannot be read: the page lacks what follows from it.")
    yield card(table((), facts_of(run)))
    if key_metrics := [name for name in _KEY_METRICS if run.history.get(name).finite]:
        yield card(_summary(run, key_metrics))


def _summary(run: Run, names: Sequence[str]) -> Html:
    """Return a table of metrics: first and last values, the extremes, and the meaning."""
    rows = []
    for name in names:
        values = run.history.get(name).finite
        count = 1 if name.startswith("eval/") else max(1, min(_FEW_STEPS, len(values) // 2))
        ends = [fmean(values[:count]), fmean(values[-count:]), min(values), max(values)]
        declared = find_declaration(name)
        meaning = f"{declared.meaning} ({declared.unit})" if declared else ""
        rows.append([name, *map(format_value, ends), meaning])
    return table(("metric", "first", "last", "lowest", "highest", "meaning"), rows)


def _finding(run: Run, finding: Finding) -> Html:
    remedies = [tag("p", "Try ", tag("code", remedy)) for remedy in finding.overrides(run)]
    quote = tag("pre", finding.quote) if finding.quote else ""
    lines = [tag("h3", finding.title), tag("p", finding.text), quote, *remedies]
    return card(*lines, cls=f"card finding {finding.severity}")


def _grid(charts: Sequence[Chart]) -> list[Html]:
    cards = []
    for chart in charts:
        declared = ((name, find_declaration(name)) for name in chart.names)
        meanings = table((), ((name, d.meaning) for name, d in declared if d))
        title = tag("h3", chart.title, tag("span", f" {chart.unit}", cls="soft"))
        cards.append(card(title, figure_html(chart.figure), details("meaning", meanings)))
    return [tag("div", *cards, cls="grid")] if cards else []


def _explanation(run: Run) -> Iterator[Html]:
    series = run.history.get("reward/mean")
    if series.finite:
        yield tag(
            "p",
            "A mean is over the responses of one step. First and last, in the tables, are means "
            f"over {_FEW_STEPS} steps. Where a chart has many steps, the faint line is each step "
            f"and the strong one its mean over the {2 * series.reach + 1} steps around it. "
            "Held-out values are as measured.",
            cls="soft",
        )


def _samples(samples: Samples) -> Iterator[Html]:
    if samples.held_out or samples.train:
        about = "Shaded: a token of low probability. Point at it for its log-prob."
        if samples.has_conversations:
            about += (
                " Conversations: the policy learns from turns with a full line. Those with a "
                "dashed one were appended, and carry no loss."
            )
        yield tag("p", about, cls="soft")
    for answers in samples.held_out.values():
        rows = [sample_cells(sample) for sample in answers]
        prompt = tag("div", images_of(answers[0]), answers[0]["prompt"], cls="mono text")
        answer = tag("p", f"answer: {answers[0]['answer']}")
        cells = table(("step", "response", "reward"), rows)
        yield card(prompt, answer, cells)
    for step, responses in sorted(samples.train.items(), reverse=True):
        rows = [
            [Html(images_of(sample) + html_of(sample["prompt"])), *sample_cells(sample)[1:]]
            for sample in responses
        ]
        yield details(f"training, step {step}", card(table(("prompt", "response", "reward"), rows)))


def _configuration(settings: Settings) -> Html:
    changes = settings.changes(read_defaults())
    rows = [(key, to_text(now), to_text(default)) for key, (default, now) in changes.items()]
    differing = table(("changed key", "this run", "default"), rows) if rows else "All defaults."
    every = table((), ((key, to_text(value)) for key, value in settings.flat.items()))
    return card(differing, details(f"all {len(settings.flat)} keys", every))


MACHINE = "machine.json"
"""File of a run folder: the machine of the driver."""


def try_machine(folder: Path) -> None:
    """Write the driver's machine to the run folder. A full disk costs a warning, never the run."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    num_cores = len(os.sched_getaffinity(0))
    listed = Path("/proc/driver/nvidia/gpus").glob("*/information")  # needs no torch
    texts = [path.read_text("utf-8", errors="replace") for path in listed]
    models = Counter(name for text in texts for name in re.findall(r"^Model:\s*(.+)$", text, re.M))
    gpus = [f"{count} x {name}" for name, count in models.items()]
    facts = {
        "host": platform.node(),
        "gpus": ", ".join(gpus) or "no GPU",
        "processor": f"{num_cores} core{'s' * (num_cores > 1)} of {processor_name()}",
        "memory": f"{memory_gib:.0f} GiB",
    }
    try:
        atomic_write_text(folder / MACHINE, to_json_text(facts) + "\n")
    except OSError as error:
        log.warning("%s was not written: %s", folder / MACHINE, error)


_OFFLINE = {
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimisation",
    "reward_model": "training of a reward model",
}


def facts_of(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the main facts about a run: a label, and a value."""
    text = run.settings.text
    offline = _OFFLINE.get(text("mode"))
    keys = ("algorithm.name", "algorithm.advantage", "algorithm.policy_loss")
    yield "algorithm", offline or ", ".join(filter(None, map(text, keys)))
    yield "model", _model(run.settings)
    yield "data", _first_of(text, "data.task", "data.train_files", "data.sources")
    if not offline:
        yield "reward", _first_of(text, "reward.function", "reward.functions")
    yield "learning rate", text("actor.optimizer.lr")
    yield "seed", text("seed")
    sampling = "" if offline else f", samples with {text('rollout.engine')}"
    yield "engines", f"trains with {text('actor.engine')}{sampling}"
    nodes, ranks = text("cluster.num_nodes"), text("cluster.num_ranks_per_node")
    yield "ranks", f"{nodes} x {ranks} on {text('cluster.device')}"
    if steps := run.settings.number("trainer.max_staleness"):
        yield "sampling", f"ahead of the trainer: rows are at most {steps:g} steps old"
    if best := run.best_evaluation:
        yield "best evaluation", f"{best[0]:.3g}, at step {best[1]}"
    if any((run.folder / "checkpoints").glob("step-*")):
        yield "to continue", f"the same command with trainer.run_dir={run.folder}"
    path = run.folder / MACHINE
    if machine := parse_row(path.read_bytes()) if path.is_file() else None:
        yield "machine of the driver", ", ".join(str(fact) for fact in machine.values())


def _first_of(text: Callable[[str], str], *keys: str) -> str:
    return next((value for key in keys if (value := text(key)) not in ("", "null")), "unknown")


def _model(settings: Settings) -> str:
    folder = settings.text("model.path")
    is_starter = folder == "null"
    sizes = {f.name: settings.number(f"model.starter.{f.name}") or 0 for f in fields(StarterConfig)}
    config = ModelConfig(
        path=None if is_starter else folder,
        starter=StarterConfig(**{key: int(size) for key, size in sizes.items()}),
        dtype="float32",
        attention="auto",
        freeze_vision=True,
    )
    name = "the starter model" if is_starter else Path(folder).name
    try:
        name += f", {_in_words(count_parameters(architecture_of(config)))} parameters"
    except (ArithmeticError, ModelError):
        name += ", of unknown size"  # the folder is gone, or the configuration has no sizes
    is_lora = settings.text("lora.enabled") == "true"
    return name + f", LoRA of rank {settings.text('lora.rank')}" * is_lora


def _in_words(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,}"
