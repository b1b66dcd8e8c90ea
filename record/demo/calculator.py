"""The demo's one tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LONGEST = 200
"""Characters; with no powers and no nesting beyond this, every result is quick to work out."""


def calculator(expression: str) -> str:
    """Work out an expression of whole numbers with + - * // % and brackets."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST} are allowed")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is not understood; use whole numbers with + - * // % and brackets")
