"""Evaluate scalar operations of MLIR (arith, math) on numpy arrays, elementwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hil.core.tensors import Array, parse_dtype
from hil.formats.iree_values import parse_mlir_dtype

_Function = Callable[..., Any]
_DTYPES = ("bool", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class CannotEvaluate(Exception):
    """An operation, type or attribute that the numpy evaluation does not support. The message names it."""


def parse_scalar_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype of an MLIR element type, such as ``f32`` or ``index``. Raises CannotEvaluate."""
    name = parse_mlir_dtype(text) or ""
    if name not in _DTYPES:
        raise CannotEvaluate(f"element type {text}")
    return parse_dtype(name)


def widen_dtype(dtype: np.dtype[Any], wide: bool) -> np.dtype[Any]:
    """Return float64 for narrower floats if ``wide``, otherwise the dtype."""
    return np.dtype(np.float64) if wide and _is_float(dtype) else dtype


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "biucO"  # ml_dtypes' floats have kind V or f


def _make_unsigned(function: _Function) -> _Function:
    """Return a function that interprets signless integers as unsigned."""

    def run(*values: Any) -> Any:
        parts = [np.asarray(value) for value in values]
        if parts[0].dtype.kind == "b":
            return function(*parts)
        return np.asarray(function(*(part.view(f"u{part.dtype.itemsize}") for part in parts))).view(parts[0].dtype)

    return run


def _divide_integers(left: Any, right: Any) -> Any:
    """Divide and round to zero."""
    quotient = np.floor_divide(left, right)
    return quotient + ((np.remainder(left, right) != 0) & ((left < 0) != (right < 0)))


def _compute_erf(value: Any) -> Any:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(np.asarray(value, np.float64))).astype(np.float64)


def _round_half_away(value: Any) -> Any:
    return np.copysign(np.floor(np.abs(value) + 0.5), value)


def _select(condition: Any, left: Any, right: Any) -> Any:
    return np.where(condition, left, right)


# Operations -> function. The result has the type of the operation's first result in the IR.
_FUNCTIONS: dict[str, _Function] = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.remf": np.fmod,
    "arith.negf": np.negative,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maxui": _make_unsigned(np.maximum),
    "arith.minui": _make_unsigned(np.minimum),
    "arith.divsi": _divide_integers,
    "arith.remsi": np.fmod,
    "arith.divui": _make_unsigned(np.floor_divide),
    "arith.remui": _make_unsigned(np.remainder),
    "arith.floordivsi": np.floor_divide,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": _make_unsigned(np.right_shift),
    "arith.select": _select,
    "math.absf": np.abs,
    "math.absi": np.abs,
    "math.ceil": np.ceil,
    "math.floor": np.floor,
    "math.trunc": np.trunc,
    "math.round": _round_half_away,
    "math.roundeven": np.rint,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.expm1": np.expm1,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.log10": np.log10,
    "math.log1p": np.log1p,
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda value: 1 / np.sqrt(value),
    "math.cbrt": np.cbrt,
    "math.sin": np.sin,
    "math.cos": np.cos,
    "math.tan": np.tan,
    "math.asin": np.arcsin,
    "math.acos": np.arccos,
    "math.atan": np.arctan,
    "math.atan2": np.arctan2,
    "math.sinh": np.sinh,
    "math.cosh": np.cosh,
    "math.tanh": np.tanh,
    "math.asinh": np.arcsinh,
    "math.acosh": np.arccosh,
    "math.atanh": np.arctanh,
    "math.erf": _compute_erf,
    "math.powf": np.power,
    "math.fpowi": np.power,
    "math.copysign": np.copysign,
    "math.fma": lambda left, right, more: left * right + more,
    "arith.extf": np.asarray,
    "arith.sitofp": np.asarray,
    "arith.fptosi": np.trunc,
    "arith.extsi": np.asarray,
    "arith.index_cast": np.asarray,
}
# Conversions that turn a tiny error into a different integer. They are evaluated in the precision of the IR.
_ROUNDING = (
    *("arith.fptosi", "arith.fptoui", "arith.remf", "arith.bitcast"),
    *("math.round", "math.roundeven", "math.floor", "math.ceil", "math.trunc"),
)
# Predicates of arith.cmpi and arith.cmpf, by number.
_COMPARE_INTEGERS: Sequence[_Function] = (
    np.equal,
    np.not_equal,
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
)
_COMPARE_FLOATS: Sequence[_Function] = (
    lambda left, right: np.zeros(np.broadcast(left, right).shape, bool),
    np.equal,
    np.greater,
    np.greater_equal,
    np.less,
    np.less_equal,
    lambda left, right: (left < right) | (left > right),
    lambda left, right: ~(np.isnan(left) | np.isnan(right)),
)
_FIRST_UNORDERED, _FIRST_UNSIGNED = 8, 6


def is_rounding(name: str) -> bool:
    """Return True if a tiny error in the input can change the operation's result by a whole number."""
    return name in _ROUNDING


def evaluate_scalar(operation: Any, values: Sequence[Any], *, wide: bool) -> Array:
    """Evaluate an operation of arith or math.

    Args:
        values: operand values, arrays that broadcast to the same shape.
        wide: compute floats in float64.

    Raises:
        CannotEvaluate: the operation is not supported.
    """
    name = operation.name
    with np.errstate(all="ignore"):
        if name == "arith.constant":
            return _read_constant(operation, wide=wide)
        if name in ("arith.cmpi", "arith.cmpf"):
            return _compare(name, _read_predicate(operation), *values)
        dtype = parse_scalar_dtype(str(operation.results[0].type))
        if name == "arith.truncf":
            return np.asarray(values[0]).astype(dtype).astype(widen_dtype(dtype, wide))
        if name == "arith.trunci":
            value = np.asarray(values[0])
            return np.asarray(value & 1).astype(bool) if dtype.kind == "b" else value.astype(dtype)
        if name == "arith.fptoui":
            return np.asarray(np.trunc(values[0]).astype(np.int64).astype(dtype))
        if name == "arith.bitcast":
            return np.ascontiguousarray(values[0]).view(dtype)
        if name in ("arith.extui", "arith.uitofp", "arith.index_castui"):
            value = np.asarray(values[0])
            value = value if value.dtype.kind == "b" else value.view(f"u{value.dtype.itemsize}")
            return value.astype(widen_dtype(dtype, wide))
        if name not in _FUNCTIONS:
            raise CannotEvaluate(f"operation {name}")
        if name in ("arith.sitofp", "arith.extsi") and np.asarray(values[0]).dtype.kind == "b":
            values = [-np.asarray(values[0]).astype(np.int8)]  # a set bit of i1 is -1
        return np.asarray(_FUNCTIONS[name](*values)).astype(widen_dtype(dtype, wide), copy=False)


def _read_predicate(operation: Any) -> int:
    from iree.compiler import ir

    return int(ir.IntegerAttr(operation.attributes["predicate"]).value)


def _compare(name: str, predicate: int, left: Any, right: Any) -> Array:
    if name == "arith.cmpi":
        if predicate < _FIRST_UNSIGNED:
            return np.asarray(_COMPARE_INTEGERS[predicate](left, right))
        sides = [np.asarray(side) for side in (left, right)]
        unsigned = [side if side.dtype.kind == "b" else side.view(f"u{side.dtype.itemsize}") for side in sides]
        return np.asarray(_COMPARE_INTEGERS[predicate - _FIRST_UNSIGNED + 2](*unsigned))
    if predicate < _FIRST_UNORDERED:
        return np.asarray(_COMPARE_FLOATS[predicate](left, right))
    # The unordered predicates are 8: ueq, ..., 14: uno, 15: true.
    unordered = np.isnan(left) | np.isnan(right)
    if predicate == _FIRST_UNORDERED + 6:
        return np.asarray(unordered)
    if predicate == _FIRST_UNORDERED + 7:
        return np.ones_like(unordered, bool)
    return np.asarray(_COMPARE_FLOATS[predicate - _FIRST_UNORDERED + 1](left, right) | unordered)


def _read_constant(operation: Any, *, wide: bool) -> Array:
    from iree.compiler import ir

    value, kind = operation.attributes["value"], operation.results[0].type
    if isinstance(kind, ir.RankedTensorType):
        return read_elements(value, kind)
    dtype = parse_scalar_dtype(str(kind))
    if isinstance(value, ir.BoolAttr):
        return np.asarray(value.value, bool)
    number = ir.FloatAttr(value).value if _is_float(dtype) else ir.IntegerAttr(value).value
    return np.asarray(number, widen_dtype(dtype, wide))


def read_elements(attribute: Any, kind: Any) -> Array:
    """Return the tensor in a dense attribute. Raises CannotEvaluate for other attributes."""
    from iree.compiler import ir

    dtype, shape = parse_scalar_dtype(str(kind.element_type)), tuple(kind.shape)
    if not isinstance(attribute, ir.DenseElementsAttr):
        raise CannotEvaluate(f"constant {str(attribute)[:40]}")
    if attribute.is_splat:
        value = attribute.get_splat_value()
        if isinstance(value, ir.BoolAttr):
            return np.full(shape, value.value, bool)
        number = ir.FloatAttr(value).value if _is_float(dtype) else ir.IntegerAttr(value).value
        return np.full(shape, number, dtype)
    try:
        array = np.array(attribute)
    except (TypeError, ValueError, RuntimeError):
        raise CannotEvaluate(f"constant of type {kind}") from None
    if array.dtype.itemsize == dtype.itemsize and array.dtype != dtype and dtype.kind != "b":
        array = array.view(dtype)
    return np.ascontiguousarray(array.astype(dtype, copy=False).reshape(shape))
