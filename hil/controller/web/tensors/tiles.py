"""Small maps of a tensor, one per index of an axis, such as the channels of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hil.controller.analysis.tensors.elements import SAME
from hil.controller.analysis.tensors.maps import Map, make_error_map, make_ratio_map, make_value_map
from hil.controller.analysis.tensors.planes import Plane, choose_plane
from hil.controller.analysis.tensors.scales import (
    PaletteScale,
    choose_error_scale,
    choose_limit_scale,
    choose_value_scale,
)
from hil.controller.web.tensors.drawing.axes import name_axes, name_axis
from hil.controller.web.tensors.drawing.figures import (
    Figure,
    NumberStyle,
    describe_scale,
    list_scale_ticks,
    make_difference_figure,
    make_value_figure,
)
from hil.controller.web.tensors.query import TensorQuery
from hil.controller.web.text.addresses import choose_page
from hil.controller.web.text.parameters import InvalidParameter
from hil.core.file_tensor import FileTensor
from hil.core.results import Tolerance

# Maximum tiles per page, maximum cells per axis of a tile, and the size of a tile in pixels.
TILES, TILE_CELLS, TILE_PIXELS = 24, 96, 128


@dataclass(frozen=True)
class Tile:
    """Small map of the elements with one index on an axis."""

    index: int
    figure: Figure
    caption: str
    query: str  # query of the page that shows these elements


@dataclass(frozen=True)
class TilePage:
    """Page of tiles with a common color scale.

    Attributes:
        title: the tensor that the tiles show.
        axis: name of the axis with an index per tile.
        scale: description of the color scale.
    """

    tiles: Sequence[Tile]
    title: str
    axis: str
    scale: str
    ticks: Sequence[tuple[float, str]]
    bar: str
    total: int
    page: int
    pages: int

    @property
    def bytes(self) -> int:
        """Estimated memory use in bytes."""
        return sum(one.figure.bytes + 500 for one in self.tiles) + 4000


@dataclass(frozen=True)
class TileSource:
    """Tensors and settings of tiles.

    Attributes:
        sides: one tensor whose values are shown, or two tensors whose difference is shown.
        style: format of the numbers.
    """

    sides: Sequence[FileTensor]
    title: str
    type: str
    style: NumberStyle = field(default_factory=NumberStyle)
    tolerance: Tolerance | None = None


def choose_tile_plane(query: TensorQuery, shape: Sequence[int], index: int) -> Plane:
    """Return the plane of a tile: the rows and columns of the page, or else the last two of the other axes.

    Raises:
        InvalidParameter: the tensor has no such axis, or no other axis.
    """
    axis = parse_tile_axis(query, shape)
    others = [one for one in range(len(shape)) if one != axis]
    if not others:
        raise InvalidParameter("tiles need a tensor with at least two axes", hint="remove the tiles")
    page = query.choose_plane(shape)
    rows, columns = page.row_axis, page.column_axis
    if columns is None or axis in (rows, columns):
        rows, columns = (others[-2] if len(others) > 1 else None), others[-1]
    places = [*query.index, *[0] * len(shape)][: len(shape)]
    places[axis] = index
    try:
        return choose_plane(shape, rows, columns, places)
    except ValueError as error:
        raise InvalidParameter(f"invalid slice: {error}", hint="choose other axes or indices") from error


def parse_tile_axis(query: TensorQuery, shape: Sequence[int]) -> int:
    """Return the axis of the tiles. Raises InvalidParameter if the tensor has no such axis."""
    if not (query.tiles.isdecimal() and len(query.tiles) < 3 and int(query.tiles) < len(shape)):
        raise InvalidParameter(
            f"invalid tiles {query.tiles[:40]!r}: the tensor has {len(shape)} axes", hint="choose an axis number from 0"
        )
    return int(query.tiles)


def make_tile_page(query: TensorQuery, source: TileSource) -> TilePage:
    """Return the requested page of tiles. Raises InvalidParameter if the axes are invalid."""
    shape = source.sides[0].shape
    axis = parse_tile_axis(query, shape)
    first, pages = choose_page(query.tile_page or 1, shape[axis], TILES)
    indices = range(first, min(first + TILES, shape[axis]))
    planes = [choose_tile_plane(query, shape, index) for index in indices]
    maps = [_make_map(source, plane, query) for plane in planes]
    scale = _choose_scale(source, maps, query.scale or "automatic")
    names = name_axes(planes[0], query.layout) if planes else ("", "")
    tiles = []
    for index, plane, found in zip(indices, planes, maps, strict=True):
        made = _make_figure(source, f"tile-{index}", f"{name_axis(axis, query.layout)}, index {index}", found, scale)
        figure = replace(made, axes=names, size=TILE_PIXELS)
        link = query.query(
            tiles="",
            tile_page=0,
            rows="" if plane.row_axis is None else str(plane.row_axis),
            columns=str(plane.column_axis),
            index=plane.index,
            **dict.fromkeys(("top", "left", "height", "width"), 0),
        )
        tiles.append(Tile(index, figure, _make_caption(source, found), link))
    return TilePage(
        tiles,
        source.title,
        name_axis(axis, query.layout),
        describe_scale(scale, source.style),
        list_scale_ticks(scale, source.style),
        tiles[0].figure.bar if tiles else "",
        shape[axis],
        first // TILES + 1,
        pages,
    )


def _make_map(source: TileSource, plane: Plane, query: TensorQuery) -> Map:
    if len(source.sides) < 2:
        return make_value_map(
            source.sides[0], plane, plane.whole, pool=query.pool or "mean", part=query.part, most=TILE_CELLS
        )
    a, b = source.sides
    if query.scale == "tolerance":
        return make_ratio_map(a, b, plane, plane.whole, source.tolerance, most=TILE_CELLS)
    return make_error_map(a, b, plane, plane.whole, part=query.part, most=TILE_CELLS)


def _choose_scale(source: TileSource, maps: Sequence[Map], kind: str) -> PaletteScale | None:
    if len(source.sides) < 2:
        return choose_value_scale(maps, kind)
    return choose_limit_scale(maps, source.tolerance) if kind == "tolerance" else choose_error_scale(maps, kind)


def _make_figure(source: TileSource, name: str, title: str, found: Map, scale: PaletteScale | None) -> Figure:
    if len(source.sides) < 2:
        return make_value_figure(name, title, source.type, found, scale, pool="mean", alone=True, style=source.style)
    return make_difference_figure(name, title, found, scale, "", source.style)


def _make_caption(source: TileSource, found: Map) -> str:
    ends = found.ends
    odd = sum(found.counts[SAME:])
    parts = [f"{odd} NaN or infinite"] if odd else []
    if ends is not None and len(source.sides) < 2:
        parts.insert(0, f"{source.style.format(ends[0])} to {source.style.format(ends[1])}")
    elif ends is not None:
        differs = bool(np.any(found.numbers > 0))
        parts.insert(
            0,
            f"max {source.style.format(ends[1])}{source.style.unit and ' '}{source.style.unit}" if differs else "equal",
        )
    return ", ".join(parts)
