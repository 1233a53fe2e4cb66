"""Runs the Python code of a response against tests, in a sandbox.

The answer of a row holds its tests, in one of two forms. A JSON array of cases,
``[{"stdin": "3 4\\n", "stdout": "7\\n"}]``: the code is a program that reads standard input. Any
other text is Python with asserts, run after the code in the same module:
``assert add(3, 4) == 7``. Cases are safer to learn from: asserts share a process with the code.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.errors import SandboxError
from hybridrl.processes.sandbox import SandboxLimits, open_sandbox

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_SHARE_OF_TIMEOUT = 0.9

# The token proves that the asserts came to their end: code that exits early does not print it.
_WITH_ASSERTS = """
def run():
    token = input()
    names = {{"__name__": "__main__"}}
    exec(compile({code!r}, "answer.py", "exec"), names)
    exec(compile({tests!r}, "tests.py", "exec"), names)
    print()
    print(token)


run()
"""


def code(  # noqa: PLR0913 - its arguments are keys of the configuration
    response: str,
    answer: str,
    timeout_s: float,
    *,
    score: Literal["all", "share"] = "all",
    cpu_s: Annotated[float, Field(ge=1.0, le=1e4, description="it is a response")] = 5.0,
    wall_s: Annotated[float, Field(gt=0.0, le=1e4, examples=[10.0], description="it waits")] = 10.0,
    memory_mib: Annotated[int, Field(ge=64, le=2**20, description="of one process")] = 512,
    processes: Annotated[int, Field(ge=1, le=4096, description="of one response")] = 8,
    files_mib: Annotated[int, Field(ge=1, le=2**16, description="they are in memory")] = 16,
    output_kib: Annotated[int, Field(ge=1, le=2**16, description="held in memory")] = 256,
    sandbox: str = "namespaces",
) -> float:
    """Give 1 to code that passes all tests, or the share of cases that it passes; else 0.

    Args:
        response: text with the code in its last fenced block, or code alone.
        answer: cases or asserts.
        timeout_s: of all cases together.
        score: ``all``, or ``share`` of the cases.
        cpu_s: of a case, and so on to ``output_kib``: see `SandboxLimits`.
        sandbox: see ``open_sandbox``. ``limits`` leaves files and network open: for code that you
            trust.

    Raises:
        SandboxError: the sandbox, or the server, did not run the code.
        ValueError: the answer is no test.
    """
    limits = SandboxLimits(
        cpu_s=cpu_s,
        wall_s=wall_s,
        memory_mib=memory_mib,
        processes=processes,
        files_mib=files_mib,
        output_kib=output_kib,
    )
    deadline = time.monotonic() + _SHARE_OF_TIMEOUT * timeout_s
    source = code_of(response)
    cases = _cases_of(answer)
    if cases is None:
        token = secrets.token_hex(16)
        program = _WITH_ASSERTS.format(code=source, tests=answer)
        result = open_sandbox(sandbox, limits).run(program, stdin=f"{token}\n")
        return float(result.status == 0 and result.stdout.split("\n")[-2:] == [token, ""])
    num_passed, is_slow = 0, False
    for stdin, stdout in cases:
        remaining_s = min(wall_s, deadline - time.monotonic())
        # Unless the program took it, the time was that of a server, or of a container's start.
        if remaining_s <= 0.0 and ":" in sandbox and not is_slow:
            raise SandboxError(f"sandbox={sandbox}: no time was left; raise reward.timeout_s")
        if remaining_s <= 0.0:
            break  # no time is left for the other cases
        sandboxed = open_sandbox(sandbox, replace(limits, wall_s=remaining_s))
        result = sandboxed.run(source, stdin=stdin)
        is_slow = is_slow or bool(result.exceeded)
        is_complete = result.status == 0 and not result.exceeded
        is_right = is_complete and _lines(result.stdout) == _lines(stdout)
        if score == "all" and not is_right:
            return 0.0
        num_passed += is_right
    return num_passed / len(cases) if score == "share" else float(num_passed == len(cases))


def code_of(response: str) -> str:
    """Return the last fenced block of a response; all of it if it has none."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1]) if blocks else response


def _cases_of(answer: str) -> list[tuple[str, str]] | None:
    """Return inputs and outputs; None for a text that is no JSON array."""
    try:
        values = json.loads(answer)
    except ValueError:
        values = None
    if not isinstance(values, list):
        if not answer.strip():
            raise ValueError("the answer is empty; it must hold cases or asserts")
        return None
    cases = []
    for value in values:
        match value:
            case {"stdin": str(stdin), "stdout": str(stdout)}:
                cases.append((stdin, stdout))
            case _:
                raise ValueError(f'a case is {{"stdin": text, "stdout": text}}, not {value!r:.80}')
    if not cases:
        raise ValueError("the answer has no case")
    return cases


def _lines(text: str) -> list[str]:
    """Return lines to compare, without white space at their ends and at that of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
