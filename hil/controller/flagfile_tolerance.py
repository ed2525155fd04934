"""The tolerances of IREE's tools, as hil's."""

from __future__ import annotations

from collections.abc import Sequence

from hil.compare.values import EXACT_DTYPES
from hil.controller.magnitude import largest
from hil.tensors import Array, dtype_name

# What the tools take where no flag says otherwise; of halves hil's own defaults are looser.
_RTOL = 1e-5
_ATOLS = {"float16": 1e-3, "float32": 1e-4, "float64": 1e-4, "bfloat16": 1e-2}
_HALVES = frozenset(("float16", "bfloat16"))
# Below 1 together, so that integers stay exact beside floats that are not.
_EXACT = 0.25


def as_strict(rtol: float | None, atol: float | None, expected: Sequence[Array]) -> tuple[float | None, float | None]:
    """The tolerances with which hil finds whatever the tools do: they compare all but floats exactly.

    Args:
        rtol, atol: what flags say; None is nothing.
        expected: the outputs that are expected.
    """
    dtypes = {dtype_name(array.dtype) for array in expected}
    if dtypes <= EXACT_DTYPES:
        return None, None
    if not dtypes & _HALVES and (not dtypes & EXACT_DTYPES or (rtol is None and atol is None)):
        return rtol, atol
    rtol = _RTOL if rtol is None else rtol
    if atol is None:
        # Of values all below it, a tolerance would say nothing.
        sizes = [largest(array) for array in expected if dtype_name(array.dtype) in _ATOLS]
        atol = min([_ATOLS[dtype] for dtype in dtypes & _ATOLS.keys()] + [size for size in sizes if size], default=0.0)
    if exact := [largest(array) for array in expected if dtype_name(array.dtype) in EXACT_DTYPES]:
        return min(rtol, _EXACT / max(1.0, *exact)), min(atol, _EXACT)
    return rtol, atol
