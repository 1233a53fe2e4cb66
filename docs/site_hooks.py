"""Makes the pages of the site that the code itself holds: configuration, recipes, Python API.

MkDocs calls `on_files` for each build. Nothing of this is checked in, so it cannot be old: in the
repository such a page only says where else to look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hybridrl.config.functions.parts import KINDS
from hybridrl.config.reference import KeyReference, SectionReference, read_sections
from hybridrl.workers.sharding.lifecycle import EDGES, State

ROOT = Path(__file__).parents[1]
API_PACKAGES = ("algorithms", "data", "rewards", "single_controller")
API_MODULES = ("agents/conversation", "batch", "errors", "export", "metrics", "payload")
API_FILES = ("protocol.py",)
"""What extensions are written against: these packages and modules, and every file of this name."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the generated pages in the place of those that say where else to look."""
    pages = {
        "reference/configuration.md": configuration_page(),
        "reference/recipes.md": recipes_page(),
        "reference/api.md": api_page(),
    }
    for path, text in pages.items():
        if (file := files.get_file_from_path(path)) is not None:
            files.remove(file)
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the transitions of a rollout engine, and the parts of algorithms, where a page asks."""
    markdown = markdown.replace("<!-- transitions -->", transitions_table())
    return markdown.replace("<!-- parts -->", parts_tables())


def parts_tables() -> str:
    """Return a table of each kind of part: name, meaning, inputs, and numbers with defaults."""
    lines = []
    for kind in KINDS:
        lines += [f"### {kind.noun}: `{kind.key}`", "", "| name | meaning | inputs | numbers |"]
        lines += ["|---|---|---|---|"]
        for name in kind.built_in:
            signature = kind.read(name)
            meaning = " ".join(signature.meaning.partition("\n\n")[0].split())
            inputs = ", ".join(f"`{given}`" for given in signature.inputs)
            numbers = ", ".join(
                f"`{number.name}={number.default}`" for number in signature.numbers.values()
            )
            lines.append(f"| `{name}` | {_code(meaning)} | {inputs} | {numbers or 'none'} |")
        lines.append("")
    return "\n".join(lines)


def transitions_table() -> str:
    """Return every transition of an engine: from which states, to which, or if it fails."""
    lines = ["| transition | from | to | if it fails |", "|---|---|---|---|"]
    for edge in EDGES:
        sources = [state.name for state in State if state in edge.sources]
        names = "any" if len(sources) == len(State) else ", ".join(sources)
        lines.append(f"| {edge.name} | {names} | {edge.target.name} | {edge.if_failed.name} |")
    return "\n".join(lines)


def configuration_page() -> str:
    """Return every key of every section: type, default and meaning."""
    sections = read_sections(ROOT / "hydra_configs")
    lines = [
        "# Configuration",
        "",
        "Made from the code: fields and docstrings of `hybridrl/config`, and defaults of",
        "`hydra_configs`. The same in a terminal:",
        "`python -m hybridrl.main --help SECTION`.",
        "",
        "A section is chosen by one of its files (`rollout=sglang`), a key is set with",
        "`SECTION.KEY=VALUE`. All values are checked before anything starts.",
    ]
    for section in [sections[-1], *sections[:-1]]:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: SectionReference) -> Iterator[str]:
    yield f"## {section.name or 'Top level'}"
    yield f"\n{_code(section.meaning)}"
    if section.choices:
        choices = ", ".join(f"`{section.name}={choice}`" for choice in section.choices)
        yield f"\nChoices, the default first: {choices}."
    for key in section.keys:
        yield ""
        yield from _key(key)


def _key(key: KeyReference) -> Iterator[str]:
    yield f"### {key.name} {{#{key.name}}}"
    yield f"\n{_code(key.meaning)}\n"
    if key.type_text == "section":
        return
    interval = f", {key.interval}" if key.interval else ""
    yield f"- Type: `{key.type_text}`{interval}"
    yield f"- Default: {_default(key)}"


def _default(key: KeyReference) -> str:
    section = key.name.partition(".")[0]
    if len(set(key.defaults.values())) == 1:
        return f"`{key.default_text}`"
    return ", ".join(
        f"`{value}` with `{section}={choice}`" for choice, value in key.defaults.items()
    )


def _code(text: str) -> str:
    return text.replace("``", "`")


def recipes_page() -> str:
    """Return the header of each recipe: hardware, what to expect, and the command."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a file in `recipes/` with the differences from the default experiment.",
        "Those of your own, `recipes/NAME.yaml` of the current folder, are `recipes=NAME`, too.",
        "`--cfg job` behind a command prints all values that it would run with.",
    ]
    files = sorted((ROOT / "recipes").rglob("*.yaml"))
    for file in (file for file in files if file.parent.name != "cluster"):
        comments, settings = _split_recipe(file.read_text(encoding="utf-8"))
        if settings:
            lines += ["", f"## {file.stem}", "", "```text", *comments, "```"]
            lines += ["", "```yaml", *settings, "```"]
    return "\n".join(lines) + "\n"


def _split_recipe(text: str) -> tuple[Sequence[str], Sequence[str]]:
    _, *lines = text.splitlines()  # the first one is Hydra's
    header = [line for line in lines if line.startswith("#")]
    return [re.sub("^# ?", "", line) for line in header], lines[len(header) :]


def api_page() -> str:
    """Return one entry a module, which mkdocstrings fills from the sources."""
    lines = [
        "# Python API",
        "",
        "What extensions are written against, read from the sources without importing them.",
    ]
    package = ROOT / "hybridrl"
    files = [package / f"{name}.py" for name in API_MODULES]
    for name in API_PACKAGES:
        files += sorted((package / name).rglob("*.py"))
    for name in API_FILES:
        files += sorted(package.rglob(name))
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if file.name != "__init__.py":
            lines += ["", f"::: {module}"]
    return "\n".join(lines) + "\n"
