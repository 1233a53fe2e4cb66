"""``python -m hybridrl.port SCRIPT``: a command of another framework as a recipe of this one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from hybridrl.atomic_io import atomic_write_text
from hybridrl.config.foreign.port import frameworks, port
from hybridrl.config.foreign.scripts import read_script

_RECIPES = Path("recipes")  # where `recipes=NAME` of a command finds it


def main(arguments: list[str] | None = None) -> int:
    """Write the recipe, and say what to do next. Returns 2 for a script that cannot be read."""
    names = list(frameworks())
    parser = argparse.ArgumentParser(prog="python -m hybridrl.port", description=__doc__)
    parser.add_argument("script", type=Path, help="shell script, Python or YAML that you run today")
    parser.add_argument("--output", type=Path, help="default: recipes/SCRIPT.yaml")
    parser.add_argument("--from", dest="framework", choices=names, help="default: as its words say")
    options = parser.parse_args(arguments)
    script: Path = options.script
    output: Path = options.output or _RECIPES / f"{script.stem}.yaml"
    try:
        text = script.read_text(encoding="utf-8")
        typed = read_script(text, suffix=script.suffix)
    except (OSError, ValueError, SyntaxError, yaml.YAMLError) as error:
        return _refuse(f"{script} cannot be read: {error}")
    marks_of = {name: table["marks"] for name, table in frameworks().items()}
    by_words = [n for n, marks in marks_of.items() if any(mark in text for mark in marks)]
    framework = options.framework or next(iter(by_words), "")
    if not framework or not typed:
        marks = "; ".join(f"{name}: {', '.join(marks)}" for name, marks in marks_of.items())
        return _refuse(
            f"{script} has no keys of a framework that is known by its words ({marks}); name it "
            f"with --from {'|'.join(names)}"
        )
    if output.exists():
        return _refuse(f"{output} exists; name another file with --output FILE.yaml")
    recipe = port(framework, typed)
    is_found = output.resolve().is_relative_to(_RECIPES.resolve())
    file = output.resolve().relative_to(_RECIPES.resolve()) if is_found else Path(output.name)
    name = file.with_suffix("").as_posix()
    move = "" if is_found else f"mkdir -p recipes && mv {output} recipes/ && "
    title = (
        f"{script.name} of {framework}, by python -m hybridrl.port; its key stands beside a line.\n"
        f"Run:    python -m hybridrl.main recipes={name}"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(output, recipe.text(title))
    lines = [
        f"{output}: {len(typed)} keys of {framework}, {len(recipe.none)} without a counterpart",
        *(f"  {line}" for line in recipe.none),
        f"next: {move}python -m hybridrl.main recipes={name} mode=check",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _refuse(reason: str) -> int:
    sys.stderr.write(reason + "\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
