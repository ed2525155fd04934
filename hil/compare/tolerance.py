"""How far apart two values may be: the default tolerances, and which of a user's are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from hil.compare.values import CHUNK, EXACT_DTYPES, reader
from hil.errors import UsageError
from hil.results import Tolerance
from hil.tensors import Array, dtype_name, dtype_of

# float64 to bfloat16 and the complex ones: the defaults of torch.testing.assert_close (which takes a pair of dtypes as
# the looser of the two; so do we). It has none for narrower floats. There one representable step is allowed, for two
# correct computations may round to neighbours: rtol is the dtype's eps and atol its smallest subnormal, as
# ml_dtypes.finfo has them (float4: the least rtol that does it, since its atol already is a step below 2).
# float8_e8m0fnu holds powers of two and no zero; a step would double a value, so it is exact.
DEFAULT_TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float64": Tolerance(rtol=1e-7, atol=1e-7),
        "float32": Tolerance(rtol=1.3e-6, atol=1e-5),
        "float16": Tolerance(rtol=1e-3, atol=1e-5),
        "bfloat16": Tolerance(rtol=1.6e-2, atol=1e-5),
        "complex128": Tolerance(rtol=1e-7, atol=1e-7),
        "complex64": Tolerance(rtol=1.3e-6, atol=1e-5),
        "float8_e3m4": Tolerance(rtol=2.0**-4, atol=2.0**-6),
        "float8_e4m3": Tolerance(rtol=2.0**-3, atol=2.0**-9),
        "float8_e4m3fn": Tolerance(rtol=2.0**-3, atol=2.0**-9),
        "float8_e4m3fnuz": Tolerance(rtol=2.0**-3, atol=2.0**-10),
        "float8_e5m2": Tolerance(rtol=2.0**-2, atol=2.0**-16),
        "float8_e5m2fnuz": Tolerance(rtol=2.0**-2, atol=2.0**-17),
        "float8_e8m0fnu": Tolerance(rtol=0.0, atol=0.0),
        "float4_e2m1fn": Tolerance(rtol=0.375, atol=2.0**-1),
    }
)


def check_tolerance(rtol: float | None, atol: float | None) -> None:
    """Refuse a tolerance that no data is needed to see through; None is always fine.

    Raises:
        UsageError: a value is negative, NaN or infinite, or rtol is 1 or more (zeros would agree with everything).
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"{name} is {value:g}: a tolerance is a number of 0 or more",
                hint=f"give {name} as the largest {'relative' if name == 'rtol' else 'absolute'} difference to accept",
            )
    if rtol is not None and rtol >= 1:
        raise UsageError(
            f"rtol is {rtol:g}: a comparison cannot fail when zeros agree with every reference",
            hint="rtol is a share of the reference's value: 0.01 is one percent",
        )


def tolerance_for(dtype: str, rtol: float | None, atol: float | None) -> Tolerance | None:
    """The tolerance for an output of this dtype; None is exact.

    What is not given comes from :data:`DEFAULT_TOLERANCES` for floats and is 0 for integers and bools. Strings are
    always exact.

    Raises:
        UsageError: :func:`check_tolerance` refuses it, atol is at least the largest difference that the dtype can
            express, or hil does not know the dtype.
    """
    check_tolerance(rtol, atol)
    span = _span(dtype)
    if dtype == "string" or (dtype in EXACT_DTYPES and rtol is None and atol is None):
        return None
    if atol is not None and atol >= span:
        raise UsageError(
            f"atol is {atol:g}: no two {dtype} values differ by more than {span:g}, so the comparison could not fail",
            hint="give a smaller atol",
        )
    default = DEFAULT_TOLERANCES.get(dtype, Tolerance(0.0, 0.0))
    return Tolerance(default.rtol if rtol is None else float(rtol), default.atol if atol is None else float(atol))


def _span(dtype: str) -> float:
    """The largest difference of two finite values of a dtype."""
    if dtype == "string":
        return math.inf
    if dtype == "bool":
        return 1.0
    import ml_dtypes

    resolved = dtype_of(dtype)
    if dtype in EXACT_DTYPES:
        info = ml_dtypes.iinfo(resolved)  # type: ignore[no-untyped-call]
        return float(int(info.max) - int(info.min))
    largest = float(ml_dtypes.finfo(resolved).max)  # type: ignore[no-untyped-call]
    return 2 * largest * (math.sqrt(2) if resolved.kind == "c" else 1.0)


def refuse_vacuous(name: str, reference: Array, tolerance: Tolerance) -> None:
    """Refuse a user's tolerance so wide that the reference with every sign flipped would be within it.

    That is so when ``2*|b| <= atol + rtol*|b|`` for every finite b. A reference of zeros only is not refused: there
    atol alone decides, and any larger value fails. Reads the reference up to the first value that settles it.

    Args:
        name: the output's name, for the message.
        reference: what the output is compared with; strings are never refused.
        tolerance: what the user gave.

    Raises:
        UsageError: the tolerance is that wide.
    """
    if dtype_name(reference.dtype) == "string":
        return
    read, largest = reader(reference), 0.0
    for start in range(0, reference.size, CHUNK):
        chunk = read(start, start + CHUNK)
        with np.errstate(all="ignore"):  # a signalling NaN warns when it is cast
            magnitudes = np.abs(chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64))
        finite = magnitudes[np.isfinite(magnitudes)]
        largest = max(largest, float(finite.max(initial=0.0)))
        if (2 - tolerance.rtol) * largest > tolerance.atol:
            return
    if largest > 0:
        raise UsageError(
            f"atol is {tolerance.atol:g}, but the largest value of output {name} is {largest:g}: "
            "it would agree with every sign flipped",
            hint=f"give an atol well below {largest:g}",
        )


def looser(one: Tolerance | None, other: Tolerance | None) -> Tolerance | None:
    """The tolerance for a pair of dtypes, from that of each; None is exact."""
    if one is None or other is None:
        return one or other
    return Tolerance(max(one.rtol, other.rtol), max(one.atol, other.atol))
