"""Compute the difference that the reference's noise allows for every output element."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hil.compare.tolerance import Scale
from hil.compare.values import CHUNK, Floats, make_reader
from hil.core.file_tensor import Tensor
from hil.core.tensors import get_dtype_name, get_float_limits, parse_dtype

# Noise widens a tolerance by at most this many eps, relative to the value, or to the root mean square if it is larger.
_CEILING_EPS = 1e4
# Noise never widens a tolerance by more than this fraction of the same value.
_CEILING = 2.0**-5
# An element with more noise than this ceiling is unsteady: the element jumps, or its terms cancel. If at most this
# fraction of elements is unsteady, each may differ by its noise.
_UNSTEADY_SHARE = 1 / 8
# Narrower dtypes in which an output may have been computed, each with a narrower one.
_NARROWER = {
    "float32": (("float16", "bfloat16"),),
    "float64": (("float16", "bfloat16"), ("float32", "float16")),
}
_MIN_EVIDENCE = 8
# Smaller noise counts as zero.
_NO_NOISE = 2.0**-127
# Unsteady elements listed in messages.
_MAX_LISTED = 4


@dataclass(frozen=True)
class Allowance:
    """Noise of an output, and the part of it that may widen a tolerance."""

    noise: Tensor
    reference: Tensor
    share: float  # ceiling as a fraction of the value's magnitude, or of ``rms`` if larger
    rms: float
    largest: float  # largest noise
    widest: float  # largest noise below the ceiling; unless ``is_rare``, larger noise counts as the ceiling
    unsteady: int  # number of elements with noise above the ceiling
    first: tuple[int, ...]  # first unsteady elements, as flat indices

    @property
    def is_rare(self) -> bool:
        """True if unsteady elements are rare, so that each may differ by its full noise."""
        return self.unsteady <= _UNSTEADY_SHARE * self.reference.size

    def slice_allowed(self, start: int, stop: int) -> Floats:
        """Return the difference allowed beyond the tolerance for elements ``start`` to ``stop``."""
        sizes = self.slice_noise(start, stop)
        return sizes if self.is_rare else np.minimum(sizes, self._slice_ceiling(start, stop))

    def slice_noise(self, start: int, stop: int) -> Floats:
        """Return the full noise of elements ``start`` to ``stop``, without the ceiling."""
        return _read_sizes(self.noise, start, stop)

    def _slice_ceiling(self, start: int, stop: int) -> Floats:
        return _compute_ceiling(self.reference, start, stop, self.share, self.rms)


def measure_allowance(noise: Tensor, reference: Tensor, scale: Scale) -> Allowance:
    """Compare an output's noise with the ceiling, in one chunked pass."""
    eps = _find_eps(reference, scale)
    share = min(_CEILING_EPS * eps, _CEILING) if eps else _CEILING
    largest = widest = clipped = 0.0
    unsteady = 0
    first: list[int] = []
    for start in range(0, reference.size, CHUNK):
        sizes = _read_sizes(noise, start, start + CHUNK)
        ceiling = _compute_ceiling(reference, start, start + CHUNK, share, scale.rms)
        above = sizes > ceiling
        largest = max(largest, float(sizes.max()))
        widest = max(widest, float(sizes.max(initial=0.0, where=~above)))
        clipped = max(clipped, float(np.minimum(sizes, ceiling).max()))
        unsteady += int(np.count_nonzero(above))
        if len(first) < _MAX_LISTED:
            first += [start + int(place) for place in np.flatnonzero(above)[: _MAX_LISTED - len(first)]]
    found = Allowance(noise, reference, share, scale.rms, largest, widest, unsteady, tuple(first))
    return found if found.is_rare else replace(found, widest=clipped)


def _find_eps(reference: Tensor, scale: Scale) -> float:
    """Return the eps of the dtype in which an output was computed.

    If a narrower float represents all values, the last operator computed in this float and a cast followed. Values that
    a still narrower float represents, such as whole numbers, are no evidence.
    """
    for narrow, narrowest in _NARROWER.get(get_dtype_name(reference.dtype), ()):
        changed, evidence = (_count_changed(reference, parse_dtype(one)) for one in (narrow, narrowest))
        if not changed and evidence >= _MIN_EVIDENCE:
            return float(get_float_limits(parse_dtype(narrow)).eps)
    return scale.eps


def _count_changed(reference: Tensor, narrow: np.dtype[Any]) -> int:
    """Return the number of values that a cast to a narrower float changes."""
    read, found = make_reader(reference), 0
    with np.errstate(all="ignore"):
        for start in range(0, reference.size, CHUNK):
            chunk = read(start, start + CHUNK)
            found += int(np.count_nonzero((chunk.astype(narrow).astype(chunk.dtype) != chunk) & ~np.isnan(chunk)))
    return found


def _read_sizes(noise: Tensor, start: int, stop: int) -> Floats:
    sizes = make_reader(noise)(start, stop).astype(np.float64)
    sizes[~(sizes > _NO_NOISE)] = 0.0  # NaN as well
    return sizes


def _compute_ceiling(reference: Tensor, start: int, stop: int, share: float, rms: float) -> Floats:
    with np.errstate(all="ignore"):
        values = make_reader(reference)(start, stop)
        magnitudes = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    return np.asarray(share * np.maximum(np.where(np.isfinite(magnitudes), magnitudes, 0.0), rms))
