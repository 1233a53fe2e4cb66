r"""``python -m hybridrl.data.prepare NAME --to FILE.jsonl``: rows of a published data set.

``--from`` names a local copy: a file, or the folder of a download. Without it the files are
downloaded from the Hugging Face Hub. ``countdown`` is generated and needs neither.

gsm8k      https://huggingface.co/datasets/openai/gsm8k: question, answer ending in ``#### 42``
math       MATH, https://huggingface.co/datasets/EleutherAI/hendrycks_math: problem, solution with
           ``\boxed{}``, level; or MATH-500, which has a column answer; or the folders of JSON files
dapo_math  https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k: repeated prompts once
verl       any parquet in verl's format: prompt, reward_model.ground_truth, data_source
countdown  numbers, and a target that they make with + - * /
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from hybridrl.atomic_io import atomic_write_text
from hybridrl.data.files import read_records
from hybridrl.data.rows import Malformed
from hybridrl.data.tasks import make_countdown
from hybridrl.errors import DataError, HybridRLError
from hybridrl.json_text import to_json_text

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_LEVEL = re.compile(r"(\d+)\s*$")
_INSTRUCTION = r"Think step by step, and put the final answer in \boxed{}."
_SUFFIXES = (".parquet", ".jsonl", ".json")
_NUM_PRINTED = 3
_NUM_NAMED = 5

HUB = {
    "gsm8k": "openai/gsm8k",
    "math": "EleutherAI/hendrycks_math",
    "dapo_math": "BytedTsinghua-SIA/DAPO-Math-17k",
}
"""Repositories on the Hugging Face Hub."""


class Unusable(ValueError):
    """A record in another format; the text says what it lacks."""


def convert_gsm8k(record: Mapping[str, object], instruction: str) -> dict[str, object]:
    """Take the number after ``####``, without commas between its digits."""
    _, mark, answer = _text(record, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise Unusable("its answer does not end in '#### NUMBER'")
    question = _text(record, "question")
    answer = answer.strip().replace(",", "")
    return {"prompt": _with(question, instruction), "answer": answer, "source": "gsm8k"}


def convert_math(record: Mapping[str, object], instruction: str) -> dict[str, object]:
    r"""Take the column ``answer``, or the last ``\boxed{}`` of the solution; levels are 1 to 5."""
    has_answer = record.get("answer") is not None
    answer = _text(record, "answer") if has_answer else last_boxed(_text(record, "solution"))
    row: dict[str, object] = {
        "prompt": _with(_text(record, "problem"), instruction),
        "answer": answer,
        "source": "math",
    }
    level = _LEVEL.search(str(record.get("level", "")))
    return row | ({"difficulty": int(level[1])} if level else {})


def convert_verl(record: Mapping[str, object], _: str) -> dict[str, object]:
    """Take prompt and ground truth as they stand: the prompt has its own instruction."""
    reward, messages = record["reward_model"], record["prompt"]
    if record.get("images"):
        raise Unusable("it has images; list the file itself in data.train_files")
    if not isinstance(reward, Mapping) or not isinstance(messages, list):
        raise Unusable("reward_model must be a record, and prompt a list of messages")
    prompt = [{"role": _text(m, "role"), "content": _text(m, "content")} for m in messages]
    answer, source = str(reward["ground_truth"]), _text(record, "data_source")
    return {"prompt": prompt, "answer": answer, "source": source}


def last_boxed(solution: str) -> str:
    r"""Return the content of the last ``\boxed{...}``, or the character after ``\boxed ``."""
    matches = list(_BOX.finditer(solution))
    if not matches:
        raise Unusable(r"its solution has no \boxed{}")
    begin = matches[-1].end()
    if solution[begin : begin + 1] != "{":
        return solution[begin : begin + 1]
    depth = 0
    for end in range(begin, len(solution)):
        depth += (solution[end] == "{") - (solution[end] == "}")
        if depth == 0:
            return solution[begin + 1 : end].strip()
    raise Unusable(r"the last \boxed{ of its solution is not closed")


def _text(record: Mapping[str, object], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"{name!r} is {value!r}, must be text")
    return value


def _with(question: str, instruction: str) -> str:
    return f"{question.strip()}\n{instruction}" if instruction else question.strip()


CONVERTERS: Mapping[str, Callable[[Mapping[str, object], str], dict[str, object]]] = {
    "gsm8k": convert_gsm8k,
    "math": convert_math,
    "dapo_math": convert_verl,
    "verl": convert_verl,
}
"""From a record and an instruction to a row; by name of the data set."""


def prepare(
    name: str,
    target: Path,
    *,
    source: Path | None = None,
    split: str = "train",
    instruction: str = _INSTRUCTION,
    num_rows: int | None = None,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Write the rows of a data set.

    Args:
        target: a jsonl file, which must be new.
        source: a file or folder in the published format; None downloads it.
        instruction: appended to each question that has none of its own.
        num_rows: the first ones; None is all (of countdown 10,000).

    Raises:
        DataError: no files, a row in another format, or no network.
    """
    if target.exists():
        raise DataError(f"{target} exists; delete it, or name another file with --to")
    if name == "countdown":
        rows = make_countdown(num_rows or 10_000, split=split, seed=seed)
    else:
        rows = _convert(name, source or _download(name, split), split, instruction)[:num_rows]
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [to_json_text(row, keeps_unicode=True) + "\n" for row in rows]
    atomic_write_text(target, "".join(lines))
    return rows


def _convert(name: str, source: Path, split: str, instruction: str) -> list[dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}  # by prompt: repeated ones once
    problems = []
    for origin, record in _read(source, split):
        try:
            row = CONVERTERS[name](record, instruction)
        except (Unusable, KeyError, TypeError, AttributeError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{origin}: {reason}")
            continue
        rows.setdefault(to_json_text(row["prompt"]), row)
    if problems:
        named = "\n  ".join(problems[:_NUM_NAMED])
        raise DataError(
            f"{len(problems)} rows of {source} are not in the format of {name}:\n  {named}\n"
            "name another data set, or the folder of its download"
        )
    if not rows:
        raise DataError(f"{source} has no rows of the split {split!r}; see --split")
    return list(rows.values())


def _read(source: Path, split: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each record of a file, or of the files of a split in a folder, with its origin."""
    for path in _files_of(source, split):
        records: Iterable[tuple[int, object]]
        if path.suffix == ".json":  # MATH has one problem a file
            value = _parse_json(path.read_text(encoding="utf-8"))
            records = enumerate(value, 1) if isinstance(value, list) else [(1, value)]
        else:
            lines = read_records(path, None, key="--from")
            records = ((n, _parse_json(r) if isinstance(r, str) else r) for n, r in lines)
        for number, record in records:
            if isinstance(record, Malformed) or not isinstance(record, Mapping):
                reason = record if isinstance(record, Malformed) else "is not an object {...}"
                raise DataError(f"{path}:{number}: {reason}; correct or remove it")
            yield f"{path}:{number}", record


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"is not JSON: {error}")


def _files_of(source: Path, split: str) -> Sequence[Path]:
    """Return the files of a split: those whose name, or whose folder, begins with it."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"--from {source} does not exist; paths are relative to {Path.cwd()}")
    paths = sorted(path for path in source.rglob("*") if path.suffix in _SUFFIXES)
    of_split = [p for p in paths if any(n.startswith(split) for n in p.relative_to(source).parts)]
    files = of_split or [path for path in paths if path.suffix == ".parquet" and split == "train"]
    if not files:
        raise DataError(
            f"{source} has no {', '.join(_SUFFIXES)} file of the split {split!r}; name a file, or "
            "another split with --split"
        )
    return files


def _download(name: str, split: str) -> Path:
    """Download the files of a split, or find them in the cache of the hub's client."""
    repository = HUB.get(name)
    if repository is None:
        raise DataError(f"{name} is a format, not one data set; name a file with --from")
    patterns = [f"**/*{split}*.parquet", f"{split}*.parquet", "data/*.parquet"]
    try:
        hub = import_module("huggingface_hub")  # on request: it takes a second
        folder = hub.snapshot_download(repository, repo_type="dataset", allow_patterns=patterns)
    except (OSError, ValueError) as error:  # the client's own errors are OSErrors
        raise DataError(
            f"{repository} cannot be downloaded ({str(error).splitlines()[0]}); on a machine with "
            f"a network type: hf download {repository} --repo-type dataset --local-dir {name}, "
            f"and here --from {name}"
        ) from error
    return Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0 done, 1 failed, 2 not a command."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*CONVERTERS, "countdown"])
    parser.add_argument("--from", dest="source", type=Path, metavar="PATH", help="file or folder")
    parser.add_argument(
        "--to", dest="target", type=Path, required=True, metavar="FILE.jsonl", help="to write"
    )
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("--instruction", default=_INSTRUCTION, help="appended to each question")
    parser.add_argument("--num-rows", type=int, help="the first ones; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of countdown")
    options = parser.parse_args(arguments)
    try:
        rows = prepare(**vars(options))
    except HybridRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{len(rows)} rows in {options.target}\n")
    for row in rows[:_NUM_PRINTED]:
        sys.stdout.write(to_json_text(row, keeps_unicode=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
