"""Match the rows of two tensors in any order. A board may sort detections differently."""

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
    """Return the fraction of rows paired by a largest one-to-one matching.

    A row runs along the last axis. The second-last axis is the set; earlier axes are separate sets. A
    one-dimensional tensor is a set of single values. NaN matches NaN; an infinity matches the same infinity.

    Args:
        tolerance: tolerance for the columns of two rows; with ``iou``, only for columns outside the box.
        iou: minimum intersection over union of the two boxes; None compares all columns.
        box: format of the four box columns: corners, or centre and size.
        at: index of the first box column.

    Raises:
        UsageError: the rows lack these columns, or a set has more than :data:`MAX_ROWS` rows.
    """
    if actual.ndim < 2:
        actual, reference = (one.reshape(-1, 1) for one in (actual, reference))
    count, columns = actual.shape[-2:]
    if count > MAX_ROWS:
        raise UsageError(f"the set has {count} rows, maximum {MAX_ROWS}")
    if iou is not None and not 0 <= at <= columns - 4:
        raise UsageError(f"a box needs 4 columns from column {at} on, but each row has {columns}")
    sets = [one.reshape(-1, count, columns) for one in (actual, reference)]
    matched = 0
    for ours, theirs in zip(*sets, strict=True):
        others = np.arange(columns)
        fits = np.ones((count, count), np.bool_)
        if iou is not None:
            fits &= _compute_overlaps(ours[:, at : at + 4], theirs[:, at : at + 4], box) >= iou
            others = np.delete(others, slice(at, at + 4))
        for column in others:
            fits &= _match_rows(ours[:, column], theirs[:, column], tolerance)
        matched += _find_largest_matching(fits)
    total = sets[0].shape[0] * count
    return matched / total if total else 1.0


def _match_rows(ours: Floats, theirs: Floats, tolerance: Tolerance) -> _Matches:
    a, b = ours[:, None], theirs[None, :]
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance.atol + tolerance.rtol * np.abs(b)
    return np.asarray((near & np.isfinite(a) & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b)), dtype=np.bool_)


def _compute_overlaps(ours: Floats, theirs: Floats, box: str) -> Floats:
    """Return the intersection over union of every pair of boxes: 1 for equal boxes, even if their area is 0."""
    corners: Callable[[Floats], Floats] = (
        (lambda one: one)
        if box == "xyxy"
        else lambda one: np.concatenate([one[:, :2] - one[:, 2:] / 2, one[:, :2] + one[:, 2:] / 2], axis=1)
    )
    a, b = corners(ours)[:, None, :], corners(theirs)[None, :, :]
    with np.errstate(all="ignore"):
        shared = _compute_area(np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:]))
        union = _compute_area(a[..., :2], a[..., 2:]) + _compute_area(b[..., :2], b[..., 2:]) - shared
        share = np.where(union > 0, shared / union, 0.0)
    same: Floats = np.where((a == b).all(axis=-1), 1.0, np.nan_to_num(share))
    return same


def _compute_area(low: Floats, high: Floats) -> Floats:
    area: Floats = np.prod(np.maximum(high - low, 0.0), axis=-1)
    return area


def _find_largest_matching(fits: _Matches) -> int:
    """Return the size of a maximum bipartite matching, using augmenting paths (Kuhn)."""
    owner = np.full(fits.shape[1], -1)
    candidates = [np.flatnonzero(row) for row in fits]
    matched = 0
    # Fast path: rows usually match at the same index and then need no augmenting path.
    for row in range(len(candidates)):
        if fits[row, row]:
            owner[row] = row
            matched += 1
    for row in range(len(candidates)):
        if not fits[row, row]:
            matched += _augment_matching(row, candidates, owner)
    return matched


def _augment_matching(start: int, candidates: list[npt.NDArray[np.intp]], owner: npt.NDArray[np.intp]) -> bool:
    """Find an augmenting path for a row by breadth-first search, and reassign the columns along it."""
    came_from: dict[int, int] = {}  # column -> row that reached it
    taken: dict[int, int] = {}  # row -> column that it would release
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
