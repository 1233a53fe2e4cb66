"""Tools that come with hybridrl. Written as a user's own: hints, and a docstring for the model."""

from __future__ import annotations

import ast
import asyncio
import operator
from collections.abc import Callable, Mapping

from hybridrl.processes.sandbox import Sandbox, SandboxLimits

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
    result = await asyncio.to_thread(Sandbox(SandboxLimits()).run, code)
    text = result.stdout
    if result.exceeded:
        return f"{text}\nkilled: too much {result.exceeded}"
    if result.status:
        last_lines = result.stderr.strip().splitlines()[-3:]
        return "\n".join([text, f"exit status {result.status}", *last_lines])
    return text
