"""Tools and environments that come with hybridrl. Written as a user's own."""

from __future__ import annotations

import ast
import asyncio
import operator
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from hybridrl.data.rows import Message, Row
from hybridrl.errors import AgentError
from hybridrl.processes.sandbox import SandboxLimits, open_sandbox

_WAITING = ThreadPoolExecutor(1024, thread_name_prefix="server of sandboxes")
"""More than asyncio's own: a call that waits here for its turn would be taken for a slow one."""

_Number = int | float
_LARGEST = 10**100
_MAX_EXPONENT = 1000
_OPERATORS: Mapping[type[ast.AST], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, for example (12+3)*4
    """
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression is nested too deep") from error
    except SyntaxError as error:
        raise ValueError(f"the expression cannot be read: {error.msg}") from error
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> _Number:
    """Compute a tree of numbers, whose values stay below 10**100."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: _Number = value
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            result = _evaluate(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(sign, ast.Pow) and abs(b) > _MAX_EXPONENT:
                raise ValueError(f"the exponent {b} is beyond {_MAX_EXPONENT}")
            result = _OPERATORS[type(sign)](a, b)
        case _:
            raise ValueError(f"{ast.unparse(node)[:80]} is not arithmetic")
    if isinstance(result, complex) or not abs(result) < _LARGEST:
        raise ValueError("a value is not a number below 1e100")
    return result


async def python(code: str) -> str:
    """Run a Python program, with the standard library alone, and return what it prints.

    Args:
        code: The program; print the result
    """
    return await python_in("namespaces", code)


async def python_in(sandbox: str, code: str) -> str:
    """Run the program of ``python`` in a sandbox; SandboxError: it did not run."""
    threads = _WAITING if sandbox.startswith("http") else None
    run = open_sandbox(sandbox, SandboxLimits()).run
    result = await asyncio.get_running_loop().run_in_executor(threads, run, code)
    text = result.stdout
    if result.exceeded:
        return f"{text}\nkilled: too much {result.exceeded}"
    if result.status:
        last_lines = result.stderr.strip().splitlines()[-3:]
        return "\n".join([text, f"exit status {result.status}", *last_lines])
    return text


_SUFFIXES = (".txt", ".md")
_PASSAGE_CHARS = 1000
_NUM_PASSAGES = 3


class SearchIndex:
    """An index of the passages of a folder, held in memory."""

    def __init__(self, folder: Path) -> None:
        """Read and index all .txt and .md files, those of subfolders too; AgentError if none is."""
        try:
            self._library = import_module("bm25s")
        except ImportError as error:
            raise AgentError(
                "the tool search needs bm25s: pip install 'hybridrl[search]'"
            ) from error
        files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise AgentError(
                f"agent.search_folder={folder} has no file with the ending {' or '.join(_SUFFIXES)}"
            )
        self._passages = [passage for file in files for passage in _passages_of(file, folder)]
        self._index = self._library.BM25()
        words = self._library.tokenize(self._passages, show_progress=False)
        if not words.vocab or not any(words.ids):
            raise AgentError(f"agent.search_folder={folder} has no words in its files; add texts")
        self._index.index(words, show_progress=False)

    async def search(self, query: str) -> str:
        """Search the documents, and return the passages that fit best.

        Args:
            query: Words to search for
        """
        words = self._library.tokenize([query], show_progress=False, return_ids=False)
        num_passages = min(_NUM_PASSAGES, len(self._passages))
        numbers, scores = self._index.retrieve(words, k=num_passages, show_progress=False)
        best = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        passages = [self._passages[number] for number, score in best if score > 0]
        return "\n\n".join(passages) or "Nothing was found; try other words"


def _passages_of(file: Path, folder: Path) -> list[str]:
    """Cut a file at empty lines into passages of about 1,000 characters, each with its name."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(
            f"agent.search_folder={folder}: {file} cannot be read: {error}; correct or remove it"
        ) from error
    passages = [""]
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        if len(passages[-1]) + len(paragraph) > _PASSAGE_CHARS and passages[-1]:
            passages.append("")
        passages[-1] = f"{passages[-1]}\n{paragraph}".strip()
    return [f"{file.relative_to(folder)}: {passage}" for passage in passages if passage]


_CALL = re.compile(r"\[calculator\(expression='([^']*)'\)\]")


class Calculator:
    """Answers a call of the calculator with its result, and any other turn with its reward.

    Of ``data=calculator``. Turn by turn: 0.5 for the first call whose result is the answer, 1 for
    the right answer.
    """

    appended_roles = ("tool",)

    def __init__(self) -> None:
        self._answer = ""
        self._is_known = False

    async def reset(self, row: Row, seed: int) -> None:
        """Begin with the prompt of the row; nothing here is random."""
        self._answer = row.answer

    async def step(self, action: str) -> tuple[list[Message], float, bool]:
        """Compute what the turn asks for, or compare its answer."""
        call = _CALL.fullmatch(action.strip())
        if call is None:
            return [], float(action.strip() == self._answer), True
        try:
            result = await calculator(call.group(1))
        except (ValueError, ArithmeticError) as error:
            return [Message("tool", f"Error: {error}")], 0.0, False
        is_new = result == self._answer and not self._is_known
        self._is_known = self._is_known or is_new
        return [Message("tool", result)], 0.5 * is_new, False
