"""Run folders as runs leave them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.report.page import describe, write_report

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


def panel(folder: Path, title: str) -> dict[str, Any]:
    """Return one plot of the page."""
    (found,) = [panel for panel in describe(folder)["panels"] if panel["title"] == title]
    return found


def data_of_page(folder: Path) -> Any:
    """Make the page and read its data as a browser would."""
    page = write_report(folder).read_text(encoding="utf-8")
    mark = '<script id="data" type="application/json">'
    begin = page.index(mark) + len(mark)
    return json.loads(page[begin : page.index("</script>", begin)])
