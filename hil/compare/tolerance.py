"""Compute default tolerances, and detect tolerances that cannot judge an output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from hil.compare.values import CHUNK, EXACT_DTYPES, compute_dot, make_reader, mask_limit
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import get_dtype_name, get_float_limits, get_int_limits, parse_dtype
from hil.errors import UsageError, VacuousTolerance

# For float64 to bfloat16 and complex dtypes: the defaults of torch.testing.assert_close. For two dtypes, torch also
# uses the looser default. These defaults assume values around 1; `fitted` scales atol. torch has no defaults for
# narrower floats. There, hil allows one representable step, because two correct computations may round to neighbours:
# rtol is the dtype's eps, and atol is the smallest subnormal in ml_dtypes.finfo. float4 uses the smallest sufficient
# rtol, because its atol is already one step for values below 2. float8_e8m0fnu contains only powers of two, and one
# step would double a value. Its tolerance is therefore exact.
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
# A default tolerance must fit four times into the spread of an output's values, and four times into the largest value.
_STEPS = 4.0
# Values within this distance (in units of eps) count as equal except for rounding.
_CONSTANT_EPS = 4.0


@dataclass(frozen=True)
class Scale:
    """Scale for a tensor's values, excluding infinities, NaN and saturated values (masks)."""

    rms: float = 0.0  # root mean square of the nonzero values; 0 without nonzero values
    largest: float = 0.0
    spread: float = 0.0  # largest minus smallest value; for complex values, the larger spread of the two parts
    least_extreme: float = 0.0  # min(|largest value|, |smallest value|)
    # eps of the dtype. 0 for integers, and for floats of up to 8 bits, which have steps larger than rounding noise.
    eps: float = 0.0


def scale_of(reference: Tensor) -> Scale:
    """Measure a tensor's scale in one chunked pass. The scale of strings is empty."""
    name = get_dtype_name(reference.dtype)
    if name == "string":
        return Scale()
    read, limit = make_reader(reference), mask_limit(reference.dtype)
    wide = name in ("float64", "complex128")
    squares: Any = 0.0
    count = 0
    parts = 2 if reference.dtype.kind == "c" else 1
    low, high, largest = [math.inf] * parts, [-math.inf] * parts, 0.0
    scratch = np.empty(min(CHUNK, reference.size))
    with np.errstate(all="ignore"):  # casting a signalling NaN warns
        for start in range(0, reference.size, CHUNK):
            chunk = read(start, start + CHUNK)
            if parts == 1:
                plain = scratch[: chunk.size]
                plain[...] = chunk
                own = chunk if chunk.dtype == np.float32 else plain  # NumPy is fastest with float32 and float64
                bottom, top = float(np.minimum.reduce(own)), float(np.maximum.reduce(own))
                if -limit < bottom and top < limit:  # false for NaN
                    low[0], high[0], largest = min(low[0], bottom), max(high[0], top), max(largest, -bottom, top)
                    squares += compute_dot(plain, plain, wide=wide)
                    count += int(np.count_nonzero(own != 0)) if bottom <= 0 <= top else own.size
                    continue
            values = chunk.astype(np.complex128 if parts == 2 else np.float64)
            magnitudes = np.abs(values)
            usual = magnitudes < limit
            values, magnitudes = values[usual], magnitudes[usual]
            if not values.size:
                continue
            for part, reals in enumerate((values.real, values.imag)[:parts]):
                low[part], high[part] = min(low[part], float(reals.min())), max(high[part], float(reals.max()))
            largest = max(largest, float(magnitudes.max()))
            squares += compute_dot(magnitudes, magnitudes, wide=wide)
            count += int(np.count_nonzero(magnitudes))
    spread = max(top - bottom for bottom, top in zip(low, high, strict=True))
    extreme = min(abs(low[0]), abs(high[0])) if parts == 1 else largest
    if not math.isfinite(spread) and not count:  # all values are excluded
        spread = extreme = 0.0
    return Scale(float(np.sqrt(squares / max(count, 1))), largest, spread, extreme, _get_eps(name))


def check_tolerance(rtol: float | None, atol: float | None) -> None:
    """Reject tolerances that are invalid for any data. None is always valid.

    Raises:
        UsageError: a value is negative, NaN or infinite, or rtol is 1 or more (zeros would always agree).
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"{name} is {value:g}: a tolerance is a number of 0 or more",
                hint=f"set {name} to the largest {'relative' if name == 'rtol' else 'absolute'} difference to accept",
            )
    if rtol is not None and rtol >= 1:
        raise UsageError(
            f"rtol is {rtol:g}: with an rtol of 1 or more, zeros would agree with every reference",
            hint="rtol is relative to the reference's value: 0.01 is one percent",
        )


def choose_tolerance(dtype: str, rtol: float | None, atol: float | None) -> Tolerance | None:
    """Return the tolerance for a dtype and values around 1; None requires exact equality.

    Missing values default to :data:`DEFAULT_TOLERANCES` for floats, and to 0 for integers and bools. Strings
    are always exact. :func:`fit_tolerance` adapts a default to the values.

    Raises:
        UsageError: :func:`check_tolerance` rejects the values, or the dtype is unknown. Also if atol reaches the
            largest difference that the dtype can represent.
    """
    check_tolerance(rtol, atol)
    span = _compute_span(dtype)
    if dtype == "string" or (dtype in EXACT_DTYPES and rtol is None and atol is None):
        return None
    if atol is not None and atol >= span:
        raise UsageError(
            f"atol is {atol:g}: no two {dtype} values differ by more than {span:g}, so the comparison could not fail",
            hint="set a smaller atol",
        )
    default = DEFAULT_TOLERANCES.get(dtype, Tolerance(0.0, 0.0))
    return Tolerance(default.rtol if rtol is None else float(rtol), default.atol if atol is None else float(atol))


def fit_tolerance(
    dtypes: tuple[str, str], reference: Tensor, rtol: float | None, atol: float | None
) -> tuple[Tolerance | None, Scale]:
    """Return the tolerance for two dtypes, with defaults fitted to the reference, and the reference's scale.

    A default atol is the dtype's atol times the reference's root mean square, if that is below 1. Rounding
    errors scale with the numbers added (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). atol is
    at least one step of the dtype. See :mod:`hil.compare.allowance` for the effect of noise.

    Args:
        dtypes: dtypes of both tensors; the looser default is used.

    Raises:
        UsageError: see :func:`choose_tolerance`.
    """
    tolerance = choose_looser(*(choose_tolerance(dtype, rtol, atol) for dtype in dtypes))
    if tolerance is None:
        return None, Scale()
    scale = scale_of(reference)
    if atol is not None or not tolerance.atol:
        return tolerance, scale
    # A reference of zeros has no scale.
    factor = min(scale.rms, 1.0) if scale.largest else 1.0
    return Tolerance(tolerance.rtol, max(tolerance.atol * factor, *map(_get_smallest_step, dtypes))), scale


def narrow_tolerance(scale: Scale) -> Tolerance:
    """Return the tolerance for nearly constant values. The reference's noise is added to this tolerance."""
    return Tolerance(0.0, _CONSTANT_EPS * scale.eps * scale.largest)


def find_blindness(tolerance: Tolerance, scale: Scale, *, noise: float | None = None, given: bool) -> str:
    """Return a reason if a tolerance cannot distinguish right and wrong outputs; otherwise "".

    Every tolerance must reject zeros. It then also rejects a doubled or negated output. Unless the values are constant,
    the tolerance must also reject permutations of the values. A default tolerance must be four times finer than these
    limits.

    Args:
        scale: the reference's scale. A reference of zeros is never blind, because any larger value fails.
        noise: noise allowance of the reference, if measured. Values with smaller differences count as constant.
        given: True if the user gave the tolerance.
    """
    steps = 1.0 if given else _STEPS
    rtol, atol, largest, spread = tolerance.rtol, tolerance.atol, scale.largest, scale.spread
    if not largest:
        return ""
    measured = f" (noise {noise:.2g})" if noise is not None else ""
    what = f"atol is {atol:.3g}, but the largest value is {largest:.3g}{measured}"
    if (2 - rtol) * largest <= atol:
        return f"{what}: flipped signs would agree"
    if (1 - rtol) * largest <= atol:
        return f"{what}: zeros would agree"
    if largest <= steps * atol:
        return f"{what}: right and wrong answers cannot be distinguished"
    constant = _CONSTANT_EPS * scale.eps * largest
    if noise is not None:
        constant = max(constant, noise)
    if constant < spread <= steps * (atol + rtol * scale.least_extreme):
        return (
            f"values differ by at most {spread:.3g}, which is within the tolerance (rtol {rtol:.3g}, "
            f"atol {atol:.3g}){measured}: the values would agree in any order"
        )
    return ""


def refuse_vacuous(
    name: str, tolerance: Tolerance | None, scale: Scale, *, rtol: float | None, atol: float | None
) -> None:
    """Reject a user's tolerance that would accept wrong outputs: see :func:`find_blindness`.

    Args:
        rtol, atol: the values that the user gave. A default is never rejected.

    Raises:
        VacuousTolerance: the tolerance accepts wrong outputs.
    """
    if tolerance is None or (rtol is None and atol is None):
        return
    own = tolerance if atol is not None else Tolerance(tolerance.rtol, 0.0)
    if why := find_blindness(own, scale, given=True):
        raise VacuousTolerance(
            f"output {name}: {why}",
            hint=f"set a smaller tolerance, or accept this output with --allow-blind={name}",
        )


def choose_looser(one: Tolerance | None, other: Tolerance | None) -> Tolerance | None:
    """Return the looser of two tolerances; None is exact."""
    if one is None or other is None:
        return one or other
    return Tolerance(max(one.rtol, other.rtol), max(one.atol, other.atol))


def _compute_span(dtype: str) -> float:
    """Return the largest difference between two finite values of a dtype."""
    if dtype == "string":
        return math.inf
    if dtype == "bool":
        return 1.0
    resolved = parse_dtype(dtype)
    if dtype in EXACT_DTYPES:
        info = get_int_limits(resolved)
        return float(int(info.max) - int(info.min))
    largest = float(get_float_limits(resolved).max)
    return 2 * largest * (math.sqrt(2) if resolved.kind == "c" else 1.0)


def _get_eps(dtype: str) -> float:
    if dtype in EXACT_DTYPES or parse_dtype(dtype).itemsize < 2:
        return 0.0
    return float(get_float_limits(parse_dtype(dtype)).eps)


def _get_smallest_step(dtype: str) -> float:
    """Return the smallest step of a dtype; 0 for dtypes that are compared as integers."""
    if dtype in EXACT_DTYPES:
        return 0.0
    return float(get_float_limits(parse_dtype(dtype)).smallest_subnormal)
