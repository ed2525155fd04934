"""Evaluate a dispatch of an IREE program with numpy, from its structured operations on tensors (linalg).

This evaluation depends on the compiler's high-level passes, which formed the dispatch, but not on code generation.
Reductions are computed in float64, except before a conversion to integers. Other operations have the precision of the
IR.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hil.controller.analysis.dispatches.scalars import (
    CannotEvaluate,
    evaluate_scalar,
    is_rounding,
    parse_scalar_dtype,
    widen_dtype,
)
from hil.core.tensors import Array

# Limits for one operation: scalar operations, and steps in the loop over reductions. Each limit corresponds to about
# ten seconds.
_MAX_WORK = 1 << 30
_MAX_STEPS = 1 << 18
_BINDING = re.compile(r"dispatch\.tensor<(?P<access>readonly|readwrite|writeonly):(?P<kind>.*)>$")
_DYNAMIC = -(1 << 63)
# Errors of numpy, and errors of the bindings for operations with an unexpected form.
_UNEXPECTED = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
_GENERALIZE = "builtin.module(func.func(linalg-generalize-named-ops))"


@dataclass
class _Binding:
    """A buffer of the dispatch."""

    array: Array
    written: Array | None = None  # mask of the written elements, for a write-only buffer; otherwise None


def evaluate_dispatch(module: Any, operands: Sequence[Array], tied: Sequence[int]) -> list[Array]:
    """Return a dispatch's results, in order.

    Args:
        module: the module in the dispatch's ``flow.executable``, as an MLIR module. This function modifies the module.
        operands: the dispatch's operands, in order.
        tied: for every result, the position of the operand that it overwrites, or -1 for a new buffer.

    Raises:
        CannotEvaluate: the dispatch has an unsupported operation, would take too long, or leaves results undefined.
    """
    from iree.compiler import ir, passmanager

    try:
        with module.context:
            passmanager.PassManager.parse(_GENERALIZE).run(module.operation)
    except ir.MLIRError as error:
        raise CannotEvaluate(f"operations that cannot be generalized: {str(error)[:80]}") from None
    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    if len(functions) != 1 or len(functions[0].regions[0].blocks) != 1:
        raise CannotEvaluate("a dispatch with several functions or blocks")
    block = functions[0].regions[0].blocks[0]
    values: dict[Any, Any] = {}
    given = iter(operands)
    bindings = []
    for argument in block.arguments:
        match = _BINDING.search(str(argument.type))
        if match is None:
            raise CannotEvaluate(f"an argument of type {argument.type}")
        if match["access"] == "writeonly":
            kind = ir.RankedTensorType(ir.Type.parse(match["kind"], module.context))
            array = np.zeros(tuple(kind.shape), parse_scalar_dtype(str(kind.element_type)))
            values[argument] = _Binding(array, np.zeros(array.shape, bool))
        else:
            values[argument] = _Binding(np.array(next(given)))
        bindings.append(values[argument])
    try:
        for operation in block.operations:
            _evaluate(operation.operation, values)
    except _UNEXPECTED as error:
        raise CannotEvaluate(f"{operation.operation.name}: {error or type(error).__name__}") from error
    if any(one.written is not None and not one.written.all() for one in bindings):
        raise CannotEvaluate("a partly written result")
    new = (one.array for one in bindings if one.written is not None)
    return [bindings[position].array if position >= 0 else next(new) for position in tied]


def _evaluate(operation: Any, values: dict[Any, Any]) -> None:
    """Evaluate an operation on tensors and store the results in ``values``."""
    name = operation.name
    operands = [values[operand] for operand in operation.operands]
    result: Any
    if name in ("func.return", "iree_tensor_ext.dispatch.workload.ordinal"):
        return
    if name == "iree_tensor_ext.dispatch.tensor.load":
        result = operands[0].array[_read_slices(operation)].copy().reshape(_get_result_shape(operation))
    elif name == "iree_tensor_ext.dispatch.tensor.store":
        where = _read_slices(operation)
        target = operands[1].array[where]
        target[...] = operands[0].reshape(target.shape)
        if operands[1].written is not None:
            operands[1].written[where] = True
        return
    elif name == "tensor.empty":
        result = np.zeros(_get_result_shape(operation), _get_result_dtype(operation))
    elif name == "tensor.extract_slice":
        result = operands[0][_read_slices(operation)].reshape(_get_result_shape(operation))
    elif name == "tensor.insert_slice":
        result = operands[1].copy()
        target = result[_read_slices(operation)]
        target[...] = operands[0].reshape(target.shape)
    elif name in ("tensor.expand_shape", "tensor.collapse_shape", "tensor.cast"):
        result = operands[0].reshape(_get_result_shape(operation))
    elif name == "linalg.fill":
        result = np.full(_get_result_shape(operation), operands[0], _get_result_dtype(operation))
    elif name == "linalg.softmax":
        result = _evaluate_softmax(operation, operands[0]).astype(_get_result_dtype(operation))
    elif name == "linalg.generic":
        for value, array in zip(operation.results, _Generic(operation, operands, values).run(), strict=True):
            values[value] = array
        return
    elif name.startswith(("arith.", "math.")):
        result = evaluate_scalar(operation, operands, wide=False)
    else:
        raise CannotEvaluate(f"operation {name}")
    values[operation.results[0]] = np.asarray(result)


def _get_result_shape(operation: Any) -> tuple[int, ...]:
    kind = operation.results[0].type
    if not kind.has_static_shape:
        raise CannotEvaluate("a dynamic shape")
    return tuple(kind.shape)


def _get_result_dtype(operation: Any) -> np.dtype[Any]:
    return parse_scalar_dtype(str(operation.results[0].type.element_type))


def _read_slices(operation: Any) -> tuple[Any, ...]:
    sides = [list(operation.attributes[f"static_{name}"]) for name in ("offsets", "sizes", "strides")]
    if any(value == _DYNAMIC for side in sides for value in side):
        raise CannotEvaluate("a dynamic slice")
    slices = (slice(offset, offset + size * stride, stride) for offset, size, stride in zip(*sides, strict=True))
    return (..., *slices)  # the ellipsis keeps a tensor without dimensions an array


def _evaluate_softmax(operation: Any, value: Array) -> Array:
    from iree.compiler import ir

    axis = ir.IntegerAttr(operation.attributes["dimension"]).value
    wide = np.asarray(value, np.float64)
    with np.errstate(all="ignore"):
        powers = np.exp(wide - wide.max(axis=axis, keepdims=True))
        return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


class _Generic:
    """Evaluation of a ``linalg.generic``.

    Each operand becomes a view with one axis per loop: an affine map only changes strides. The body is then evaluated
    for all indices of the parallel loops at once, in a Python loop over the indices of the reductions.
    """

    def __init__(self, operation: Any, operands: Sequence[Any], outer: Mapping[Any, Any]) -> None:
        self.operation, self.outer = operation, outer
        self.body = operation.regions[0].blocks[0]
        maps = [item.value for item in operation.attributes["indexing_maps"]]
        self.results = [
            (tuple(value.type.shape), parse_scalar_dtype(str(value.type.element_type))) for value in operation.results
        ]
        loops = maps[0].n_dims
        self.maps = [[_read_affine(expression, loops) for expression in one.results] for one in maps]
        self.sizes = _find_sizes(self.maps, [np.shape(operand) for operand in operands], loops)
        kinds = [str(kind) for kind in operation.attributes["iterator_types"]]
        self.reductions = [loop for loop in range(loops) if "reduction" in kinds[loop]]
        self.parallel = [loop for loop in range(loops) if loop not in self.reductions]
        steps = math.prod(self.sizes[loop] for loop in self.reductions)
        inner = [op.operation for op in self.body.operations]
        if math.prod(self.sizes) * len(inner) > _MAX_WORK:
            raise CannotEvaluate("a dispatch of this size")
        self.steps = steps
        self.wide = bool(self.reductions) and not any(is_rounding(op.name) for op in inner)
        self.is_product_sum = [op.name for op in inner] == ["arith.mulf", "arith.addf", "linalg.yield"]
        arrays = [np.asarray(operand) for operand in operands]
        arrays = [array.astype(widen_dtype(array.dtype, self.wide), copy=False) for array in arrays]
        self.views = [self._view(array, map_) for array, map_ in zip(arrays, self.maps, strict=True)]
        self.inputs = len(operands) - len(self.results)

    def run(self) -> list[Array]:
        """Return the results."""
        if self.reductions and self.is_product_sum and self.inputs == 2:
            return [self._finish(self._sum_products(), 0)]
        if self.steps > _MAX_STEPS:
            raise CannotEvaluate("a reduction of this size")
        shape = tuple(self.sizes[loop] for loop in self.parallel)
        carried = [
            np.broadcast_to(self._select_view(view, [0] * len(self.reductions)), shape)
            for view in self.views[self.inputs :]
        ]
        for index in itertools.product(*(range(self.sizes[loop]) for loop in self.reductions)):
            inputs = [self._select_view(view, index) for view in self.views[: self.inputs]]
            carried = self._evaluate_body([*inputs, *carried], index)
        return [self._finish(np.broadcast_to(value, shape), number) for number, value in enumerate(carried)]

    def _view(self, array: Array, map_: Sequence[tuple[dict[int, int], int]]) -> Array:
        """Return a view of the operand with an axis per loop. Raises CannotEvaluate if the map leaves the operand."""
        strides, start = [0] * len(self.sizes), 0
        for (factors, constant), size, stride in zip(map_, array.shape, array.strides, strict=True):
            reach = [factor * (self.sizes[loop] - 1) for loop, factor in factors.items()]
            low, high = constant + sum(min(one, 0) for one in reach), constant + sum(max(one, 0) for one in reach)
            if low < 0 or high >= size:
                raise CannotEvaluate("an index outside of its tensor")
            start += constant * stride
            for loop, factor in factors.items():
                strides[loop] += factor * stride
        origin = array[tuple(slice(constant, None) for _, constant in map_)] if start else array
        return as_strided(origin, self.sizes, strides, writeable=False)

    def _select_view(self, view: Array, index: Sequence[int]) -> Array:
        """Return the view for given indices of the reductions, with an axis per parallel loop."""
        where: list[Any] = [slice(None)] * view.ndim
        for loop, value in zip(self.reductions, index, strict=True):
            where[loop] = value
        return np.asarray(view[tuple(where)])

    def _sum_products(self) -> Array:
        """Return ``out + sum(left * right)`` over the reductions, with an axis per parallel loop."""
        terms: list[Any] = []
        for view in self.views[:2]:
            loops = [loop for loop in range(view.ndim) if view.strides[loop] or self.sizes[loop] == 1]
            terms += [view[tuple(slice(None) if loop in loops else 0 for loop in range(view.ndim))], loops]
        used = {loop for loops in terms[1::2] for loop in loops}
        found = [loop for loop in self.parallel if loop in used]
        is_plain = all(len(factors) <= 1 for map_ in self.maps[:2] for factors, _ in map_)
        summed = np.einsum(*terms, found, optimize=is_plain)
        missing = math.prod(self.sizes[loop] for loop in self.reductions if loop not in used)
        summed = np.asarray(summed) * missing
        axes = tuple(axis for axis, loop in enumerate(self.parallel) if loop not in used)
        start = self._select_view(self.views[2], [0] * len(self.reductions))
        with np.errstate(all="ignore"):
            return np.asarray(start + np.expand_dims(summed, axes))

    def _evaluate_body(self, arguments: Sequence[Array], index: Sequence[int]) -> list[Array]:
        values = dict(zip(self.body.arguments, arguments, strict=True))
        for op in self.body.operations:
            inner = op.operation
            if inner.name == "linalg.yield":
                return [self._get_value(operand, values) for operand in inner.operands]
            operands = [self._get_value(operand, values) for operand in inner.operands]
            if inner.name == "linalg.index":
                values[inner.results[0]] = self._get_loop_index(inner, index)
            elif inner.name == "tensor.extract":
                values[inner.results[0]] = self._extract(operands[0], operands[1:])
            elif inner.regions:
                raise CannotEvaluate(f"operation {inner.name}")
            else:
                values[inner.results[0]] = evaluate_scalar(inner, operands, wide=self.wide)
        raise CannotEvaluate("a body without linalg.yield")

    def _get_value(self, operand: Any, values: Mapping[Any, Any]) -> Array:
        value = values[operand] if operand in values else self.outer[operand]
        return np.asarray(value)

    def _get_loop_index(self, operation: Any, index: Sequence[int]) -> Array:
        from iree.compiler import ir

        loop = ir.IntegerAttr(operation.attributes["dim"]).value
        if loop in self.reductions:
            return np.asarray(index[self.reductions.index(loop)], np.int64)
        axes = tuple(axis for axis, other in enumerate(self.parallel) if other != loop)
        return np.expand_dims(np.arange(self.sizes[loop], dtype=np.int64), axes)

    def _extract(self, tensor: Array, indices: Sequence[Array]) -> Array:
        for one, size in zip(indices, tensor.shape, strict=True):
            if one.size and not (one.min() >= 0 and one.max() < size):
                raise CannotEvaluate("an index outside of its tensor")
        found = np.asarray(tensor[tuple(indices)])
        return found.astype(widen_dtype(found.dtype, self.wide), copy=False)

    def _finish(self, value: Array, number: int) -> Array:
        """Return a result with the axes of its map and the dtype of the IR."""
        shape, dtype = self.results[number]
        loops = [next(iter(factors), -1) for factors, _ in self.maps[self.inputs + number]]
        if len(set(loops)) < len(loops) or sorted(loops) != self.parallel:
            raise CannotEvaluate("a result with this indexing map")
        with np.errstate(all="ignore"):
            ordered = value.transpose([self.parallel.index(loop) for loop in loops])
            return np.ascontiguousarray(ordered.astype(dtype)).reshape(shape)


def _read_affine(expression: Any, loops: int) -> tuple[dict[int, int], int]:
    """Return the factor of every loop and the constant of an affine expression. Raises CannotEvaluate otherwise."""
    from iree.compiler import ir

    if isinstance(expression, ir.AffineDimExpr):
        return {expression.position: 1}, 0
    if isinstance(expression, ir.AffineConstantExpr):
        return {}, expression.value
    if isinstance(expression, (ir.AffineAddExpr, ir.AffineMulExpr)):
        (left, left_constant), (right, right_constant) = (
            _read_affine(side, loops) for side in (expression.lhs, expression.rhs)
        )
        if isinstance(expression, ir.AffineAddExpr):
            factors = {loop: left.get(loop, 0) + right.get(loop, 0) for loop in (*left, *right)}
            return factors, left_constant + right_constant
        if not right:
            return {loop: factor * right_constant for loop, factor in left.items()}, left_constant * right_constant
    raise CannotEvaluate(f"an indexing map with {expression}")


def _find_sizes(
    maps: Sequence[Sequence[tuple[dict[int, int], int]]], shapes: Sequence[tuple[int, ...]], loops: int
) -> tuple[int, ...]:
    """Return the number of iterations of every loop, from tensor axes that only this loop indexes."""
    sizes: dict[int, int] = {}
    for map_, shape in zip(maps, shapes, strict=True):
        for (factors, constant), size in zip(map_, shape, strict=True):
            if list(factors.values()) == [1] and not constant:
                sizes.setdefault(next(iter(factors)), size)
    if len(sizes) < loops:
        raise CannotEvaluate("a loop of unknown size")
    return tuple(sizes[loop] for loop in range(loops))
