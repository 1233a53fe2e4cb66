"""Which metrics share a chart, and the chart as plotly's plain data.

Meaning and unit of a metric are in ``hybridrl/metrics.py``. A metric without a chart is in the
page's last table, so every logged metric is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from hybridrl.metrics import find_declaration
from hybridrl.report.run import History, Series, Settings

_PANELS = """
Learning | Reward | reward/mean=training, eval/reward/mean=held-out prompts |
Learning | Reward by data source | eval/reward/*=*; held-out prompts, reward/by_source/*=* |
Learning | Evaluation sets | eval/*/reward/mean=* |
Learning | Prompts that teach nothing | reward/zero_variance_group_fraction=all rewards equal, reward/failed_fraction=not scored |
Learning | Loss | loss/policy=policy, loss/kl=KL penalty, loss/entropy=entropy bonus, loss/divergence=teacher, loss/supervised_nats=training, eval/loss_nats=held-out rows, loss/preference=pairs, eval/preference_loss=held-out pairs, loss/*=* |
Learning | Accuracy on pairs | preference/accuracy=training, eval/accuracy=held-out pairs |
Learning | Rewards of pairs | preference/chosen_reward/mean=chosen, preference/rejected_reward/mean=rejected, preference/margin/mean=margin, eval/margin=margin; held-out pairs |
Learning | Log-probs of answers | preference/chosen_logprob_nats/mean=chosen, preference/rejected_logprob_nats/mean=rejected |
Policy | Entropy | policy/entropy_nats/mean=entropy |
Policy | KL divergence | policy/kl_to_reference_nats/mean=from the reference, policy/kl_to_old_nats/mean=from the policy that sampled |
Policy | Gradient norm | policy/grad_norm=before clipping | log limit=actor.optimizer.max_grad_norm
Policy | Clipped tokens | policy/clip_low_fraction=below the range, policy/clip_high_fraction=above the range |
Policy | Probability ratio | policy/ratio/mean=mean, policy/ratio/max=largest | log
Policy | Trainer against sampler | policy/sampler_mismatch_nats/mean=mean distance, policy/sampler_mismatch_nats/max=largest distance, policy/sampler_mismatch_nats/*=mean distance; * | log
Policy | Effective sample size | policy/effective_sample_fraction=share of the tokens |
Policy | Learning rate | policy/lr=learning rate |
Policy | Values of the critic | critic/*/mean=* |
Policy | Explained variance of the critic | critic/explained_variance=explained variance |
Policy | Loss of the critic | loss/value=value loss |
Policy | Gradient norm of the critic | critic/grad_norm=before clipping | log limit=actor.optimizer.max_grad_norm
Policy | Clipped values of the critic | critic/clip_fraction=moved too far |
Policy | Updates left out | policy/skipped_updates=not finite |
Responses | Response length | length/response_tokens/mean=training, eval/length/response_tokens/mean=held-out prompts, length/response_tokens/min=shortest, length/response_tokens/max=longest | limit=rollout.max_response_tokens
Responses | How responses end | rollout/truncated_fraction=cut at the limit, rollout/empty_fraction=empty, eval/truncated_fraction=cut; held-out prompts |
Responses | Age of the tokens | rollout/staleness_steps/mean=mean, rollout/staleness_steps/max=oldest | limit=trainer.max_staleness
Responses | Tokens by age in steps | rollout/staleness_fraction/*=* | stack
Responses | Groups for later steps | rollout/open_groups=open, rollout/waiting_groups=of them complete |
Responses | Interrupted by new weights | rollout/interrupted_tokens=tokens, rollout/interrupted_responses=responses |
Responses | Turns of a conversation | agent/turns/mean=turns, agent/tool_calls/mean=calls of tools |
Responses | Tokens of a conversation | agent/sampled_tokens/mean=sampled, agent/appended_tokens/mean=appended | stack
Responses | Calls that failed | agent/tool_error_fraction=answered with an error |
Responses | Limits that end conversations | agent/ended_by_tokens_fraction=tokens, agent/ended_by_turns_fraction=turns, agent/ended_by_time_fraction=time, agent/ended_by_error_fraction=error |
Time | Where a step's time goes | time/generate_s=generate, time/reward_s=reward, time/logprobs_s=log-probs, time/advantage_s=advantages, time/update_s=update, time/eval_s=evaluation | stack
Time | Who waits for whom | time/wait_for_groups_s=the trainer for responses, time/engines_idle_s=the engines without a request, time/update_engines_s=requests for new weights |
Time | Inside generate: stages of the life cycle | time/offload_optimizer_s=offload optimizer, time/resume_weights_s=resume weights, time/sync_s=sync, time/offload_parameters_s=offload parameters, time/resume_cache_s=resume cache, time/continue_s=continue, time/sample_s=sample, time/skew_s=skew, time/pause_s=pause, time/drain_s=drain, time/release_s=release, time/release_cache_s=release cache, time/onload_training_s=onload training, time/roll_back_s=roll back, time/unwind_s=unwind, time/restart_s=restart, time/start_s=start | stack
Time | Work of the critic | time/critic_values_s=values, time/critic_update_s=update |
Time | Throughput | throughput/response_tokens_per_s=sampling, throughput/train_tokens_per_s=training, throughput/tokens_per_s=step |
Time | Busy decoding slots | rollout/slot_occupancy=busy |
Memory | Peak memory by stage | memory/*_peak_bytes/max=* |
Memory | Memory moved in a step | memory/synced_bytes=weights sent to engines, memory/released_bytes=given back by engines, memory/weight_backup_bytes=copied to the host |
"""  # noqa: E501  # a table, one chart a line
"""Section, title, ``metric=label``, and options; ``*`` in a name stands for one word."""

SECTIONS = ("Learning", "Policy", "Responses", "Time", "Memory")
COLORS = ("#4269d0", "#e3a008", "#ff725c", "#3fb5a3", "#9c6ade", "#3ca951", "#f07fae", "#7f9fe8")
_GRID, _INK = "rgba(128,128,128,.2)", "#808896"  # legible on white and on black


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot."""

    section: str
    title: str
    names: Sequence[str]

    unit: str
    figure: dict[str, Any]
    """Data and layout in plotly's form."""


def base_layout() -> dict[str, Any]:
    """Return the layout of every figure: colours for a light and a dark page, small margins."""
    axis = {"gridcolor": _GRID, "linecolor": _GRID, "zeroline": False, "automargin": True}
    return {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 46, "r": 10, "t": 10, "b": 36},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#fff", "font": {"color": "#1f2430"}},
        "xaxis": {**axis, "title": {"text": "step"}, "showgrid": False},
        "yaxis": {**axis, "exponentformat": "SI", "nticks": 6},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }


def build_charts(history: History, settings: Settings) -> list[Chart]:
    """Return the charts of a run; a metric with the same value in every step is left out."""
    charts = []
    for row in _PANELS.strip().splitlines():
        section, title, lines, options = (cell.strip() for cell in row.split("|"))
        labels = {
            name: label
            for name, label in _matching(lines, history)
            if not history.get(name).is_constant
        }
        if labels:
            unit, columns = _in_unit_of_first({name: history.get(name) for name in labels})
            draw = _areas if "stack" in options else _lines
            layout = base_layout() | {"showlegend": len(labels) > 1}
            finite = [value for column in columns.values() for value in column.finite]
            if "log" in options and min(finite) > 0 and max(finite) > 50.0 * min(finite):
                layout["yaxis"] = layout["yaxis"] | {"type": "log"}
            layout["shapes"] = _limits(options, max(finite), settings)
            data = list(draw(labels, columns))
            charts.append(
                Chart(section, title, list(labels), unit, {"data": data, "layout": layout})
            )
    return charts


def _matching(lines: str, history: History) -> Iterator[tuple[str, str]]:
    """Yield the metrics that were logged, each with the label of its line."""
    for line in lines.split(","):
        pattern, _, label = line.strip().partition("=")
        expression = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
        for name in history.names:
            match = expression.fullmatch(name)
            if match and not ("*" in pattern and f" {name}=" in _PANELS):
                yield name, label.replace("*", "".join(match.groups()).replace("_", " "))


def _in_unit_of_first(columns: Mapping[str, Series]) -> tuple[str, Mapping[str, Series]]:
    """Return the unit of the first metric, and the columns, with bytes as MiB or GiB."""
    declaration = find_declaration(next(iter(columns)))
    unit = declaration.unit if declaration and declaration.unit != "1" else ""
    if unit != "bytes":
        return unit, columns
    largest = max(value for column in columns.values() for value in column.finite)
    unit, size = ("GiB", 2.0**30) if largest >= 2.0**30 else ("MiB", 2.0**20)
    scaled = {
        name: Series(column.steps, [None if v is None else v / size for v in column.values])
        for name, column in columns.items()
    }
    return unit, scaled


def _lines(labels: Mapping[str, str], columns: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    """Draw each metric: steps faint and their running mean strong, or one line for few steps."""
    for (name, column), color in zip(columns.items(), cycle(COLORS), strict=False):
        line = {"color": color, "width": 2}
        if len(column.steps) < 40 or name.startswith("eval/"):
            yield trace(labels[name], column, mode="lines+markers", line=line)
        else:
            thin = {"color": color, "width": 1}
            yield trace(labels[name], column, line=thin, opacity=0.3, showlegend=False)
            yield trace(labels[name], column.running_mean(), line=line, hoverinfo="skip")


def _areas(labels: Mapping[str, str], columns: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    """Stack the running means, without those too small to be seen."""
    sums = {name: sum(column.finite) for name, column in columns.items()}
    visible = [name for name in columns if sums[name] >= 0.01 * sum(sums.values())]
    for name, color in zip(visible, cycle(COLORS), strict=False):
        line = {"width": 0.6, "color": color}
        yield trace(labels[name], columns[name].running_mean(), stackgroup="all", line=line)


def trace(label: str, series: Series, **style: object) -> dict[str, Any]:
    """Return a line in plotly's form, with numbers rounded to a third of the bytes."""
    drawn = series.downsample()
    values = [None if v is None else float(f"{v:.5g}") for v in drawn.values]
    base = {"type": "scatter", "mode": "lines", "name": label}
    return base | {"x": drawn.steps, "y": values} | style


def _limits(options: str, highest: float, settings: Settings) -> list[dict[str, Any]]:
    """Return the dashed line of a limit, if it is near the values."""
    key = options.partition("limit=")[2]
    limit = settings.number(key)
    if not limit or not limit / 4 < highest < 20 * limit:
        return []
    ends = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit}
    label = {"text": f"{key} = {limit:g}", "font": {"size": 11}}
    return [ends | {"line": {"color": _INK, "width": 1, "dash": "dash"}, "label": label}]
