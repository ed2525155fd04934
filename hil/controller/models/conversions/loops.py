"""Unroll StableHLO loops with a constant number of steps, such as those of an RNN.

IREE miscompiles some loops with many values: see :mod:`hil.controller.models.conversions.tensorflow_program`. An
unrolled loop avoids this error. It is also faster, because the host does not wait for a condition after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hil.controller.models.importers.mlir import find_operations
from hil.core.tensors import Array

# Maximum number of operations after unrolling; larger loops stay loops.
MAX_OPERATIONS = 20_000
# Pass pipeline to run first: it inlines calls, because hil cannot count the steps of a loop that contains calls.
INLINE = "builtin.module(inline,canonicalize,cse,symbol-dce)"

_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}
)
_COMPUTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.add": np.add,
        "stablehlo.subtract": np.subtract,
        "stablehlo.multiply": np.multiply,
        "stablehlo.minimum": np.minimum,
        "stablehlo.maximum": np.maximum,
        "stablehlo.and": np.bitwise_and,
        "stablehlo.or": np.bitwise_or,
        "stablehlo.not": np.invert,
        "stablehlo.select": np.where,
        "stablehlo.reshape": np.asarray,
    }
)
# Value that the loop counter depends on; None if it is known only at run time.
Known = Array | None


def unroll_loops(module: Any) -> None:
    """Unroll each loop with a constant number of steps, inner loops first."""
    for loop in find_operations(module.operation, "stablehlo.while"):
        size = sum(1 for _ in _iter_operations(loop.regions[1]))
        try:
            steps = _count_steps(loop, MAX_OPERATIONS // size)
        except RecursionError:  # a chain of thousands of unrolled steps computes the initial value
            steps = None
        if steps is not None:
            _unroll_loop(loop, steps)


def _iter_operations(region: Any, *, deep: bool = True) -> Iterator[Any]:
    for block in region:
        for inner in block:
            yield inner.operation
            if deep:
                for below in inner.operation.regions:
                    yield from _iter_operations(below)


def _count_steps(loop: Any, most: int) -> int | None:
    """Return the number of steps in a loop, or None if the number is unknown or above ``most``."""
    condition, body = (region.blocks[0] for region in loop.regions)
    state = [_evaluate_value(operand, {}) for operand in loop.operands]
    for steps in range(most + 1):
        [goes_on] = _evaluate_block(condition, state)
        if goes_on is None:
            return None
        if not goes_on:
            return steps
        state = _evaluate_block(body, state)
    return None


def _evaluate_block(block: Any, state: list[Known]) -> list[Known]:
    """Return a block's results, computed from the known arguments."""
    known = dict(zip(block.arguments, state, strict=True))
    *_, end = block
    return [_evaluate_value(operand, known) for operand in end.operation.operands]


def _evaluate_value(value: Any, known: dict[Any, Known]) -> Known:
    """Return a scalar's value, computed from the defining operation. Computed values are added to ``known``."""
    from iree.compiler import ir

    if value in known:
        return known[value]
    known[value] = None
    if str(value.type) in _DTYPES and isinstance(value.owner, (ir.Operation, ir.OpView)):
        known[value] = _evaluate_operation(value.owner.operation, known)
    return known[value]


def _evaluate_operation(operation: Any, known: dict[Any, Known]) -> Known:
    from iree.compiler import ir

    if operation.name == "stablehlo.constant":
        dense = operation.attributes["value"]
        is_number = isinstance(dense, ir.DenseIntElementsAttr)
        return _cast_to_result(np.asarray(dense[0]), operation) if is_number else None
    compute = _COMPUTED.get(operation.name)
    if operation.name == "stablehlo.compare":
        text = str(operation.attributes["comparison_direction"])
        compute = next(found for name, found in _COMPARED.items() if f" {name}>" in text)
    if compute is None or str(operation.results[0].type) not in _DTYPES:
        return None
    given = [_evaluate_value(operand, known) for operand in operation.operands]
    return None if any(one is None for one in given) else _cast_to_result(np.asarray(compute(*given)), operation)


_DTYPES = {f"tensor<i{bits}>": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)} | {"tensor<i1>": np.dtype(bool)}


def _cast_to_result(value: Array, operation: Any) -> Known:
    dtype = _DTYPES.get(str(operation.results[0].type))
    return None if dtype is None else value.astype(dtype)


def _unroll_loop(loop: Any, steps: int) -> None:
    from iree.compiler import ir

    body = loop.regions[1].blocks[0]
    *operations, end = list(body)
    values = list(loop.operands)
    point = ir.InsertionPoint(loop)
    for _ in range(steps):
        now = dict(zip(body.arguments, values, strict=True))
        for operation in operations:
            copy = operation.operation.clone(point)
            _replace_operands(copy, now)
            now.update(zip(operation.operation.results, copy.results, strict=True))
        values = [now.get(operand, operand) for operand in end.operation.operands]
    for result, value in zip(loop.results, values, strict=True):
        result.replace_all_uses_with(value)
    loop.erase()


def _replace_operands(operation: Any, values: Mapping[Any, Any]) -> None:
    """Replace operands of an operation and of nested operations."""
    for number, operand in enumerate(operation.operands):
        if operand in values:
            operation.operands[number] = values[operand]
    for region in operation.regions:
        for inner in _iter_operations(region, deep=False):
            _replace_operands(inner, values)
