"""Files of maps: SVG with title, axes, color scale and legend, and PNG with the same facts as metadata."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hil.controller.analysis.tensors.pictures import EMPTY, encode_png
from hil.controller.storage.runs import make_safe_name
from hil.controller.web.tensors.drawing.figures import SCALE_CELLS, Figure
from hil.controller.web.tensors.tensors import TensorSubject
from hil.controller.web.tensors.tiles import TILE_PIXELS, TilePage
from hil.controller.web.tensors.view import TensorView
from hil.core.text import escape_controls
from hil.errors import UsageError

TYPES = {"svg": "image/svg+xml", "png": "image/png"}
# Margins in pixels around a picture for its axes, and the size of the color scale.
LEFT, BELOW, BAR_WIDTH, BAR_HEIGHT = 36, 30, 240, 10
_LINE, _EDGE, _GAP = 16, 12, 12
_TILE_LINE = 18
# Estimated width of a character, because the width of a text is unknown without the font.
_CHAR_WIDTH = 7
# Maximum characters of the case and of the tensor in a file name.
_NAME_CHARS = 60
# Characters that XML does not allow, in addition to control characters.
_NOT_XML = re.compile("[\ufffe\uffff]")
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1c2126}.title{font-weight:600;font-size:14px}"
    ".mark{font-size:10px}image{image-rendering:pixelated}line{stroke:#59636e}"
)


@dataclass(frozen=True)
class MapFile:
    """File to download."""

    name: str
    type: str
    data: bytes


def make_map_file(shown: TensorView, case: str, figure: str, suffix: str) -> MapFile:
    """Return a map of the current view as a file.

    Args:
        case: name of the case for the file name, or "".
        figure: name of the map, or ``tiles``.
        suffix: ``svg`` or ``png``.

    Raises:
        UsageError: the view has no such map.
    """
    found = find_figures(shown, figure)
    lines = _describe_view(shown, case)
    if isinstance(found, TilePage):
        data = _write_tiles_png(found, lines) if suffix == "png" else _write_tiles_svg(found, lines)
    else:
        data = _write_png(found, lines) if suffix == "png" else _write_svg(found, lines, shown.mark_in(found))
    return MapFile(name_map_file(shown, case, figure, suffix), TYPES[suffix], data)


def name_map_file(shown: TensorView, case: str, figure: str, suffix: str) -> str:
    """Return the file name of a map: case, tensor, map and color scale, in ASCII."""
    parts = (case, shown.subject.name, figure, shown.query.scale or "automatic")
    name = "-".join(make_safe_name(one[:_NAME_CHARS]) for one in parts if one)
    return f"{name.encode('ascii', 'replace').decode().replace('?', '_')}.{suffix}"


def find_figures(shown: TensorView, name: str) -> Figure | TilePage:
    """Return a map by name. Only the part of the page with this map is computed.

    Raises:
        UsageError: the view has no such map.
    """
    tiles = shown.tiles() if name == "tiles" else None
    if tiles is not None:
        return tiles
    if not shown.is_text and shown.plane.elements:
        parts = [("value", shown.values), ("difference", shown.errors), ("nonfinite", shown.errors)]
        if shown.has_ulps:
            parts.append(("ulp", shown.ulps))
        for prefix, make in parts:
            if name.startswith(prefix):
                for one in make():
                    if one.name == name:
                        return one
    raise UsageError(f"map {name[:40]!r} not found for {shown.subject.name}", hint="the tensor page links to its maps")


def _describe_view(shown: TensorView, case: str) -> list[str]:
    """Return the case and the tensor, the types, and the visible part."""
    subject, window, plane = shown.subject, shown.window, shown.plane
    lines = [f"{case}: {subject.name}" if case else subject.name, _describe_sides(subject, shown.types)]
    part = f"rows {window.top} to {window.bottom - 1}, columns {window.left} to {window.right - 1}"
    if not plane.in_reading_order:
        drawn = (plane.row_axis, plane.column_axis)
        places = [":" if axis in drawn else str(at) for axis, at in enumerate(plane.index)]
        part = f"slice [{', '.join(places)}], {part}"
    return [*lines, part]


def _describe_sides(subject: TensorSubject, types: Sequence[str]) -> str:
    sides = [f"{side.title} {kind}" for side, kind in zip(subject.sides, types, strict=True)]
    against = f" of {subject.against}" if subject.against and len(sides) > 1 else ""
    return f"{', '.join(sides)}{against}"


def _write_svg(figure: Figure, lines: Sequence[str], mark: tuple[float, float] | None) -> bytes:
    parts, top = _write_head([f"{lines[0]}: {figure.title}", *lines[1:]])
    x = _EDGE + LEFT
    parts.append(_write_picture(figure, x, top + _LINE))
    if mark is not None:
        circle = f'<circle cx="{x + mark[0]:g}" cy="{top + _LINE + mark[1]:g}" r="9" fill="none"'
        parts += [f'{circle} stroke="#000" stroke-width="4"/>', f'{circle} stroke="#00e05a" stroke-width="2"/>']
    parts += _write_marks(figure, x, top + _LINE)
    top += _LINE + figure.height + BELOW + _GAP
    foot, top = _write_foot(figure.bar, figure.ticks, figure.scale, figure.legend, figure.note, x, top)
    texts = [f"{lines[0]}: {figure.title}", *lines[1:], figure.scale, figure.note, *(text for _, text in figure.legend)]
    return _write_document([*parts, *foot], max(figure.width + x + _EDGE, _estimate_width(texts, x)), top)


def _write_tiles_svg(page: TilePage, lines: Sequence[str]) -> bytes:
    first, last = (page.tiles[0].index, page.tiles[-1].index) if page.tiles else (0, 0)
    which = f"{page.axis}, indices {first} to {last} of {page.total}"
    parts, top = _write_head([f"{lines[0]}: {page.title}", lines[1], which])
    wide, high = _find_tile_size(page)
    columns = max(1, min(len(page.tiles), 720 // (wide + _GAP)))
    for number, tile in enumerate(page.tiles):
        row, column = divmod(number, columns)
        x, y = _EDGE + column * (wide + _GAP), top + row * (high + 2 * _TILE_LINE)
        caption = f"{tile.index}: {tile.caption}"
        most = wide // _CHAR_WIDTH
        parts.append(_write_text(x, y + _LINE - 4, caption if len(caption) <= most else f"{caption[: most - 1]}…"))
        parts.append(_write_picture(tile.figure, x, y + _LINE))
    top += -(-len(page.tiles) // columns) * (high + 2 * _TILE_LINE) + _GAP
    foot, top = _write_foot(page.bar, page.ticks, page.scale, (), "", _EDGE, top)
    texts = [f"{lines[0]}: {page.title}", lines[1], which, page.scale]
    return _write_document([*parts, *foot], max(_EDGE + columns * (wide + _GAP), _estimate_width(texts, _EDGE)), top)


def _estimate_width(texts: Sequence[str], x: int) -> int:
    """Return a width in pixels in which all lines fit that begin at a position."""
    return x + _CHAR_WIDTH * max(map(len, texts), default=0) + 2 * _LINE


def _find_tile_size(page: TilePage) -> tuple[int, int]:
    figures = [one.figure for one in page.tiles]
    return max([TILE_PIXELS, *(one.width for one in figures)]), max([1, *(one.height for one in figures)])


def _write_head(lines: Sequence[str]) -> tuple[list[str], int]:
    """Return the title and the lines below it, and the position of the next line."""
    parts = [_write_text(_EDGE, _EDGE + 10, lines[0], "title")]
    parts += [_write_text(_EDGE, _EDGE + 10 + number * _LINE, line) for number, line in enumerate(lines[1:], 1)]
    return parts, _EDGE + 10 + len(lines) * _LINE


def _write_foot(
    bar: str,
    ticks: Sequence[tuple[float, str]],
    scale: str,
    legend: Sequence[tuple[str, str]],
    note: str,
    x: int,
    top: int,
) -> tuple[list[str], int]:
    """Return the color scale and the legend, and the position below."""
    parts = []
    if ticks:
        size = f'width="{BAR_WIDTH}" height="{BAR_HEIGHT}" preserveAspectRatio="none"'
        parts.append(f'<image x="{x}" y="{top}" {size} href="{bar}"/>')
        for share, text in ticks:
            anchor = "start" if share < 0.05 else "end" if share > 0.95 else "middle"
            parts.append(_write_text(x + share * BAR_WIDTH, top + BAR_HEIGHT + 12, text, "mark", anchor))
        top += BAR_HEIGHT + 2 * _LINE
    if scale:
        parts.append(_write_text(x, top, f"Scale: {scale}"))
        top += _LINE
    for colour, text in legend:
        parts.append(f'<rect x="{x}" y="{top - 9}" width="10" height="10" fill="{colour}" stroke="#59636e"/>')
        parts.append(_write_text(x + _LINE, top, text))
        top += _LINE
    if note:
        parts.append(_write_text(x, top, note))
        top += _LINE
    return parts, top + _EDGE


def _write_picture(figure: Figure, x: float, y: float) -> str:
    size = f'width="{figure.width}" height="{figure.height}" preserveAspectRatio="none"'
    return f'<image x="{x:g}" y="{y:g}" {size} href="{figure.picture}"/>'


def _write_marks(figure: Figure, x: int, y: int) -> list[str]:
    rows, columns = figure.marks
    bottom = y + figure.height
    parts = [_write_text(x, y - 5, f"{rows.label} ↓")] if rows.label else []
    for place, text in rows.marks:
        parts.append(f'<line x1="{x - 4}" x2="{x}" y1="{y + place:g}" y2="{y + place:g}"/>')
        parts.append(_write_text(x - 6, y + place + 3.5, text, "mark", "end"))
    for place, text in columns.marks:
        parts.append(f'<line x1="{x + place:g}" x2="{x + place:g}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_write_text(x + place, bottom + 14, text, "mark", "middle"))
    if columns.label:
        parts.append(_write_text(x, bottom + 28, f"{columns.label} →"))
    return parts


def _write_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    css = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    shown = _NOT_XML.sub("\ufffd", html.escape(escape_controls(text)))
    return f'<text x="{x:g}" y="{y:g}"{css}{at}>{shown}</text>'


def _write_document(parts: Sequence[str], width: int, height: int) -> bytes:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
    body = "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>\n"])
    return body.encode("utf-8", "replace")


def _write_png(figure: Figure, lines: Sequence[str]) -> bytes:
    """Return the map at its size in the page, above its color scale. The facts are text chunks."""
    cells = _enlarge(figure)
    if figure.ticks:
        bar = np.repeat(SCALE_CELLS, BAR_HEIGHT, axis=0)
        cells = _stack([cells, np.full((_GAP, 1), EMPTY, np.uint8), bar])
    ends = f"{figure.ticks[0][1]} to {figure.ticks[-1][1]}" if figure.ticks else ""
    legend = "; ".join(text for _, text in figure.legend)
    texts = {"Title": f"{lines[0]}: {figure.title}", "Description": "\n".join([*lines[1:], figure.alt])}
    return encode_png(cells, figure.palette, {**texts, "Scale": figure.scale, "Range": ends, "Legend": legend})


def _write_tiles_png(page: TilePage, lines: Sequence[str]) -> bytes:
    wide, high = _find_tile_size(page)
    columns = max(1, min(len(page.tiles), 720 // (wide + _GAP)))
    rows = -(-len(page.tiles) // columns)
    cells = np.full((max(1, rows * (high + _GAP)), columns * (wide + _GAP)), EMPTY, np.uint8)
    for number, tile in enumerate(page.tiles):
        row, column = divmod(number, columns)
        found = _enlarge(tile.figure)
        y, x = row * (high + _GAP), column * (wide + _GAP)
        cells[y : y + found.shape[0], x : x + found.shape[1]] = found
    first, last = (page.tiles[0].index, page.tiles[-1].index) if page.tiles else (0, 0)
    ends = f"{page.ticks[0][1]} to {page.ticks[-1][1]}" if page.ticks else ""
    texts = {
        "Title": f"{lines[0]}: {page.title}",
        "Description": f"{lines[1]}\n{page.axis}, indices {first} to {last} of {page.total}",
    }
    palette = page.tiles[0].figure.palette if page.tiles else "viridis"
    return encode_png(cells, palette, {**texts, "Scale": page.scale, "Range": ends})


def _enlarge(figure: Figure) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rows, columns = figure.height // figure.rows, figure.width // figure.columns
    return np.asarray(np.repeat(np.repeat(figure.cells, rows, axis=0), columns, axis=1), np.uint8)


def _stack(
    blocks: Sequence[np.ndarray[tuple[int, int], np.dtype[np.uint8]]],
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    width = max(one.shape[1] for one in blocks)
    padded = [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=EMPTY) for one in blocks]
    return np.concatenate(padded)
