"""The tolerances of IREE's tools, as hil's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hil.compare.tolerance import blindness, scale_of
from hil.compare.values import EXACT_DTYPES
from hil.controller.storage.magnitude import largest
from hil.core.results import Tolerance
from hil.core.tensors import Array, dtype_name

# What the tools take where no flag says otherwise. They compare all other dtypes bit by bit.
RTOL = 1e-5
ATOLS: Mapping[str, float] = MappingProxyType({"float16": 1e-3, "float32": 1e-4, "float64": 1e-4, "bfloat16": 1e-2})
# Below 1 together, so that integers stay exact beside floats that are not.
_EXACT = 0.25


def tool_tolerance(
    rtol: float | None, atols: Mapping[str, float], expected: Sequence[Array]
) -> tuple[float | None, float | None]:
    """rtol and atol with which hil calls different whatever the tools do.

    Of outputs of one dtype these are the tools' own. hil has one pair for all outputs: of several dtypes they are the
    strictest. Where the tools' own atol, which no flag gave, could not tell an output from a wrong one, it is None:
    hil's default.

    Args:
        rtol: what a flag says; None is nothing.
        atols: dtype -> what its flag says.
        expected: the outputs that are expected.
    """
    dtypes = [dtype_name(array.dtype) for array in expected]
    if not set(dtypes) - EXACT_DTYPES:
        return None, None
    if set(dtypes) - EXACT_DTYPES - ATOLS.keys():
        return 0.0, 0.0
    given, rtol = rtol, RTOL if rtol is None else rtol
    floats = [(dtype, array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in ATOLS]
    exact = [largest(array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in EXACT_DTYPES]
    if any(dtype not in atols and _is_blind(Tolerance(rtol, ATOLS[dtype]), array) for dtype, array in floats):
        return (None if exact else given), None
    atol = min(atols.get(dtype, ATOLS[dtype]) for dtype, _ in floats)
    return (min(rtol, _EXACT / max(1.0, *exact)), min(atol, _EXACT)) if exact else (rtol, atol)


def _is_blind(tolerance: Tolerance, expected: Array) -> bool:
    return bool(blindness(tolerance, scale_of(expected), given=True))
