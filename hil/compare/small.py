"""Values so small beside an output's tolerance that it cannot tell them from 0, nor from their negative.

A tensor may hold pixel coordinates beside scores of 1e-6, or the tail of a softmax. One tolerance for all of them says
nothing of the small ones. Where they are many, of the whole output, of a row or of a column, they are compared relative
to themselves, as far as the reference's noise allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hil.compare.allowance import Allowance
from hil.compare.values import CHUNK, part_of, reader
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array, dtype_name, float_limits

# Small values are looked at where they are this share of the values of an output that are not 0 (the first within a
# default tolerance of floats, where they are about one in 1e5 by chance; the second within any other)...
_SHARE, _GIVEN_SHARE = 1 / 16, 1 / 4
# ...or of those of a row or column that has at least two.
_GROUP_SHARE = 1 / 2
_GROUP_LEAST = 2
# Within a tolerance that the user gave, or one step of an integer, this share of the small values may be lost, and one
# is lost where it is off by more than half of itself.
_LOST_SHARE = 1 / 4
_HALF = 0.5
_NAMED = 4
_AXES = {0: "row", 1: "row of the second axis", -1: "column"}


@dataclass(frozen=True)
class SmallValues:
    """Small values that differ by more than they may."""

    reason: str
    lost: int  # how many differ by more than the noise explains; 0 where the noise is as large as they are
    first: int  # the flat index of the first of them


def check_small(
    actual: Tensor, reference: Tensor, tolerance: Tolerance, *, given: bool, allowed: Allowance | None
) -> SmallValues | None:
    """Compare the small values of two tensors that agree; None where they do, or are few.

    Args:
        tolerance: within which the tensors agree.
        given: whether the user gave it: then only answers are found that lost most of the small values.
    """
    share = relative_limit(reference, tolerance, given=given)
    with_zeros = not given or not _has_eps(reference)
    pieces = list(_lost_pieces(actual, reference, tolerance, share, allowed, with_zeros=with_zeros))
    if not any(piece.lost.size or piece.unjudged.size for piece in pieces):
        return None
    parts = ((one.small, one.absent, one.lost, one.unjudged) for one in pieces)
    found = _Piece(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    share_of_all, least = (_GIVEN_SHARE, _LOST_SHARE) if given or not _has_eps(reference) else (_SHARE, 0.0)
    # A step beside a 0 is common in a few places: within a given tolerance, only the whole output tells it from noise.
    along_axes = found.without_zeros() if given else found
    for axis in (*_axes(reference.shape), None):
        many = share_of_all if axis is None else _GROUP_SHARE
        groups = _groups(reference, axis, found if axis is None else along_axes, many, least)
        if groups is None:
            continue
        names, chosen, counted = groups
        where = f", in {names}" if names else ""
        hidden = f"{len(counted)} of its values are smaller than the tolerance (rtol {tolerance.rtol:.3g}, atol "
        hidden += f"{tolerance.atol:.3g}){where}"
        if chosen.size:
            text = f"{hidden}: {len(chosen)} of them differ by more than {share:.2g} of their value"
            beyond = " and the reference's own noise" if allowed else ""
            return SmallValues(f"{text}{beyond}", len(chosen), int(chosen[0]))
        return SmallValues(f"{hidden}: in the reference they are 0, or no larger than its noise", 0, int(counted[0]))
    return None


def describe_small(reference: Tensor, tolerance: Tolerance) -> str:
    """Return which values of an output are smaller than a given tolerance, in a line; "" where they are few."""
    read, limit = reader(reference), tolerance.atol / (1 - tolerance.rtol)
    parts = [np.zeros(0, np.intp)]
    for start in range(0, reference.size, CHUNK):
        sizes = np.abs(_wide(read(start, start + CHUNK)))
        parts.append(start + np.flatnonzero((sizes > 0) & (sizes <= limit)))
    small = np.concatenate(parts)
    if not small.size:
        return ""
    found = _Piece(small, small[:0], small, small[:0])
    for axis in (*_axes(reference.shape), None):
        share = _GIVEN_SHARE if axis is None else _GROUP_SHARE
        if groups := _groups(reference, axis, found, share, least=0.0):
            names, _, counted = groups
            where = f" in {names}" if names else ""
            is_one = len(counted) == 1
            values = f"{len(counted)} value{where} is" if is_one else f"{len(counted)} values{where} are"
            whose = "its" if is_one else "their"
            return f"{values} smaller than the given tolerance: judged to within half of {whose} value"
    return ""


def relative_limit(reference: Tensor, tolerance: Tolerance, *, given: bool) -> float:
    """Return the share of a small value that it may be off by: half of the dtype's digits, or half of the value."""
    if given or not _has_eps(reference):
        return _HALF
    return max(tolerance.rtol, math.sqrt(float(float_limits(part_of(reference.dtype)).eps)))


def _has_eps(reference: Tensor) -> bool:
    return dtype_name(reference.dtype).startswith(("float", "bfloat", "complex")) and reference.dtype.itemsize >= 2


@dataclass(frozen=True)
class _Piece:
    small: Array
    absent: Array
    lost: Array
    unjudged: Array

    def without_zeros(self) -> _Piece:
        """Return the same without the values that are 0 in the reference."""
        small, unjudged = (np.setdiff1d(places, self.absent) for places in (self.small, self.unjudged))
        return _Piece(small, self.absent[:0], self.lost, unjudged)


def _lost_pieces(
    actual: Tensor,
    reference: Tensor,
    tolerance: Tolerance,
    share: float,
    allowed: Allowance | None,
    *,
    with_zeros: bool,
) -> Iterator[_Piece]:
    """Yield the flat indices of small values, of those that are 0 in the reference, are lost, or cannot be judged.

    Args:
        with_zeros: whether a value counts that is 0 in the reference. A tolerance that the user gave for floats says
            how far from 0 such a value may be. For integers, one step from 0 may be the whole value.
    """
    read_a, read_b = reader(actual), reader(reference)
    tiny = float(float_limits(part_of(reference.dtype)).smallest_normal) if _has_eps(reference) else 0.0
    for start in range(0, reference.size, CHUNK):
        a, b = (_wide(read(start, start + CHUNK)) for read in (read_a, read_b))
        sizes = np.abs(b)
        limit = tolerance.atol / (1 - tolerance.rtol)
        counted = (sizes > 0) | (np.abs(a) > tiny) if with_zeros else sizes > 0
        places = np.flatnonzero((sizes <= limit) & counted)
        if not places.size:
            continue
        sizes = sizes[places]
        distances = np.abs(a[places] - b[places])
        noise = allowed.all_of(start, start + CHUNK)[places] if allowed else np.zeros(places.size)
        off = distances > np.maximum(share * sizes, tiny)
        beyond = off & (distances > noise)
        # Beside an exact 0 nothing is relative: that may be rounding, or a value that should not be there.
        lost = beyond & (sizes > 0)
        unjudged = np.where(sizes > 0, off & ~beyond & (noise > sizes / 2), beyond)
        yield _Piece(*(start + places[chosen] for chosen in (slice(None), sizes == 0, lost, unjudged)))


def _wide(values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _axes(shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the axes whose places are looked at one by one; a tensor of rank 1 has none."""
    if len(shape) > 1:
        yield -1
        yield from range(len(shape) - 1)


def _groups(
    reference: Tensor, axis: int | None, found: _Piece, share: float, least: float
) -> tuple[str, Array, Array] | None:
    """Return the names of the groups along an axis in which too many small values are lost, the lost ones, and all.

    Args:
        share: of the values that are not 0, from which on small values are many.
        least: of the small values, above which lost ones are too many.
    """
    size = reference.shape[axis] if axis is not None else 1
    stride = math.prod(reference.shape[axis % reference.ndim + 1 :]) if axis is not None else max(reference.size, 1)

    def of(places: Array) -> Array:
        return places // stride % size

    def counts(places: Array) -> Array:
        return np.bincount(of(places), minlength=size)

    smalls, losts, hidden = counts(found.small), counts(found.lost), counts(found.unjudged)
    # Whether there may be such a group is known without the zeros: most outputs end here.
    if not ((losts > least * smalls) | (hidden > 0)).any():
        return None
    nonzero = sum((counts(places) for places in _nonzero(reference)), counts(found.absent))
    many = smalls >= share * nonzero
    many &= (nonzero >= _GROUP_LEAST) & (smalls > 0)
    bad, lost = many & (losts > least * smalls), found.lost
    if not bad.any():
        bad, lost = many & (hidden >= _GROUP_SHARE * nonzero) & (hidden > 0), lost[:0]
    if not bad.any():
        return None
    return name_places(np.flatnonzero(bad), axis), lost[bad[of(lost)]], found.small[bad[of(found.small)]]


def _nonzero(reference: Tensor) -> Iterator[Array]:
    read = reader(reference)
    for start in range(0, reference.size, CHUNK):
        yield start + np.flatnonzero(read(start, start + CHUNK))


def name_places(places: Array, axis: int | None) -> str:
    """Return the names of places along an axis, the first few: ``columns 1, 4``; "" without an axis."""
    if axis is None:
        return ""
    noun, _, rest = _AXES.get(axis, f"row of axis {axis}").partition(" ")
    shown = ", ".join(map(str, places[:_NAMED])) + (", ..." if len(places) > _NAMED else "")
    return f"{noun}{'s' * (len(places) > 1)} {shown}{rest and f' {rest}'}"
