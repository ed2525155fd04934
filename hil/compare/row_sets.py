"""Match the rows of two tensors in any order: detections, of which a board may give the same ones otherwise sorted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hil.compare.values import Floats
from hil.core.results import Tolerance
from hil.errors import UsageError

MAX_ROWS = 4096
BOXES = ("xyxy", "cxcywh")
_Matches = npt.NDArray[np.bool_]


def match_share(
    actual: Floats,
    reference: Floats,
    tolerance: Tolerance,
    *,
    iou: float | None = None,
    box: str = "xyxy",
    at: int = 0,
) -> float:
    """Return the share of rows that a one-to-one matching pairs, the largest there is.

    A row is what lies along the last axis; the axis before it is the set, and the axes before that are separate sets.
    A tensor of one axis is a set of single values. NaN matches NaN, an infinity the same infinity.

    Args:
        tolerance: within which the columns of two rows must agree; with ``iou``, those outside of the box.
        iou: least intersection over union of the two boxes; None compares all columns.
        box: how the four columns are a box: corners, or centre and size.
        at: the first column of the box.

    Raises:
        UsageError: the rows have no such columns, or a set has more than :data:`MAX_ROWS` rows.
    """
    if actual.ndim < 2:
        actual, reference = (one.reshape(-1, 1) for one in (actual, reference))
    count, columns = actual.shape[-2:]
    if count > MAX_ROWS:
        raise UsageError(f"a set has {count} rows, {MAX_ROWS} are allowed")
    if iou is not None and not 0 <= at <= columns - 4:
        raise UsageError(f"a box needs 4 columns from column {at}, the rows have {columns}")
    sets = [one.reshape(-1, count, columns) for one in (actual, reference)]
    matched = 0
    for ours, theirs in zip(*sets, strict=True):
        others = np.arange(columns)
        fits = np.ones((count, count), np.bool_)
        if iou is not None:
            fits &= _overlaps(ours[:, at : at + 4], theirs[:, at : at + 4], box) >= iou
            others = np.delete(others, slice(at, at + 4))
        for column in others:
            fits &= _agrees(ours[:, column], theirs[:, column], tolerance)
        matched += _largest_matching(fits)
    total = sets[0].shape[0] * count
    return matched / total if total else 1.0


def _agrees(ours: Floats, theirs: Floats, tolerance: Tolerance) -> _Matches:
    a, b = ours[:, None], theirs[None, :]
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance.atol + tolerance.rtol * np.abs(b)
    return np.asarray((near & np.isfinite(a) & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b)), dtype=np.bool_)


def _overlaps(ours: Floats, theirs: Floats, box: str) -> Floats:
    """Intersection over union of every pair of boxes; two boxes that are equal overlap wholly, even without an area."""
    corners: Callable[[Floats], Floats] = (
        (lambda one: one)
        if box == "xyxy"
        else lambda one: np.concatenate([one[:, :2] - one[:, 2:] / 2, one[:, :2] + one[:, 2:] / 2], axis=1)
    )
    a, b = corners(ours)[:, None, :], corners(theirs)[None, :, :]
    with np.errstate(all="ignore"):
        shared = _area(np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:]))
        union = _area(a[..., :2], a[..., 2:]) + _area(b[..., :2], b[..., 2:]) - shared
        share = np.where(union > 0, shared / union, 0.0)
    same: Floats = np.where((a == b).all(axis=-1), 1.0, np.nan_to_num(share))
    return same


def _area(low: Floats, high: Floats) -> Floats:
    area: Floats = np.prod(np.maximum(high - low, 0.0), axis=-1)
    return area


def _largest_matching(fits: _Matches) -> int:
    """Return the size of a largest matching, by augmenting paths (Kuhn): row -> column, each at most once."""
    owner = np.full(fits.shape[1], -1)
    candidates = [np.flatnonzero(row) for row in fits]
    matched = 0
    # Equal rows at the same place are the usual case, and then no path is needed.
    for row in range(len(candidates)):
        if fits[row, row]:
            owner[row] = row
            matched += 1
    for row in range(len(candidates)):
        if not fits[row, row]:
            matched += _augment(row, candidates, owner)
    return matched


def _augment(start: int, candidates: list[npt.NDArray[np.intp]], owner: npt.NDArray[np.intp]) -> bool:
    """Give a row a column, moving others where they have another one; breadth first."""
    came_from: dict[int, int] = {}  # column -> the row from which it was reached
    taken: dict[int, int] = {}  # row -> the column that it would give up
    rows = [start]
    for row in rows:
        for column in map(int, candidates[row]):
            if column in came_from:
                continue
            came_from[column] = row
            if owner[column] >= 0:
                taken[int(owner[column])] = column
                rows.append(int(owner[column]))
                continue
            while True:
                row = came_from[column]
                owner[column] = row
                if row == start:
                    return True
                column = taken[row]
    return False
