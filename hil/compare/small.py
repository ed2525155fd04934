"""Check values that the tolerance cannot distinguish from 0 or from their negative.

A tensor may mix pixel coordinates with scores of 1e-6, or contain the tail of a softmax. A single tolerance cannot
judge the small values. If an output, row or column has many small values, hil checks the
relative error of these values. Errors up to the reference's noise are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hil.compare.allowance import Allowance
from hil.compare.values import CHUNK, get_part_dtype, make_reader
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array, get_dtype_name, get_float_limits

# Small values are checked if they are at least this fraction of an output's nonzero values. The first fraction applies
# to a default tolerance of floats, where about one value in 1e5 is small by chance. The second applies to any other
# tolerance.
_SHARE, _GIVEN_SHARE = 1 / 16, 1 / 4
# The same fraction for a row or column with at least two nonzero values.
_GROUP_SHARE = 1 / 2
_MIN_GROUP_SIZE = 2
# Within a user's tolerance, or one integer step, this fraction of the small values may be lost. A value is lost if its
# error exceeds half the value.
_LOST_SHARE = 1 / 4
_HALF = 0.5
_MAX_LISTED = 4
_AXES = {0: "row", 1: "row of the second axis", -1: "column"}


@dataclass(frozen=True)
class SmallValues:
    """Small values that differ by more than allowed."""

    reason: str
    lost: int  # values with errors beyond the noise; 0 if the noise is as large as the values
    first: int  # flat index of the first lost value


def check_small(
    actual: Tensor, reference: Tensor, tolerance: Tolerance, *, given: bool, allowed: Allowance | None
) -> SmallValues | None:
    """Compare the small values of two tensors that agree within the tolerance. Return None if they agree or are few.

    Args:
        tolerance: tolerance within which the tensors agree.
        given: True if the user gave the tolerance. If so, report only outputs that lost most of the small values.
    """
    share = compute_relative_limit(reference, tolerance, given=given)
    with_zeros = not given or not _has_eps(reference)
    pieces = list(_iter_lost_pieces(actual, reference, tolerance, share, allowed, with_zeros=with_zeros))
    if not any(piece.lost.size or piece.unjudged.size for piece in pieces):
        return None
    parts = ((one.small, one.absent, one.lost, one.unjudged) for one in pieces)
    found = _Piece(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    share_of_all, least = (_GIVEN_SHARE, _LOST_SHARE) if given or not _has_eps(reference) else (_SHARE, 0.0)
    # A few values that differ from a 0 by one step are common. With a user's tolerance, only the whole output shows
    # whether such differences are noise.
    along_axes = found.without_zeros() if given else found
    for axis in (*_iter_axes(reference.shape), None):
        many = share_of_all if axis is None else _GROUP_SHARE
        groups = _find_groups(reference, axis, found if axis is None else along_axes, many, least)
        if groups is None:
            continue
        names, chosen, counted = groups
        where = f", in {names}" if names else ""
        hidden = f"{len(counted)} values are smaller than the tolerance (rtol {tolerance.rtol:.3g}, atol "
        hidden += f"{tolerance.atol:.3g}){where}"
        if chosen.size:
            text = f"{hidden}: {len(chosen)} of them differ by more than {share:.2g} of their value"
            beyond = " and the noise of the reference" if allowed else ""
            return SmallValues(f"{text}{beyond}", len(chosen), int(chosen[0]))
        return SmallValues(
            f"{hidden}: they cannot be judged, because the reference is 0 or within its noise", 0, int(counted[0])
        )
    return None


def describe_small(reference: Tensor, tolerance: Tolerance) -> str:
    """Return a line about the values that are smaller than the user's tolerance; "" if they are few."""
    read, limit = make_reader(reference), tolerance.atol / (1 - tolerance.rtol)
    parts = [np.zeros(0, np.intp)]
    for start in range(0, reference.size, CHUNK):
        sizes = np.abs(_widen(read(start, start + CHUNK)))
        parts.append(start + np.flatnonzero((sizes > 0) & (sizes <= limit)))
    small = np.concatenate(parts)
    if not small.size:
        return ""
    found = _Piece(small, small[:0], small, small[:0])
    for axis in (*_iter_axes(reference.shape), None):
        share = _GIVEN_SHARE if axis is None else _GROUP_SHARE
        if groups := _find_groups(reference, axis, found, share, least=0.0):
            names, _, counted = groups
            where = f" in {names}" if names else ""
            is_one = len(counted) == 1
            values = f"{len(counted)} value{where} is" if is_one else f"{len(counted)} values{where} are"
            whose = "its" if is_one else "their"
            return f"{values} smaller than the given tolerance: hil accepts errors of up to half of {whose} value"
    return ""


def compute_relative_limit(reference: Tensor, tolerance: Tolerance, *, given: bool) -> float:
    """Return the allowed relative error of a small value: the square root of the dtype's eps.

    The limit is 0.5 for a user's tolerance, and for dtypes without an eps such as integers.
    """
    if given or not _has_eps(reference):
        return _HALF
    return max(tolerance.rtol, math.sqrt(float(get_float_limits(get_part_dtype(reference.dtype)).eps)))


def _has_eps(reference: Tensor) -> bool:
    return get_dtype_name(reference.dtype).startswith(("float", "bfloat", "complex")) and reference.dtype.itemsize >= 2


@dataclass(frozen=True)
class _Piece:
    small: Array
    absent: Array
    lost: Array
    unjudged: Array

    def without_zeros(self) -> _Piece:
        """Return a copy without the values that are 0 in the reference."""
        small, unjudged = (np.setdiff1d(places, self.absent) for places in (self.small, self.unjudged))
        return _Piece(small, self.absent[:0], self.lost, unjudged)


def _iter_lost_pieces(
    actual: Tensor,
    reference: Tensor,
    tolerance: Tolerance,
    share: float,
    allowed: Allowance | None,
    *,
    with_zeros: bool,
) -> Iterator[_Piece]:
    """Yield the flat indices of small values, chunk by chunk.

    Each item lists all small values, zeros of the reference, lost values, and values that cannot be judged.

    Args:
        with_zeros: True to include values that are 0 in the reference. A user's tolerance for floats specifies
            the allowed distance from 0. For integers, one step from 0 may be the whole value.
    """
    read_a, read_b = make_reader(actual), make_reader(reference)
    tiny = float(get_float_limits(get_part_dtype(reference.dtype)).smallest_normal) if _has_eps(reference) else 0.0
    for start in range(0, reference.size, CHUNK):
        a, b = (_widen(read(start, start + CHUNK)) for read in (read_a, read_b))
        sizes = np.abs(b)
        limit = tolerance.atol / (1 - tolerance.rtol)
        counted = (sizes > 0) | (np.abs(a) > tiny) if with_zeros else sizes > 0
        places = np.flatnonzero((sizes <= limit) & counted)
        if not places.size:
            continue
        sizes = sizes[places]
        distances = np.abs(a[places] - b[places])
        noise = allowed.slice_noise(start, start + CHUNK)[places] if allowed else np.zeros(places.size)
        off = distances > np.maximum(share * sizes, tiny)
        beyond = off & (distances > noise)
        # A relative error from an exact 0 is undefined: the value may be rounding, or an error.
        lost = beyond & (sizes > 0)
        unjudged = np.where(sizes > 0, off & ~beyond & (noise > sizes / 2), beyond)
        yield _Piece(*(start + places[chosen] for chosen in (slice(None), sizes == 0, lost, unjudged)))


def _widen(values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _iter_axes(shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the axes to check index by index. Rank-1 tensors have none."""
    if len(shape) > 1:
        yield -1
        yield from range(len(shape) - 1)


def _find_groups(
    reference: Tensor, axis: int | None, found: _Piece, share: float, least: float
) -> tuple[str, Array, Array] | None:
    """Find the groups along an axis that lost more small values than allowed.

    Args:
        share: minimum fraction of nonzero values that are small.
        least: fraction of the small values that may be lost.

    Returns:
        The names of the groups, their lost values, and all their small values, by flat index. None if no group is bad.
    """
    size = reference.shape[axis] if axis is not None else 1
    stride = math.prod(reference.shape[axis % reference.ndim + 1 :]) if axis is not None else max(reference.size, 1)

    def find_group(places: Array) -> Array:
        return places // stride % size

    def count_groups(places: Array) -> Array:
        return np.bincount(find_group(places), minlength=size)

    smalls, losts, hidden = count_groups(found.small), count_groups(found.lost), count_groups(found.unjudged)
    # Most outputs end here, before the nonzero values are counted.
    if not ((losts > least * smalls) | (hidden > 0)).any():
        return None
    nonzero = sum((count_groups(places) for places in _iter_nonzero(reference)), count_groups(found.absent))
    many = smalls >= share * nonzero
    many &= (nonzero >= _MIN_GROUP_SIZE) & (smalls > 0)
    bad, lost = many & (losts > least * smalls), found.lost
    if not bad.any():
        bad, lost = many & (hidden >= _GROUP_SHARE * nonzero) & (hidden > 0), lost[:0]
    if not bad.any():
        return None
    return (
        name_places(np.flatnonzero(bad), axis),
        lost[bad[find_group(lost)]],
        found.small[bad[find_group(found.small)]],
    )


def _iter_nonzero(reference: Tensor) -> Iterator[Array]:
    read = make_reader(reference)
    for start in range(0, reference.size, CHUNK):
        yield start + np.flatnonzero(read(start, start + CHUNK))


def name_places(places: Array, axis: int | None) -> str:
    """Return text for the first few indices along an axis: ``columns 1, 4``; "" without an axis."""
    if axis is None:
        return ""
    noun, _, rest = _AXES.get(axis, f"row of axis {axis}").partition(" ")
    shown = ", ".join(map(str, places[:_MAX_LISTED])) + (", ..." if len(places) > _MAX_LISTED else "")
    return f"{noun}{'s' * (len(places) > 1)} {shown}{rest and f' {rest}'}"
