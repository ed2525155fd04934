"""Check size expressions of exported PyTorch programs, which sympy evaluates as Python.

Expressions may contain arithmetic with symbols and known functions, within limits. Without limits, a short text could
use up the memory: the value of ``9**9**9`` has too many digits, and ``(s0+s1)**99`` has too many terms.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

_MAX_CHARS = 10_000
_MAX_NODES = 2000
_MAX_BITS = 4096
_MAX_TERMS = 1000
# Bits for a symbol, and minimum bits for a function's result.
_WORD_BITS = 64
_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.keyword,
)  # fmt: skip
_SYMBOL = re.compile(r"[a-z]+\d+|true|false|oo|int_oo")
_TEXT = re.compile(r"[a-z]+\d+|-?[0-9.]+(e[+-]?\d{1,3})?")
# Allowed functions for sizes, in addition to the classes of torch.utils._sympy.functions.
_FUNCTIONS = frozenset(
    "Max Min Mod Abs And Or Not Eq Ne Lt Le Gt Ge Pow Add Mul floor ceiling sqrt FloorDiv ModularIndexing Where "
    "PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv "
    "TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity IsNonOverlappingAndDenseIndicator Equality "
    "Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan Symbol Integer Float Rational".split()
)
_POWERS = {"Pow", "PowByNatural", "FloatPow"}


class _Extent(NamedTuple):
    """Upper bounds for an expression's value."""

    bits: int  # bits of a coefficient plus 64 per symbol, which also bounds the degree
    terms: int  # terms of the expanded sum


def check_size(text: str) -> None:
    """Check that evaluating a size expression is harmless.

    Raises:
        ValueError: the expression is invalid, or its value could become too large.
    """
    if len(text) > _MAX_CHARS:
        raise ValueError(f"expected at most {_MAX_CHARS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("invalid expression") from error
    nodes = list(ast.walk(tree))
    if len(nodes) > _MAX_NODES or not all(map(_is_plain, nodes)):
        raise ValueError("expected plain arithmetic")
    try:
        _measure(tree.body)
    except RecursionError as error:
        raise ValueError("nesting exceeds the limit") from error


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or bool(_SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.keyword):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Constant):
        # sympy writes texts as in Symbol('s0', integer=True) and Float('1.5', precision=53).
        return bool(_TEXT.fullmatch(node.value)) if isinstance(node.value, str) else isinstance(node.value, int | float)
    return isinstance(node, _NODES)


def _measure(node: ast.expr) -> _Extent:
    """Return the extent for an expression. Raises ValueError if the extent is too large."""
    if isinstance(node, ast.BinOp):
        found = _measure_operator(node.op, _measure(node.left), node.right)
    elif isinstance(node, ast.Call):
        found = _measure_call(node)
    elif isinstance(node, ast.Constant):
        found = _measure_constant(node.value)
    else:
        inner = [_measure(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        found = _join_extents(inner) if inner else _Extent(_WORD_BITS, 1)
    if found.bits > _MAX_BITS or found.terms > _MAX_TERMS:
        raise ValueError(f"the size expression may need more than {_MAX_BITS} bits or {_MAX_TERMS} terms")
    return found


def _measure_operator(kind: ast.operator, left: _Extent, right: ast.expr) -> _Extent:
    if isinstance(kind, ast.Pow):
        return _measure_power(left, right)
    other = _measure(right)
    if isinstance(kind, ast.LShift):
        return _Extent(left.bits + _parse_exponent(right), left.terms)
    if isinstance(kind, ast.Mult | ast.Div):
        return _Extent(left.bits + other.bits, left.terms * other.terms)
    return _join_extents([left, other])


def _measure_call(node: ast.Call) -> _Extent:
    assert isinstance(node.func, ast.Name)
    name, arguments = node.func.id, node.args
    if name in _POWERS and len(arguments) == 2:
        return _measure_power(_measure(arguments[0]), arguments[1])
    inner = [_measure(one) for one in (*arguments, *(keyword.value for keyword in node.keywords))]
    if name == "LShift" and len(arguments) == 2:
        return _Extent(inner[0].bits + _parse_exponent(arguments[1]), inner[0].terms)
    # A keyword such as precision specifies a number of bits.
    if any(_parse_exponent(keyword.value) > _MAX_BITS for keyword in node.keywords):
        raise ValueError("the precision exceeds the limit")
    if name == "Mul":
        terms = 1
        for one in inner:
            terms *= one.terms
        return _Extent(sum(one.bits for one in inner), terms)
    return _join_extents(inner)


def _measure_power(base: _Extent, exponent: ast.expr) -> _Extent:
    """Return the extent for a power. The exponent must be a number of at most two digits."""
    value = _parse_exponent(exponent)
    if value > 99:
        raise ValueError("the exponent exceeds the limit")
    return _Extent(base.bits * max(1, value), base.terms ** max(1, value))


def _parse_exponent(node: ast.expr) -> int:
    """Return the absolute value of a number, rounded up.

    Raises ValueError for other expressions, because their value has no bound.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _parse_exponent(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Integer", "Float"):
        return _parse_exponent(node.args[0]) if node.args else 0
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rational":
        return max(map(_parse_exponent, node.args), default=0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):  # a fraction such as 1/2
        return max(_parse_exponent(node.left), _parse_exponent(node.right))
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, str):
        value = float(value)
    if not isinstance(value, int | float) or not abs(value) < 1 << _WORD_BITS:
        raise ValueError("expected a number")
    return int(abs(value)) + 1 if isinstance(value, float) and value != int(value) else int(abs(value))


def _measure_constant(value: object) -> _Extent:
    if isinstance(value, int):
        return _Extent(value.bit_length(), 1)
    if isinstance(value, str):
        digits, _, exponent = value.partition("e")
        return _Extent(4 * len(digits) + 4 * abs(int(exponent)) if exponent else 4 * len(digits), 1)
    return _Extent(1024, 1)  # maximum bits of a float's integer part


def _join_extents(parts: list[_Extent]) -> _Extent:
    """Return the extent for a sum or a function of the parts."""
    bits = max((one.bits for one in parts), default=_WORD_BITS)
    return _Extent(bits + len(parts).bit_length(), sum(one.terms for one in parts) or 1)
