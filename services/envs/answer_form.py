"""Whether an answer has the form of a number, a formula or a list, before anything evaluates it.

Scorers of other people's packages hand a model's answer to `eval`, or to sympy, whose parser evals as well. What passes
here is harmless to both: a tree of known nodes, names and functions, and powers too small to compute for long.
"""

from __future__ import annotations

import ast
import math
import re

MAX_CHARACTERS = 2000
MAX_DEGREE = 100
MAX_TERMS = 20_000

FUNCTIONS = frozenset({"Abs", "exp", "ln", "log", "sqrt"}).union(
    f"{arc}{name}{hyperbolic}" for arc in ("", "a") for name in ("sin", "cos", "tan") for hyperbolic in ("", "h")
)


def is_arithmetic(text: str, *, decimals: bool = False) -> bool:
    """Whether the text is an expression of whole numbers, or of decimal ones too, + - * / and parentheses."""
    characters = r"[\d\s+\-*/().]*" if decimals else r"[\d\s+\-*/()]*"
    return re.fullmatch(characters, text, re.ASCII) is not None and "**" not in text and is_formula(text)


def is_formula(text: str) -> bool:
    """Whether the text is a formula of numbers, one-letter names, usual functions and small rational powers."""
    node = _parsed(text)
    try:
        return node is not None and (degree := _degree(node)) <= MAX_DEGREE and _terms(node, degree) <= MAX_TERMS
    except (ValueError, RecursionError):
        return False


def is_list(text: str) -> bool:
    """Whether the text is a Python list or tuple of literals, nested ones included."""
    return isinstance(_parsed(text), ast.List | ast.Tuple) and _is_literal(text)


def _parsed(text: str) -> ast.expr | None:
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _degree(node: ast.expr) -> float:
    """A bound on how large the expanded formula grows. Raises ValueError for what is no formula."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError
        case ast.Constant(value=int() | float() as number) if abs(number) < 1e15:
            return 1
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _degree(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_degree(left), _degree(right))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _degree(left) + _degree(right)
        case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=exponent):
            return _degree(exponent)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _degree(base) * max(1, abs(_rational(exponent)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return _degree(argument)
    raise ValueError


def _terms(node: ast.expr, degree: float) -> int:
    """A bound on the terms of the expanded formula: monomials of that degree in its names and calls."""
    unknowns = {ast.dump(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Call)}
    return math.comb(math.ceil(degree) + len(unknowns), len(unknowns))


def _rational(node: ast.expr) -> float:
    """The value of a number or a fraction of two. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return min(number, 2 * MAX_DEGREE)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_rational(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            below = _rational(right)
            if below:
                return _rational(left) / below
    raise ValueError
