"""Text generation on the page of a case: a table of positions, and charts of divergence, margin and times."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.records.base import Number, make_record, parse_number
from hil.controller.records.measurements.generation import StoredCacheMap, StoredGeneration, StoredPosition
from hil.core.steps import TokenPlaces
from hil.errors import UsageError

# Maximum table rows.
_MAX_ROWS = 500
# Width and height of a chart in SVG units.
WIDTH, HEIGHT = 1000, 160
_PADDING = 8
# Upper limits for the error levels of a key-value cache, relative to the bound. The last level is unlimited.
_LIMITS = (0.1, 1.0, 10.0)
LEVELS = ("up to 0.1 x the bound", "up to the bound", "up to 10 x the bound", "above, or not finite")


@dataclass(frozen=True)
class PositionRow:
    """Row of the table. ``step`` is the index of the generated token, from 0; None for a position in a prompt."""

    position: int
    step: int | None
    expected: int
    actual: int
    kl: float | None
    margin: float | None
    passed: bool

    @property
    def differs(self) -> bool:
        """Whether the board and the reference have their largest logit at different tokens."""
        return self.expected != self.actual


@dataclass(frozen=True)
class LineChart:
    """Line chart with the size :data:`WIDTH` x :data:`HEIGHT`.

    Attributes:
        line: points of the line, as an SVG point list.
        marks: coordinates (x, y) of wrong positions.
        limit: y coordinate of the bound; None without a bound.
        text: range of the values.
    """

    title: str
    line: str
    marks: Sequence[tuple[float, float]]
    limit: float | None
    text: str


@dataclass(frozen=True)
class CacheCell:
    """Adjacent columns of a row with the same error level.

    Attributes:
        level: index in :data:`LEVELS`; NaN and infinite errors have the last level.
    """

    x: int
    y: int
    width: int
    level: int


@dataclass(frozen=True)
class CacheMap:
    """Errors of the keys or the values of a cache, by layer and position.

    Attributes:
        cells: cells above the lowest level. A row is a layer or multiple adjacent layers.
        text: largest error.
    """

    title: str
    columns: int
    rows: int
    cells: Sequence[CacheCell]
    text: str


@dataclass(frozen=True)
class GenerationView:
    """A text generation with the values for its part of the page."""

    record: StoredGeneration
    rows: Sequence[PositionRow]
    hidden: int  # number of positions that the table omits
    charts: Sequence[LineChart]
    maps: Sequence[CacheMap]
    levels: Sequence[str] = LEVELS


def view_generation(values: Any) -> GenerationView | None:
    """Return the view of a generation from a record, or None if the record has no valid generation."""
    if not isinstance(values, Mapping):
        return None
    try:
        return _build_view(make_record(values, StoredGeneration))
    except (UsageError, OverflowError):  # OverflowError: a stored number is too large to draw
        return None


def _build_view(record: StoredGeneration) -> GenerationView:
    positions = record.positions
    wrong = [one for one in positions if not one.passed or one.expected != one.actual]
    shown = positions if len(positions) <= _MAX_ROWS else wrong[:_MAX_ROWS] or positions[:_MAX_ROWS]
    chosen = TokenPlaces.from_turns(record.prompt_tokens, record.tokens).chosen
    step_of = {position: step for step, position in enumerate(chosen)}
    rows = [_make_row(one, step_of.get(one.position)) for one in shown]
    return GenerationView(record, rows, len(positions) - len(rows), _draw_charts(record), _draw_maps(record.cache))


def _make_row(one: StoredPosition, step: int | None) -> PositionRow:
    numbers = parse_number(one.kl), parse_number(one.margin)
    return PositionRow(one.position, step, one.expected, one.actual, *numbers, one.passed)


def _draw_charts(record: StoredGeneration) -> Sequence[LineChart]:
    positions = record.positions
    wrong = [not one.passed for one in positions]
    places = [one.position for one in positions]
    kl = _draw_line(
        "KL by position, logarithmic", places, [one.kl for one in positions], wrong, record.kl_bound, is_log=True
    )
    margin = _draw_line("Margin of the reference by position", places, [one.margin for one in positions], wrong)
    steps = record.times.step_ns if record.times else []
    times = _draw_line("Time of each step in ms", range(len(steps)), [one / 1e6 for one in steps], [False] * len(steps))
    return [one for one in (kl, margin, times) if one is not None]


def _draw_maps(cache: StoredCacheMap | None) -> list[CacheMap]:
    """Return the error maps of the cached keys and values."""
    if cache is None:
        return []
    rows = {"Keys": [one.keys for one in cache.rows], "Values": [one.values for one in cache.rows]}
    return [one for title, errors in rows.items() if (one := _draw_map(title, cache, errors)) is not None]


def _draw_map(title: str, cache: StoredCacheMap, errors: Sequence[Sequence[Number]]) -> CacheMap | None:
    columns = max(map(len, errors), default=0)
    if not columns:
        return None
    cells = [cell for y, row in enumerate(errors) for cell in _merge_cells(y, row)]
    places = [(_rank_error(one), y, x) for y, row in enumerate(errors) for x, one in enumerate(row)]
    _, y, x = max(places, key=lambda place: (place[0], -place[1], -place[2]))
    worst = parse_number(errors[y][x])
    where = f"in layer {cache.rows[y].layer}, position {x * cache.stride}"
    text = f"largest error {'-' if worst is None else f'{worst:.3g}'} x the bound {where}"
    return CacheMap(f"{title} of the cache", columns, len(errors), cells, text)


def _merge_cells(y: int, row: Sequence[Number]) -> Iterator[CacheCell]:
    x = 0
    for level, same in itertools.groupby(row, lambda error: bisect.bisect_left(_LIMITS, _rank_error(error))):
        width = sum(1 for _ in same)
        if level:
            yield CacheCell(x, y, width, level)
        x += width


def _rank_error(error: Number) -> float:
    """Return an error for comparisons. NaN is larger than any number."""
    number = parse_number(error)
    return math.inf if number is None or math.isnan(number) else number


def _draw_line(
    title: str,
    places: Sequence[int],
    values: Sequence[Number],
    wrong: Sequence[bool],
    bound: Number = None,
    *,
    is_log: bool = False,
) -> LineChart | None:
    """Return a line chart, or None for fewer than two finite values.

    Wrong values that are not finite are at the top.

    Args:
        places: positions or steps of the values on the x axis, in order. A record may lack some positions.
    """

    def scale(value: Number) -> float | None:
        number = parse_number(value)
        if number is None or not math.isfinite(number) or (is_log and number <= 0):
            return None
        return math.log10(number) if is_log else number

    scaled, limit = [scale(value) for value in values], scale(bound)
    known = [one for one in scaled if one is not None]
    if len(known) < 2:
        return None
    low, high = min([*known, *([] if limit is None else [limit])]), max([*known, *([] if limit is None else [limit])])

    def compute_height(value: float | None) -> float:
        share = 1.0 if value is None else (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - _PADDING - share * (HEIGHT - 2 * _PADDING), 1)

    first, span = places[0], max(places[-1] - places[0], 1)
    across = [round((place - first) * WIDTH / span, 1) for place in places]
    points = [f"{x},{compute_height(one)}" for x, one in zip(across, scaled, strict=True) if one is not None]
    marks = [(x, compute_height(one)) for x, one, is_wrong in zip(across, scaled, wrong, strict=True) if is_wrong]
    ends = [10**one if is_log else one for one in (min(known), max(known))]
    text = f"{ends[0]:.3g} to {ends[1]:.3g}" + ("" if limit is None else f", bound {parse_number(bound):.3g}")
    text += f"; x axis {places[0]} to {places[-1]}"
    return LineChart(title, " ".join(points), marks, None if limit is None else compute_height(limit), text)
