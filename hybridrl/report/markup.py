"""HTML from text. Text of models and users is escaped here, always."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import exp
from typing import Any

from plotly.io import to_html
from plotly.offline import get_plotlyjs

from hybridrl import __version__
from hybridrl.metrics import format_value

_CHART = 'class="plotly-graph-div"'
"""Part of each figure of plotly."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html_of(value: object) -> Html:
    """Escape a text, unless it is HTML already."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, *children: object, **attributes: str) -> Html:
    """Return an element; ``cls`` stands for the attribute ``class``."""
    stated = "".join(
        f' {key.replace("cls", "class")}="{escape(v)}"' for key, v in attributes.items()
    )
    return Html(f"<{name}{stated}>{''.join(map(html_of, children))}</{name}>")


def table(headers: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table that scrolls where the screen is narrow."""
    head = tag("tr", *(tag("th", header) for header in headers)) if headers else ""
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", head, *body), cls="scroll")


def card(*children: object, **attributes: str) -> Html:
    """Return a framed element."""
    return tag("div", *children, **({"cls": "card"} | attributes))


def details(summary: str, *children: object) -> Html:
    """Return a section that stays folded until it is clicked."""
    return tag("details", tag("summary", summary), *children)


def section(title: str, *children: object) -> Html:
    """Return a section of the page."""
    return tag("section", tag("h2", title), *children)


def figure_html(figure: Mapping[str, Any]) -> Html:
    """Return a figure, as wide as its container, for a page that includes plotly's library."""
    text = to_html(
        figure,
        config={"responsive": True, "displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        default_height="260px",
        validate=False,
    )
    return Html(text)


def images_of(sample: dict[str, Any]) -> Html:
    """Return the images that the model saw, small, one beside the other."""
    images = (Html(f'<img src="{url}" alt="an image of the prompt">') for url in sample["images"])
    return tag("div", *images) if sample["images"] else Html("")


def sample_cells(sample: dict[str, Any]) -> list[object]:
    """Return step, response and reward of a sample; unsure tokens are shaded."""
    pairs = zip(sample["tokens"], sample["logprobs"], strict=False)
    tokens = [_token(token, logprob) for token, logprob in pairs]
    cut = tag("span", " cut at the limit", cls="cut") if sample["is_truncated"] else ""
    if sample["turns"]:
        shown: Html = tag("div", *_chat(sample["turns"], tokens), cut, cls="chat")
    else:
        shown = tag("div", *(tokens or [sample["response"]]), cut, cls="mono text")
    return [sample["step"], shown, format_value(sample["reward"])]


def _chat(turns: Sequence[Mapping[str, Any]], tokens: Sequence[Html]) -> Iterator[Html]:
    """Yield a bubble for each turn; the policy learns from the assistant's alone."""
    at = 0
    for turn in turns:
        is_sampled = turn["role"] == "assistant"
        end = at + turn["num_tokens"] * is_sampled
        text = tokens[at:end] if at < end <= len(tokens) else [turn["text"]]
        at = end
        about = [f"{turn['role']}, {turn['num_tokens']} tokens", "" if is_sampled else ", no loss"]
        if turn["reward"] is not None:
            about.append(f", reward {format_value(turn['reward'])}")
        yield tag(
            "div",
            tag("div", *about, cls="soft"),
            tag("div", *text, cls="mono text"),
            *(_call(call) for call in turn["calls"]),
            cls="turn sampled" if is_sampled else "turn",
        )


def _call(call: Mapping[str, Any]) -> Html:
    outcome = " answered with an error" if call["is_error"] else ""
    name = call["name"] or "a call that cannot be read"
    text = f"\N{RIGHTWARDS ARROW} {name} {call['arguments']}{outcome}"
    return tag("div", text, cls="mono text failed" if outcome else "mono text soft")


def _token(token: str, logprob: float | None) -> Html:
    if logprob is None:
        return html_of(token)
    unsure = round(100 * (1 - exp(min(logprob, 0.0))))
    if not unsure:
        return html_of(token)
    title = f"log-prob {logprob:g}, probability {100 - unsure} %"
    return tag("i", token, cls="t", style=f"--u:{unsure}", title=title)


def page(title: str, *children: object) -> str:
    """Return one file that needs no network."""
    style = (files("hybridrl.report") / "assets" / "page.css").read_text("utf-8")
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(style)),
    ]
    about = f"Made by hybridrl {__version__}. One file, no network. Plots: Plotly."
    made = tag("p", about, cls="soft")
    body = tag("body", tag("main", *children, made))
    # Joined once: the library has 5 MB, and an element copies what it holds.
    library = ("<script>", get_plotlyjs(), "</script>") if _CHART in body else ()
    parts = ('<!doctype html>\n<html lang="en"><head>', *head, *library)
    return "".join((*parts, "</head>", body, "</html>"))
