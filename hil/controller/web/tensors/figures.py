"""Figures for maps of tensors: a picture, a legend, and a text alternative."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hil.controller.analysis.tensors.elements import NONFINITE, NONFINITE_ALONE, SAME
from hil.controller.analysis.tensors.maps import MAX_CELLS, Map, find_edges
from hil.controller.analysis.tensors.pictures import (
    COLOURS,
    EQUAL_COLOUR,
    STEPS,
    PaletteScale,
    encode_png,
    is_mixed,
    paint,
    paint_codes,
)
from hil.controller.analysis.tensors.planes import Plane
from hil.controller.web.templating import number

# Minimum size in pixels for figures with few rows or columns.
_LEAST_HEIGHT, _LEAST_WIDTH = 48, 160


@dataclass(frozen=True)
class Figure:
    """Picture with cells."""

    name: str  # element id in the page
    title: str
    picture: str  # data URL
    rows: int  # rows and columns in cells
    columns: int
    alt: str
    ends: tuple[str, str] | None = None  # values at the two ends of the color scale
    bar: str = ""  # color scale as a picture
    legend: Sequence[tuple[str, str]] = ()  # (color, meaning)
    worst: tuple[int, int] | None = None  # cell with the worst element
    note: str = ""  # additional explanation below the figure
    window: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))  # top, left, rows and columns, in elements

    @property
    def pixels(self) -> int:
        """Pixels per cell side in a figure that is not stretched."""
        return max(1, MAX_CELLS // max(self.rows, self.columns))

    @property
    def width(self) -> int:
        """Picture width in pixels, a multiple of the column count."""
        return self.columns * max(self.pixels, _LEAST_WIDTH // self.columns)

    @property
    def height(self) -> int:
        """Picture height in pixels, a multiple of the row count."""
        return self.rows * max(self.pixels, _LEAST_HEIGHT // self.rows)

    @property
    def bytes(self) -> int:
        """Estimated memory use in bytes."""
        return len(self.picture) + len(self.bar) + len(self.alt) + 2000

    def find_center(self, cell: tuple[int, int]) -> tuple[float, float]:
        """Return the center of a cell as (x, y) in pixels."""
        row, column = cell
        return (column + 0.5) * self.width / self.columns, (row + 0.5) * self.height / self.rows


def make_value_figure(
    name: str, title: str, what: str, map: Map, scale: PaletteScale | None, *, pool: str, alone: bool
) -> Figure:
    """Return a figure with the values of one tensor.

    Args:
        what: type of the tensor, for the text alternative.
        scale: common scale of adjacent figures.
        alone: True for a tensor without a reference.
    """
    ends = map.ends
    numbers = f"from {number(ends[0])} to {number(ends[1])}" if ends else "no finite value"
    pooled = _describe_pooling(map, {"mean": "the mean", "min": "the smallest", "max": "the largest"}[pool])
    codes = _describe_codes(map, NONFINITE_ALONE)
    alt = ". ".join(filter(None, [f"{title}, {what}: {_describe_place(map)}, {numbers}", pooled, codes])) + "."
    return _make_figure(name, title, map, scale, "viridis", alt, legend=_make_legend(map, NONFINITE_ALONE))


def make_difference_figure(name: str, title: str, map: Map, scale: PaletteScale | None, worst: str) -> Figure:
    """Return a figure with differences. The brightest cells are the worst.

    Args:
        worst: description of the worst element, for the text alternative; "" if all are equal.
    """
    differ = int(np.count_nonzero((map.numbers > 0) | (map.codes > SAME)))
    cells = int(np.count_nonzero(map.filled))
    found = f"{differ} of {cells} cells differ; {worst}" if differ else "no element differs"
    if any(map.counts[SAME + 1 :]) and map.ends is not None:
        found += f"; worst finite difference {number(map.ends[1])}"
    alt = (
        ". ".join(
            filter(
                None,
                [
                    f"{title}: {_describe_place(map)}. {found}",
                    _describe_pooling(map, "the largest"),
                    _describe_codes(map),
                ],
            )
        )
        + "."
    )
    legend = [(f"#{EQUAL_COLOUR}", "equal"), *_make_legend(map)]
    figure = _make_figure(name, title, map, scale, "inferno", alt, legend=legend)
    at = find_worst_cell(map) if differ else None
    return Figure(**{**vars(figure), "worst": at})


def make_nonfinite_figure(name: str, title: str, map: Map, *, alone: bool) -> Figure:
    """Return a figure with the positions of NaN and infinities."""
    words = NONFINITE_ALONE if alone else NONFINITE
    codes = _describe_codes(map, words) or "every element is finite"
    alt = f"{title}: {_describe_place(map)}. {codes}."
    legend = [(f"#{EQUAL_COLOUR}", "finite"), *_make_legend(map, words)]
    picture = _make_data_url(encode_png(paint_codes(map), "viridis"))
    return Figure(
        name,
        title,
        picture,
        *_count_cells(map),
        alt,
        legend=legend,
        worst=_find_most_severe_cell(map),
        note=_make_mixed_cells_note(map, SAME),
        window=_get_window_bounds(map),
    )


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
    colours: str,
    alt: str,
    *,
    legend: Sequence[tuple[str, str]],
) -> Figure:
    ends = None if scale is None else (number(scale.low), number(scale.high))
    bar = "" if scale is None else _make_data_url(encode_png(np.arange(STEPS, dtype=np.uint8)[np.newaxis], colours))
    picture = _make_data_url(encode_png(paint(map, scale), colours))
    return Figure(
        name,
        title,
        picture,
        *_count_cells(map),
        alt,
        ends,
        bar,
        legend,
        note=_make_mixed_cells_note(map),
        window=_get_window_bounds(map),
    )


def _count_cells(map: Map) -> tuple[int, int]:
    return map.numbers.shape[0], map.numbers.shape[1]


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
