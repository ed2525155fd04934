"""Labels and index marks for the axes of a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hil.controller.analysis.tensors.planes import Plane
from hil.controller.web.text.parameters import InvalidParameter

# Names for the axes of a tensor that a user can select. C is the axis of the channels.
LAYOUTS = ("NCHW", "NHWC", "CHW", "HWC")
# Minimum distance between marks in pixels.
_COLUMN_GAP, _ROW_GAP = 44, 22
# Longer numbers do not fit in the margin. The marks then count from an offset, which the label contains.
_MAX_DIGITS = 5


@dataclass(frozen=True)
class AxisMarks:
    """Label and index marks of an axis."""

    label: str
    marks: Sequence[tuple[float, str]]  # (position in pixels, text)


def name_axes(plane: Plane, layout: str = "") -> tuple[str, str]:
    """Return the names of the row axis and the column axis.

    Raises:
        InvalidParameter: the layout has another number of axes than the tensor.
    """
    dims = len(plane.shape)
    if layout and len(layout) != dims:
        raise InvalidParameter(
            f"layout {layout} has {len(layout)} axes, but the tensor has {dims}", hint="choose another layout, or none"
        )
    if not plane.in_reading_order:
        rows, columns = plane.row_axis, plane.column_axis
        assert columns is not None
        return "" if rows is None else name_axis(rows, layout), name_axis(columns, layout)
    if not dims:
        return "", ""
    if plane.columns != plane.shape[-1]:
        return f"row of {plane.columns} elements", "element in the row"
    last = name_axis(dims - 1, layout)
    if dims == 1:
        return "", last
    return (name_axis(0, layout) if dims == 2 else f"axes 0 to {dims - 2}, flattened"), last


def name_axis(axis: int, layout: str = "") -> str:
    """Return the name of an axis: ``axis 1 (C)``."""
    return f"axis {axis} ({layout[axis]})" if axis < len(layout) else f"axis {axis}"


def list_layouts(dims: int) -> list[tuple[str, int, int, int]]:
    """Return the layouts of a tensor with this number of axes, with the axes of rows, columns and channels."""
    return [(name, name.index("H"), name.index("W"), name.index("C")) for name in LAYOUTS if len(name) == dims]


def make_row_marks(label: str, first: int, count: int, pixels: int) -> AxisMarks:
    """Return the marks of the rows from ``first`` on, in a picture of this height."""
    return _make_marks(label, first, count, pixels, _ROW_GAP)


def make_column_marks(label: str, first: int, count: int, pixels: int) -> AxisMarks:
    """Return the marks of the columns from ``first`` on, in a picture of this width."""
    return _make_marks(label, first, count, pixels, _COLUMN_GAP)


def _make_marks(label: str, first: int, count: int, pixels: int, gap: int) -> AxisMarks:
    if count < 1:
        return AxisMarks(label, ())
    step = _choose_step(count, max(1, pixels // gap))
    start = -(-first // step) * step
    places = range(start, first + count, step)
    base = 0
    if len(str(first + count - 1)) > _MAX_DIGITS and places and len(str(count)) <= _MAX_DIGITS:
        base = start
        label = f"{label}, from {base}".removeprefix(", ")
    marks = [((one - first + 0.5) / count * pixels, _format_mark(one - base, bool(base))) for one in places]
    return AxisMarks(label, marks)


def _choose_step(count: int, most: int) -> int:
    """Return the smallest step of 1, 2 or 5 times a power of ten with at most this many marks."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if -(-count // (factor * power)) <= most:
                return factor * power
        power *= 10


def _format_mark(index: int, is_relative: bool) -> str:
    sign = "+" if is_relative else ""
    if index >= 1_000_000 and not index % 100_000:
        return f"{sign}{index / 1e6:g}M"
    if index >= 10**_MAX_DIGITS and not index % 100:
        return f"{sign}{index / 1e3:g}k"
    return f"{sign}{index}"
