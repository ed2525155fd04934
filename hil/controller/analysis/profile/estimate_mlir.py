"""What a dispatch computes and moves at the least, told from the operations that the compiler fused into it.

A dispatch may be a part of a node, or a loop's one turn, and then shapes of the model say little about it: these are
of the dispatch itself. Called in isolated processes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Scalar operations that compute nothing: constants, casts between integers that hold the same number, indices.
_FREE = (
    "arith.constant",
    "arith.index_cast",
    "arith.extf",
    "arith.truncf",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "arith.bitcast",
    "linalg.index",
    "linalg.yield",
    "tensor.extract",
)
# Structured operations that the program's order of elements, not its arithmetic, is about.
_MOVING = ("linalg.copy", "linalg.transpose", "linalg.broadcast", "linalg.fill", "linalg.pack", "linalg.unpack")
_LOAD, _STORE = "iree_tensor_ext.dispatch.tensor.load", "iree_tensor_ext.dispatch.tensor.store"
# Of a softmax, for each element: its maximum's share, subtraction, exp, the sum's share, division.
_SOFTMAX = 5

Walk = Callable[[Any, Callable[[Any], bool]], Iterator[Any]]


def dispatch_estimate(dispatch: Any, walk: Walk) -> tuple[int | None, int | None]:
    """Operations and bytes of a ``flow.dispatch.workgroups``, None where a shape is dynamic or an operation unknown.

    Args:
        dispatch: the operation.
        walk: goes through the wanted operations within one.
    """
    moved = _sum(_bytes(op) for op in walk(dispatch, lambda op: op.name in (_LOAD, _STORE)))
    structured = walk(dispatch, lambda op: op.name.startswith(("linalg.", "iree_linalg_ext.")))
    return _sum(_operations(op, walk) for op in structured), moved


def _sum(parts: Iterator[int | None]) -> int | None:
    counts = list(parts)
    return None if None in counts else sum(count for count in counts if count is not None)


def _bytes(operation: Any) -> int | None:
    """Of what is read (a load's result) or written (a store's first operand), which may be a part of a tensor."""
    kind = operation.results[0].type if operation.name == _LOAD else operation.operands[0].type
    shape, bits = _shape(kind), _bits(kind.element_type)
    return None if shape is None or bits is None else -(-math.prod(shape) * bits // 8)


def _operations(operation: Any, walk: Walk) -> int | None:
    if operation.name in _MOVING:
        return 0
    if operation.name == "linalg.softmax":
        shape = _shape(operation.operands[0].type)
        return None if shape is None else _SOFTMAX * math.prod(shape)
    sizes = _sizes(operation)
    if sizes is None:
        return None
    scalars = sum(1 for inner in walk(operation, lambda op: not len(op.regions)) if inner.name not in _FREE)
    return math.prod(sizes) * scalars


def _sizes(operation: Any) -> list[int] | None:
    """How often each loop of a structured operation turns."""
    from iree.compiler import ir

    if not operation.name.startswith("linalg.") or "indexing_maps" not in operation.attributes:
        return None
    maps = [item.value for item in operation.attributes["indexing_maps"]]
    sizes: dict[int, int] = {}
    for map_, operand in zip(maps, operation.operands, strict=False):
        shape = _shape(operand.type)
        if shape is None:
            return None
        for expression, size in zip(map_.results, shape, strict=True):
            if isinstance(expression, ir.AffineDimExpr):
                sizes[expression.position] = size
    count = maps[0].n_dims if maps else 0
    return [sizes[position] for position in range(count)] if len(sizes) == count else None


def _shape(kind: Any) -> Sequence[int] | None:
    """A tensor's shape, () of a scalar; None where a dimension is dynamic."""
    from iree.compiler import ir

    if not isinstance(kind, ir.RankedTensorType):
        return ()
    return list(kind.shape) if kind.has_static_shape else None


def _bits(element: Any) -> int | None:
    from iree.compiler import ir

    if isinstance(element, ir.ComplexType):
        part = _bits(element.element_type)
        return None if part is None else 2 * part
    return 64 if isinstance(element, ir.IndexType) else getattr(element, "width", None)
