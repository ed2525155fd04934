"""Measure a reference's noise: how far rounding moves the outputs.

A verdict cannot be more precise than the reference. So the reference runs several times on changed inputs, which differ
by one unit of their dtype's eps or by :data:`FAR` units. Operators of ONNX models also round randomly
(:mod:`hil.controller.backends.references.rounding`). Rounding noise grows with the number of units. A jump (of a floor,
a comparison, an index) does not grow. This distinguishes noise and jumps for every element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hil.compare.tolerance import DEFAULT_TOLERANCES, find_blindness, fit_tolerance, scale_of
from hil.compare.values import EXACT_DTYPES, Floats
from hil.core.results import NOISE_DTYPE
from hil.core.tensors import Array, get_dtype_name, get_float_limits, parse_dtype

# Number of runs with inputs changed by one eps, and by FAR eps. The largest change counts.
RUNS = 4
FAR_RUNS = 2
FAR = 16
# Safety factor of three bits, for three reasons: board and reference both have noise, a few runs only estimate the
# noise, and the board's summation order may be worse.
NOISE_FACTOR = 8.0
# Minimum and maximum ratio between the changes for FAR units and for one unit. Within this range, an element has noise
# and does not jump. An element whose changes are at most FAR eps does not jump either.
_GROWTH = (FAR / 4, FAR * 4)
# Each element may differ by at least this quantile of the differences that are allowed for similar elements.
_QUANTILE = 0.9
_MIN_GROUP = 8


def perturb_inputs(inputs: Mapping[str, Array], seed: int, units: int = 1) -> dict[str, Array]:
    """Change each float of the inputs randomly up or down by ``units`` units of the dtype's eps.

    These values do not change: integers, floats of at most 8 bits, and whole numbers that the dtype represents exactly
    (pixels, identifiers, masks, zeros).
    """
    rng = np.random.default_rng(seed)
    moved: dict[str, Array] = {}
    for name, array in inputs.items():
        dtype = get_dtype_name(array.dtype)
        moved[name] = array
        if dtype not in EXACT_DTYPES and array.dtype.itemsize >= 2 and array.size:
            eps = float(get_float_limits(array.dtype).eps)
            wide = np.result_type(array.dtype, np.float64) if array.dtype.kind in "fc" else np.dtype(np.float64)
            with np.errstate(all="ignore"):  # infinities and NaN stay unchanged
                values = array.astype(wide)
                whole = (np.abs(values) < 1 / eps) & (values == np.round(values))
                factors = 1 + units * eps * rng.choice((-1.0, 1.0), array.shape)
                other = np.where(whole, array, (values * factors).astype(array.dtype))
            if other.tobytes() != array.tobytes():
                moved[name] = other
    return moved


def compute_noise(
    outputs: Mapping[str, Array], near: Sequence[Mapping[str, Array]], far: Sequence[Mapping[str, Array]]
) -> dict[str, Array]:
    """Return how far rounding may move each element of every float output, rounded up to a power of two.

    An element that jumps may differ by its jump. Another element may differ by :data:`NOISE_FACTOR` times its noise, or
    by the noise of most similar elements, if larger. Similar elements are all elements of the output, of its row and of
    its column; the smallest of these three limits applies. If noise is proportional to the values, relative noise is
    used instead.

    Args:
        near: The reference's outputs for inputs that are changed by one unit.
        far: The outputs for inputs that are changed by :data:`FAR` units. An output whose shape depends on input values
            has no noise.
    """
    found: dict[str, Array] = {}
    for name, array in outputs.items():
        if get_dtype_name(array.dtype) not in DEFAULT_TOLERANCES or not array.size:
            continue
        base = _widen(array)
        one, more = (_find_largest_move(base, [run[name] for run in runs if name in run]) for runs in (near, far))
        if one is not None and more is not None:
            found[name] = encode_noise(_compute_allowed(base, one, more, scale_of(array).rms, _get_eps(array)))
    return found


def encode_noise(sizes: Any) -> Array:
    """Round sizes up to powers of two, stored in one byte each. 0 becomes the smallest power."""
    with np.errstate(divide="ignore"):
        exponents = np.clip(np.ceil(np.log2(np.asarray(sizes, np.float64))), -127, 127)
    found: Array = np.exp2(exponents).astype(parse_dtype(NOISE_DTYPE))
    return found


def merge_noise(measured: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the maximum noise of multiple references for every element."""
    found: dict[str, Array] = {}
    for noise in measured:
        for name, one in noise.items():
            known = found.get(name)
            same = known is not None and known.shape == one.shape
            found[name] = encode_noise(np.maximum(_widen(known), _widen(one))) if known is not None and same else one
    return found


def select_relevant_noise(outputs: Mapping[str, Array], noise: Mapping[str, Array]) -> dict[str, Array]:
    """Return the noise of those outputs whose verdict may depend on the noise.

    The verdict may depend on noise that is large relative to the default tolerance, and on the noise of small values.
    """
    found: dict[str, Array] = {}
    for name, one in noise.items():
        tolerance, scale = fit_tolerance((get_dtype_name(outputs[name].dtype),) * 2, outputs[name], None, None)
        if tolerance is None:
            continue
        values = np.abs(_widen(outputs[name]))
        with np.errstate(invalid="ignore"):
            limits = tolerance.atol + tolerance.rtol * values
            # Small values differ from 0 by less than the tolerance, so they are compared only within their noise.
            small = (values > 0) & (values <= limits)
        if small.any() or find_blindness(tolerance, scale, given=False) or bool((_widen(one) > limits / 4).any()):
            found[name] = one
    return found


def _find_largest_move(base: Any, runs: Sequence[Array]) -> Floats | None:
    others = [_widen(run) for run in runs if run.shape == base.shape]
    if not others:
        return None
    with np.errstate(all="ignore"):
        moves = [np.abs(other - base) for other in others]
        return np.asarray(np.max([np.where(np.isfinite(move), move, 0.0) for move in moves], axis=0))


def _compute_allowed(base: Any, one: Floats, more: Floats, rms: float, eps: float) -> Floats:
    magnitudes = np.where(np.isfinite(base), np.abs(base), 0.0)
    low, high = _GROWTH
    grows = (more <= high * one) & (more >= low * one)
    steady = grows | (np.maximum(one, more) <= FAR * eps * np.maximum(magnitudes, rms))
    allowed = np.where(steady, NOISE_FACTOR * np.maximum(one, more / FAR), np.maximum(one, more))
    # Jumps of a few elements are not typical. If most elements jump, as after a quantization, the jumps count as noise.
    typical = steady if np.count_nonzero(steady & (allowed > 0)) >= np.count_nonzero(~steady) else ~steady
    typical = typical & (allowed > 0)
    return np.asarray(np.maximum(allowed, _pool_allowed(allowed, typical, magnitudes)))


def _pool_allowed(allowed: Floats, typical: Any, magnitudes: Floats) -> Any:
    """Return for every element the difference that is allowed for most similar elements."""
    known = typical & (magnitudes > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(known, allowed / magnitudes, 0.0)
    if known.any() and _spread(relative[known]) < _spread(allowed[known]):
        return _compute_quantiles(relative[None], known[None])[0] * magnitudes
    pooled: Any = _compute_quantiles(allowed[None], typical[None])[0]
    for axis in {0, 1, -1} if allowed.ndim > 1 else ():
        if axis < allowed.ndim and allowed.size >= _MIN_GROUP * allowed.shape[axis]:
            rows, kinds = (
                np.moveaxis(values, axis, 0).reshape(allowed.shape[axis], -1) for values in (allowed, typical)
            )
            shape = [1] * allowed.ndim
            shape[axis] = -1
            pooled = np.minimum(pooled, _compute_quantiles(rows, kinds).reshape(shape))
    return pooled


def _compute_quantiles(rows: Any, counted: Any) -> Floats:
    """Return a quantile of each row's elements in ``counted``; 0 for a row without such elements."""
    rows, counted = rows.reshape(len(rows), -1), counted.reshape(len(counted), -1)
    ordered = np.sort(np.where(counted, rows, np.inf), axis=1)
    counts = np.count_nonzero(counted, axis=1)
    places = (_QUANTILE * np.maximum(counts - 1, 0)).astype(np.int64)
    chosen = np.take_along_axis(ordered, places[:, None], axis=1)[:, 0]
    return np.asarray(np.where(counts > 0, chosen, 0.0))


def _spread(values: Floats) -> float:
    low, high = np.quantile(values, (1 - _QUANTILE, _QUANTILE))
    return float(high / low)


def _get_eps(array: Array) -> float:
    return float(get_float_limits(array.dtype).eps)


def _widen(array: Array) -> Any:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
