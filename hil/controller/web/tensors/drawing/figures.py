"""Figures for maps of tensors: a picture, a legend, and a text alternative."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hil.controller.analysis.tensors.elements import NONFINITE, NONFINITE_ALONE, SAME, Codes
from hil.controller.analysis.tensors.maps import MAX_CELLS, Map, find_edges
from hil.controller.analysis.tensors.pictures import (
    COLOURS,
    EQUAL_COLOUR,
    encode_png,
    is_mixed,
    paint,
    paint_codes,
)
from hil.controller.analysis.tensors.planes import Plane
from hil.controller.analysis.tensors.scales import STEPS, PaletteScale
from hil.controller.web.templating import number
from hil.controller.web.tensors.drawing.axes import AxisMarks, make_column_marks, make_row_marks

# Minimum size in pixels for figures with few rows or columns.
_LEAST_HEIGHT, _LEAST_WIDTH = 48, 160
# Minimum distance between two marks of a color scale, as a share of its width.
_TICK_GAP = 0.2
# Estimated width of a character of a mark, as a share of the width of a color scale.
_TICK_CHAR = 0.027
# All colors of a scale, in a row.
SCALE_CELLS = np.arange(STEPS, dtype=np.uint8)[np.newaxis]


@dataclass(frozen=True, eq=False)
class Figure:
    """Picture with cells."""

    name: str  # element id in the page
    title: str
    cells: Codes  # palette indices
    palette: str  # palette name, see :func:`hil.controller.analysis.tensors.pictures.make_palette`
    alt: str
    scale: str = ""  # description of the color scale
    ticks: Sequence[tuple[float, str]] = ()  # (position on the color scale from 0 to 1, number)
    legend: Sequence[tuple[str, str]] = ()  # (color, meaning)
    worst: tuple[int, int] | None = None  # cell with the worst element
    note: str = ""  # additional explanation below the figure
    window: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))  # top, left, rows and columns, in elements
    axes: tuple[str, str] = ("", "")  # names of the row axis and the column axis
    size: int = MAX_CELLS  # width or height in pixels of a picture that is not stretched

    @property
    def rows(self) -> int:
        """Number of cell rows."""
        return int(self.cells.shape[0])

    @property
    def columns(self) -> int:
        """Number of cell columns."""
        return int(self.cells.shape[1])

    @cached_property
    def picture(self) -> str:
        """Picture as a data URL, a pixel per cell."""
        return _make_data_url(encode_png(self.cells, self.palette))

    @cached_property
    def bar(self) -> str:
        """Color scale as a data URL, or "" without a scale."""
        return _make_data_url(encode_png(SCALE_CELLS, self.palette)) if self.ticks else ""

    @property
    def pixels(self) -> int:
        """Pixels per cell side in a figure that is not stretched."""
        return max(1, self.size // max(self.rows, self.columns))

    @property
    def width(self) -> int:
        """Picture width in pixels, a multiple of the column count."""
        return self.columns * max(self.pixels, min(self.size, _LEAST_WIDTH) // self.columns)

    @property
    def height(self) -> int:
        """Picture height in pixels, a multiple of the row count."""
        return self.rows * max(self.pixels, min(self.size, _LEAST_HEIGHT) // self.rows)

    @property
    def marks(self) -> tuple[AxisMarks, AxisMarks]:
        """Index marks of the rows and the columns."""
        top, left, rows, columns = self.window
        return (
            make_row_marks(self.axes[0], top, rows, self.height),
            make_column_marks(self.axes[1], left, columns, self.width),
        )

    @property
    def bytes(self) -> int:
        """Estimated memory use in bytes, with the pictures."""
        return 3 * self.cells.nbytes + len(self.alt) + 4000

    def find_center(self, cell: tuple[int, int]) -> tuple[float, float]:
        """Return the center of a cell as (x, y) in pixels."""
        row, column = cell
        return (column + 0.5) * self.width / self.columns, (row + 0.5) * self.height / self.rows


@dataclass(frozen=True)
class NumberStyle:
    """Format of a map's numbers."""

    is_whole: bool = False  # True for the exact values of integers
    unit: str = ""

    def format(self, value: float) -> str:
        """Format a number, without the unit."""
        return str(int(value)) if self.is_whole and value.is_integer() and abs(value) <= 2**53 else number(value)


def make_value_figure(
    name: str,
    title: str,
    what: str,
    map: Map,
    scale: PaletteScale | None,
    *,
    pool: str,
    alone: bool,
    style: NumberStyle = NumberStyle(),
) -> Figure:
    """Return a figure with the values of one tensor.

    Args:
        what: type of the tensor, for the text alternative.
        scale: common scale of adjacent figures.
        alone: True for a tensor without a reference.
    """
    ends = map.ends
    numbers = f"from {style.format(ends[0])} to {style.format(ends[1])}" if ends else "no finite value"
    pooled = _describe_pooling(map, {"mean": "the mean", "min": "the smallest", "max": "the largest"}[pool])
    codes = _describe_codes(map, NONFINITE_ALONE)
    alt = ". ".join(filter(None, [f"{title}, {what}: {_describe_place(map)}, {numbers}", pooled, codes])) + "."
    return _make_figure(name, title, map, scale, "viridis", alt, legend=_make_legend(map, NONFINITE_ALONE), style=style)


def make_difference_figure(
    name: str, title: str, map: Map, scale: PaletteScale | None, worst: str, style: NumberStyle = NumberStyle()
) -> Figure:
    """Return a figure with differences. The brightest cells are the worst.

    Args:
        worst: description of the worst element, for the text alternative; "" if all are equal.
    """
    differ = int(np.count_nonzero((map.numbers > 0) | (map.codes > SAME)))
    cells = int(np.count_nonzero(map.filled))
    found = f"{differ} of {cells} cells differ; {worst}" if differ else "no element differs"
    if any(map.counts[SAME + 1 :]) and map.ends is not None:
        found += f"; worst finite difference {number(map.ends[1])}"
    parts = [f"{title}: {_describe_place(map)}. {found}", _describe_pooling(map, "the largest"), _describe_codes(map)]
    alt = ". ".join(filter(None, parts)) + "."
    legend = [(f"#{EQUAL_COLOUR}", "equal"), *_make_legend(map)]
    palette = "limit" if scale is not None and scale.kind == "limit" else "inferno"
    figure = _make_figure(name, title, map, scale, palette, alt, legend=legend, style=style)
    return replace(figure, worst=find_worst_cell(map) if differ else None)


def make_nonfinite_figure(name: str, title: str, map: Map, *, alone: bool) -> Figure:
    """Return a figure with the positions of NaN and infinities."""
    words = NONFINITE_ALONE if alone else NONFINITE
    codes = _describe_codes(map, words) or "every element is finite"
    return Figure(
        name,
        title,
        paint_codes(map),
        "viridis",
        f"{title}: {_describe_place(map)}. {codes}.",
        legend=[(f"#{EQUAL_COLOUR}", "finite"), *_make_legend(map, words)],
        worst=_find_most_severe_cell(map),
        note=_make_mixed_cells_note(map, SAME),
        window=_get_window_bounds(map),
    )


def describe_scale(scale: PaletteScale | None, style: NumberStyle = NumberStyle()) -> str:
    """Return the legend's text for a color scale: kind, limits, unit, and the number of cells beyond the ends."""
    if scale is None:
        return ""
    beyond = [
        f"{count} {'cell' if count == 1 else 'cells'} {where}"
        for count, where in ((scale.below, "below"), (scale.above, "above"))
        if count
    ]
    unit = f", in {style.unit}" if style.unit else ""
    return f"{scale.text}{unit}{'; ' if beyond else ''}{', '.join(beyond)}"


def list_scale_ticks(scale: PaletteScale | None, style: NumberStyle = NumberStyle()) -> list[tuple[float, str]]:
    """Return the marks of a color scale: (position from 0 to 1, number). Marks that would overlap are left out."""
    if scale is None:
        return []
    found = [(share, value, style.format(value)) for share, value in scale.list_ticks()]
    kept = [found[0], found[-1]] if len(found) > 1 else found
    for one in sorted(found[1:-1], key=lambda tick: tick[1] not in (0.0, 1.0)):
        if all(abs(one[0] - other[0]) >= _find_tick_gap(one[2], other[0], other[2]) for other in kept):
            kept.append(one)
    return [(share, text) for share, _, text in sorted(kept)]


def _find_tick_gap(text: str, other_share: float, other: str) -> float:
    """Return the minimum distance of a centered mark to another mark. The marks at the ends are inside the scale."""
    is_end = not 0.05 <= other_share <= 0.95
    return max(_TICK_GAP, _TICK_CHAR * (len(text) / 2 + len(other) / (1 if is_end else 2) + 1))


def find_worst_cell(map: Map) -> tuple[int, int]:
    """Return the cell with the most severe NaN or infinity, or without one the cell with the largest number."""
    codes = np.where(map.codes > SAME, map.codes, 0)
    ranked = codes if codes.any() else np.nan_to_num(map.numbers, nan=-1.0)
    row, column = np.unravel_index(int(ranked.argmax()), ranked.shape)
    return int(row), int(column)


def find_cell(map_window: tuple[int, int, int, int], plane: Plane, index: Sequence[int]) -> tuple[int, int] | None:
    """Return the figure cell that contains an element, or None if it is outside the figure."""
    place = plane.place_of(index)
    top, left, rows, columns = map_window
    if place is None or not (0 <= place[0] - top < rows and 0 <= place[1] - left < columns):
        return None
    edges = find_edges(plane.clip_window(top, left, rows, columns))
    found = (
        int(np.searchsorted(edge, at, "right")) - 1
        for edge, at in zip(edges, (place[0] - top, place[1] - left), strict=True)
    )
    return next(found), next(found)


def _find_most_severe_cell(map: Map) -> tuple[int, int] | None:
    row, column = divmod(int(map.codes.argmax()), map.codes.shape[1])
    return (row, column) if map.codes[row, column] else None


def _make_figure(
    name: str,
    title: str,
    map: Map,
    scale: PaletteScale | None,
    palette: str,
    alt: str,
    *,
    legend: Sequence[tuple[str, str]],
    style: NumberStyle,
) -> Figure:
    return Figure(
        name,
        title,
        paint(map, scale),
        palette,
        alt,
        describe_scale(scale, style),
        list_scale_ticks(scale, style),
        legend,
        note=_make_mixed_cells_note(map),
        window=_get_window_bounds(map),
    )


def _get_window_bounds(map: Map) -> tuple[int, int, int, int]:
    return map.window.top, map.window.left, map.window.rows, map.window.columns


def _make_legend(map: Map, words: Mapping[int, str] = NONFINITE) -> list[tuple[str, str]]:
    return [
        (f"#{COLOURS[code]}", f"{text}: {_format_share(map, code)}") for code, text in words.items() if map.counts[code]
    ]


def _describe_codes(map: Map, words: Mapping[int, str] = NONFINITE) -> str:
    return "; ".join(f"{_format_share(map, code)} are {text}" for code, text in words.items() if map.counts[code])


def _format_share(map: Map, code: int) -> str:
    count, total = map.counts[code], map.elements
    share = 100 * count / total
    # Omit a percentage that would be rounded to 0 or 100 although it differs from 0 and 100.
    told = f" ({share:.3g} %)" if count == total or 0.01 <= share < 99.95 else ""
    return f"{count} of {total} elements{told}"


def _make_mixed_cells_note(map: Map, least: int = SAME + 1) -> str:
    return "Cells with more than one of these values alternate their colours." if is_mixed(map, least) else ""


def _describe_place(map: Map) -> str:
    window = map.window
    return f"rows {window.top} to {window.bottom - 1} and columns {window.left} to {window.right - 1}"


def _describe_pooling(map: Map, how: str) -> str:
    rows, columns = map.cell
    return f"A cell is {how} of up to {rows} x {columns} elements" if rows * columns > 1 else ""


def _make_data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()
