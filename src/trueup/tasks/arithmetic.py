"""The value of an arithmetic expression that a model wrote, computed from its syntax tree and never evaluated as code."""

from __future__ import annotations

import ast
import operator
import warnings
from fractions import Fraction

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
"""The four that number puzzles allow. No powers: one of them can be larger than memory."""
MAX_LENGTH = 200
"""Characters. Bounds the size of every intermediate number, and the depth of the tree."""


def compute(text: str) -> tuple[Fraction, list[int]] | None:
    """(exact value, the integers used in order) of whole numbers joined by + - * / and parentheses; None otherwise."""
    if len(text) > MAX_LENGTH:
        return None
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                used.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
        raise ValueError(f"{type(node).__name__} is not arithmetic")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "1(2)" parses, with a warning that is the model's business
            return value(ast.parse(text.strip(), mode="eval").body), used
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
