"""``mode=eval``: evaluates a checkpoint or a model folder. Ray is connected; nothing learns."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from hybridrl.agents.rollout import require_usable_agent
from hybridrl.atomic_io import atomic_write_text
from hybridrl.config.checks import violations
from hybridrl.config.eval import split_checkpoint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.errors import ConfigErrors
from hybridrl.json_text import to_json_text
from hybridrl.metrics import Metrics
from hybridrl.models.load import require_usable_model
from hybridrl.run.export_checkpoint import export_checkpoint
from hybridrl.run.loops import build_eval_tasks, build_evaluator, open_rewards
from hybridrl.run.record import RunFolder
from hybridrl.run.samples import SampleTaker
from hybridrl.run.starter import find_model
from hybridrl.run.workers import start_workers
from hybridrl.trainer.evaluate import EvalReport
from hybridrl.trainer.policy import Policy

RESULTS = "eval.json"
"""Name in the run folder."""

_ONE_SET = "eval"
_SHOWN = {
    "eval/length/response_tokens/mean": "tokens",
    "eval/truncated_fraction": "truncated",
    "eval/agent/turns/mean": "turns",
    "eval/agent/tool_error_fraction": "tool errors",
}
"""Columns of the table besides those of quality."""

_UNSHOWN = ("eval/agent/", "eval/length/", "eval/repetition_fraction")
"""The others of agents and lengths are in the files alone."""


def evaluate_model(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Sample and score all sets; print a table, and write ``eval.json`` and samples."""
    exported = record.folder.absolute() / "exported"
    try:
        if config.eval.checkpoint is not None:
            record.live.phase("export the checkpoint")
            config = _with_checkpoint(config, exported / "hf")
        reports, metrics = _evaluate(config, record)
    finally:
        shutil.rmtree(exported, ignore_errors=True)
    record.record(0, metrics)
    atomic_write_text(record.folder / RESULTS, to_json_text(_results(config, reports), indent=1))
    sys.stdout.write(describe_reports(reports))


def _with_checkpoint(config: ExperimentConfig, target: Path) -> ExperimentConfig:
    """Export the checkpoint, and return the configuration with it as the model."""
    run_folder, step = split_checkpoint(str(config.eval.checkpoint))
    target.parent.mkdir()
    export_checkpoint(run_folder, step=step, output=target)
    model = replace(config.model, path=str(target), starter=None)
    config = replace(config, model=model)
    if refused := violations.check_group("model", violations.rules_of("eval")["model"], config):
        raise ConfigErrors(refused)
    return config


def _evaluate(config: ExperimentConfig, record: RunFolder) -> tuple[list[EvalReport], Metrics]:
    folder = find_model(config, record)
    record.live.phase("load data")
    require_usable_model(folder)
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    stop_token_ids = load_stop_token_ids(folder, tokenizer)
    require_usable_agent(config.agent, tokenizer, stop_token_ids=stop_token_ids)
    tasks = build_eval_tasks(config, tokenizer, stop_token_ids)
    num_samples = config.tracking.num_samples_per_step
    samples = SampleTaker(tokenizer, num_samples=num_samples, split="eval")
    with open_rewards(config, tokenizer) as reward_of:
        record.live.phase("start workers")
        with start_workers(config, folder) as workers:
            policy = cast(Policy, workers["actor"])
            record.live.begin_step(1)
            record.live.phase("evaluate")
            evaluator = build_evaluator(config, policy, reward_of(workers), tokenizer, policy)
            reports, metrics = evaluator.evaluate(tasks)
    for report in reports:
        record.samples(0, samples.take_report(report))
    return reports, metrics


def _results(config: ExperimentConfig, reports: Sequence[EvalReport]) -> Mapping[str, object]:
    """Return the content of ``eval.json``."""
    return {
        "model": config.eval.checkpoint or config.model.path or "starter",
        "adapter": config.lora.init_from if config.lora.enabled else None,
        "reward": config.reward.function,
        "seed": config.seed,
        "sets": {
            report.task.settings.name or _ONE_SET: {
                **asdict(report.task.settings),
                "num_prompts": len(report.task.task.rows),
                "metrics": {name: metric.value for name, metric in report.metrics.items()},
            }
            for report in reports
        },
    }


def describe_reports(reports: Sequence[EvalReport]) -> str:
    """Return a table, one line a set: sizes, and each number with its interval."""
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    qualities = {
        name: name.removeprefix("eval/").removesuffix("/mean")
        for name in names
        if not (name in _SHOWN or name.startswith(_UNSHOWN) or name.endswith(("/low", "/high")))
    }
    columns = qualities | {name: title for name, title in _SHOWN.items() if name in names}
    lines = [["set", "prompts", "responses", *columns.values()]]
    for report in reports:
        settings = report.task.settings
        sizes = [str(len(report.task.task.rows)), str(settings.num_responses_per_prompt)]
        numbers = [_number(report.metrics, name) for name in columns]
        lines.append([settings.name or _ONE_SET, *sizes, *numbers])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rows = ("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"{row.rstrip()}\n" for row in rows)


def _number(metrics: Metrics, name: str) -> str:
    if name not in metrics:
        return "-"
    text = f"{metrics[name].value:.4g}"
    if f"{name}/low" not in metrics:
        return text
    return f"{text} [{metrics[f'{name}/low'].value:.3g}, {metrics[f'{name}/high'].value:.3g}]"
