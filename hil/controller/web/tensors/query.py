"""Query parameters of a tensor's page: tensor, slice, display and tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from fastapi import Request

from hil.compare.tolerance import check_tolerance
from hil.controller.analysis.tensors.elements import PARTS
from hil.controller.analysis.tensors.maps import POOLS
from hil.controller.analysis.tensors.planes import Plane, Window, choose_plane
from hil.controller.analysis.tensors.scales import SCALES
from hil.controller.analysis.tensors.worst import ORDERS
from hil.controller.web.tensors.drawing.axes import LAYOUTS
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.requests import list_fields, number_of, parse_filter
from hil.core.npy import MAX_DIMS
from hil.errors import UsageError

TILE_VALUES = ("difference", "first", "second")
_CHOICES = {
    "part": PARTS,
    "pool": POOLS,
    "by": tuple(ORDERS),
    "scale": tuple(SCALES),
    "layout": LAYOUTS,
    "tile_of": TILE_VALUES,
}
# Rows and columns of the window around a selected element.
CLOSE = 33


@dataclass(frozen=True)
class _Values:
    """Query parameters. The page chooses a default for "" and 0."""

    id: str = ""
    root: int = 0
    case: str = ""
    kind: str = ""
    output: str = ""  # tensor name
    beside: str = ""  # reference to compare with, if not the decisive reference
    rows: str = ""  # axis number; without rows and columns, show all elements in reading order
    columns: str = ""
    # top, left, height, width: visible part of the plane.
    top: int = 0
    left: int = 0
    height: int = 0
    width: int = 0
    part: str = ""
    pool: str = ""
    by: str = ""
    rtol: str = ""
    atol: str = ""
    dtype: str = ""  # dtype for a file with raw bytes
    mark: str = ""  # index of the marked element
    scale: str = ""  # color scale, from SCALES
    layout: str = ""  # names of the axes, from LAYOUTS
    tiles: str = ""  # axis number: show a small map per index of this axis
    tile_of: str = ""  # values to show in the tiles, from TILE_VALUES; the default is the difference
    tile_page: int = 0


@dataclass(frozen=True)
class TensorQuery(_Values):
    """All query parameters of a tensor's page."""

    index: tuple[int, ...] = ()  # index per axis: i0, i1, ...

    def query(self, **other: Any) -> str:
        """Return the query with some values replaced. Empty values are omitted."""
        one = replace(self, **other)
        values = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "index"}
        values |= {f"i{axis}": place for axis, place in enumerate(one.index)}
        return urlencode({name: value for name, value in values.items() if value})

    @property
    def tolerance(self) -> tuple[float | None, float | None]:
        """The given rtol and atol, or None. Raises UsageError for invalid values."""
        found = [_parse_real(name, getattr(self, name)) for name in ("rtol", "atol")]
        try:
            check_tolerance(*found)
        except UsageError as error:
            raise InvalidParameter(error.message, hint=error.hint) from error
        return found[0], found[1]

    def get_marked(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the marked index, or None if there is no mark or it is outside the shape."""
        parts = self.mark.split(",") if self.mark else []
        if not all(part.isdecimal() and len(part) < 19 for part in parts) or not self.mark:
            return () if self.mark == "." and not shape else None
        found = tuple(map(int, parts))
        inside = len(found) == len(shape) and all(at < dim for at, dim in zip(found, shape, strict=True))
        return found if inside else None

    def choose_plane(self, shape: Sequence[int]) -> Plane:
        """Return the requested plane. Raises UsageError if an axis or index does not exist."""
        try:
            rows, columns = (_parse_axis(name, getattr(self, name)) for name in ("rows", "columns"))
            if columns is None and rows is not None:
                columns = next((axis for axis in reversed(range(len(shape))) if axis != rows), None)
                if columns is None:
                    rows, columns = None, rows
            return choose_plane(shape, None if rows == columns else rows, columns, self.index)
        except ValueError as error:
            raise InvalidParameter(f"invalid slice: {error}", hint="choose other axes or indices") from error

    def choose_window(self, plane: Plane) -> Window:
        """Return the visible part of a plane."""
        return plane.clip_window(self.top, self.left, self.height, self.width)

    def around(self, plane: Plane, index: Sequence[int]) -> str:
        """Return the query for a close-up of an element, which may be outside the current plane."""
        place = replace(plane, index=tuple(index)).place_of(index) or (0, 0)
        close = plane.clip_window(place[0] - CLOSE // 2, place[1] - CLOSE // 2, CLOSE, CLOSE)
        return self.query(
            index=() if plane.in_reading_order else tuple(index),
            mark=",".join(map(str, index)) or ".",
            top=close.top,
            left=close.left,
            height=close.rows,
            width=close.columns,
        )


def list_tensor_parameters() -> tuple[str, ...]:
    """Return the URL parameters of a tensor's page."""
    return (*list_fields(_Values), *(f"i{axis}" for axis in range(MAX_DIMS)))


def query_of(request: Request) -> TensorQuery:
    """Parse the query of a request. Raises UsageError for an invalid value."""
    given = request.query_params
    count = max((int(name[1:]) + 1 for name in given if _is_index(name)), default=0)
    index = tuple(number_of(request, f"i{axis}") for axis in range(count))
    found = parse_filter(request, _Values)
    for name, choices in _CHOICES.items():
        if (value := getattr(found, name)) and value not in choices:
            raise InvalidParameter.choose(name, value, choices)
    return TensorQuery(**vars(found), index=index)


def _is_index(name: str) -> bool:
    return name[:1] == "i" and name[1:].isdecimal() and len(name) < 4 and int(name[1:]) < MAX_DIMS


def _parse_axis(name: str, given: str) -> int | None:
    if not given:
        return None
    if not (given.isdecimal() and len(given) < 3):
        raise ValueError(f"{name} must be an axis number, got {given[:40]!r}")
    return int(given)


def _parse_real(name: str, given: str) -> float | None:
    if not given.strip():
        return None
    try:
        return float(given)
    except ValueError as error:
        raise InvalidParameter(f"invalid {name} {given[:40]!r}: expected a number of 0 or more") from error
