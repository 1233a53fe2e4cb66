"""The text of ``--help``: an overview, the keys of a section, or everything about one key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridrl.config.foreign_names import answer_key
from hybridrl.config.reference import KeyReference, SectionReference, read_sections
from hybridrl.errors import ConfigError, suggest_name

_WIDTH = 100
_MOST_CHOICES = 4
_HEADER = """\
python -m hybridrl.main [recipes=NAME] [SECTION=CHOICE ...] [SECTION.KEY=VALUE ...]

Trains a language model with reinforcement learning.

--help SECTION    every key of a section: type, default and meaning, as in: --help rollout
--help KEY        one key and its rules, as in: --help rollout.temperature
--cfg job         print all values that the command would run with
--multirun        a sweep: KEY=A,B runs both, one after the other
"""
_FOOTER = """\
After a run:
  python -m hybridrl.report RUN_FOLDER    one page with curves, samples and findings
  python -m hybridrl.export RUN_FOLDER    a Hugging Face folder of the newest checkpoint
"""


def help_text(names: Sequence[str], folder: Path, recipes: Sequence[str]) -> str:
    """Return the help for sections or keys, or the overview if none is named.

    Args:
        names: sections and dotted keys.
        folder: hydra_configs/.
        recipes: names that ``recipes=`` takes.

    Raises:
        ConfigError: a name is neither a section nor a key.
    """
    sections = read_sections(folder)
    if not names:
        return "\n".join(_overview(sections, recipes)) + "\n"
    return "\n".join("\n".join(_describe(name, sections)) for name in names) + "\n"


def _overview(sections: Sequence[SectionReference], recipes: Sequence[str]) -> Iterator[str]:
    *named, top = sections
    yield _HEADER
    for key in top.keys:
        yield from _key_lines(key)
    yield "\nSections, and the choices of each, the default first:"
    for section in named:
        choices = f"{section.name}={_shortened(section.choices)}"
        yield f"  {choices:<52} {_first_sentence(section.meaning)}"
    yield ""
    yield from _wrap(f"recipes: {', '.join(recipes)}", "", "         ")
    yield f"\n{_FOOTER}"


def _shortened(choices: Sequence[str]) -> str:
    """List choices, or the first of many."""
    if len(choices) <= _MOST_CHOICES:
        return " | ".join(choices)
    return f"{choices[0]} | {choices[1]} | ... {len(choices)} in all"


def _describe(name: str, sections: Sequence[SectionReference]) -> Iterator[str]:
    keys = {key.name: key for section in sections for key in section.keys}
    section = next((section for section in sections if section.name == name), None)
    if section is not None:
        choices = f"{section.meaning} Choose with {name}={' | '.join(section.choices)}"
        yield from _wrap(f"{name}: {choices}", "", "")
        yield ""
        for key in section.keys:
            yield from _key_lines(key)
    elif name in keys:
        yield from _key_lines(keys[name])
        for rule in keys[name].rules:
            yield from _wrap(f"Rule: {rule}", "    ", "          ")
    else:
        names = [*(section.name for section in sections), *keys]
        rule = "there is no such section or key"
        raise ConfigError("--help", name, rule, answer_key(name) or suggest_name(name, names))


def _key_lines(key: KeyReference) -> Iterator[str]:
    if key.type_text == "section":
        yield f"{key.name}.*"
    else:
        interval = f" {key.interval}" if key.interval else ""
        yield from _wrap(f"{key.name} = {key.default_text}   [{key.type_text}{interval}]", "", "  ")
    yield from _wrap(key.meaning.replace("``", ""), "    ", "    ")


def _wrap(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _first_sentence(text: str) -> str:
    return text.replace("``", "").split(". ")[0].rstrip(".")
