"""Run folders as runs leave them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hybridrl.report.charts import Chart, build_charts
from hybridrl.report.page import write_report
from hybridrl.report.run import read_run

CONFIG = """
mode: train
actor: {optimizer: {lr: 0.0001, max_grad_norm: 1.0}}
rollout: {max_response_tokens: 24, num_slots: 128, num_responses_per_prompt: 8}
trainer: {num_steps: 4, run_dir: runs/mine}
"""


def write_folder(
    folder: Path,
    *,
    metrics: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    log: str = "",
    torn: str = "",
) -> Path:
    """Write a run folder; ``torn`` stands at the end of metrics, samples and trace."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text + torn, encoding="utf-8")
    (folder / "log.txt").write_text(log)
    return folder


def sample(step: int, **changes: object) -> dict[str, object]:
    """Write one line of samples.jsonl as ``Sample`` is written."""
    base = {"step": step, "prompt": "31=", "response": "13", "answer": "13", "reward": 1.0}
    return base | {"is_truncated": False, "split": "train", "tokens": [], "logprobs": []} | changes


def chart(folder: Path, title: str) -> Chart:
    """Return one chart of the page."""
    run = read_run(folder)
    charts = [c for c in build_charts(run.history, run.settings) if c.title == title]
    assert len(charts) == 1
    return charts[0]


class PageText(HTMLParser):
    """The page as a reader sees it: text, and what it would load or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.sources: list[str] = []
        self._is_hidden = False
        self.feed(page)

    @property
    def text(self) -> str:
        """All that is not script or style."""
        return "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_hidden = tag in ("script", "style")
        if tag == "script":
            self.scripts.append("")
        self.sources += [str(v) for name, v in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._is_hidden = False

    def handle_data(self, data: str) -> None:
        if self._is_hidden and self.scripts:
            self.scripts[-1] += data
        elif not self._is_hidden:
            self.texts.append(data)


def page_of(folder: Path) -> PageText:
    """Make the page and read it as a browser would."""
    return PageText(write_report(folder).read_text(encoding="utf-8"))
