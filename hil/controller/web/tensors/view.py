"""Parts of a tensor's page.

Fast parts are computed immediately. Slow parts of large tensors are computed when the page requests them.

A request reads a tensor in chunks, never as a whole. All requests use at most :data:`MAX_BYTES` of memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from hil.compare.values import CHUNK, EXACT_DTYPES, choose_common_kind
from hil.controller.analysis.tensors.elements import has_ulps
from hil.controller.analysis.tensors.judging import Judgement, judge_recorded, judge_within
from hil.controller.analysis.tensors.maps import (
    make_error_map,
    make_nonfinite_map,
    make_ratio_map,
    make_ulp_map,
    make_value_map,
    max_scratch_bytes,
)
from hil.controller.analysis.tensors.overview import Overview, count_elements
from hil.controller.analysis.tensors.planes import Plane, Window
from hil.controller.analysis.tensors.scales import choose_error_scale, choose_limit_scale, choose_value_scale
from hil.controller.analysis.tensors.texts import TextRow, list_text_rows
from hil.controller.analysis.tensors.worst import Element, find_worst_elements, find_worst_in, read_element
from hil.controller.web.files.cached import Results
from hil.controller.web.tensors.drawing.axes import name_axes
from hil.controller.web.tensors.drawing.figures import (
    Figure,
    NumberStyle,
    find_cell,
    find_worst_cell,
    make_difference_figure,
    make_nonfinite_figure,
    make_value_figure,
)
from hil.controller.web.tensors.query import TensorQuery
from hil.controller.web.tensors.tensors import TensorSubject, open_tensor, read_recorded_tolerance, stamp_of
from hil.controller.web.tensors.tiles import TILES, TilePage, TileSource, choose_tile_plane, make_tile_page
from hil.core.file_tensor import FileTensor
from hil.core.results import Tolerance
from hil.core.tensors import get_dtype_name, type_text
from hil.errors import UsageError

T = TypeVar("T")

# Parts with more elements are requested separately by the page.
AT_ONCE = 1 << 20
# Number of concurrent computations: one picture, and one slow result that scans all elements several times. Pictures do
# not wait for slow results. The cache stores results up to _KEPT_BYTES.
_MAKERS = 2
_KEPT_BYTES = 64 << 20
RESULTS = Results(_KEPT_BYTES, 1)
# Maximum memory for the cache and all computations together.
MAX_BYTES = _KEPT_BYTES + _MAKERS * max_scratch_bytes(16)
_WORST = 50
# Maximum bytes of strings to read at a time.
_TEXT_BYTES = 16 << 20
_PICTURES = ("values", "errors", "ulps", "tiles")
# Attempts to open a file that changes in the meantime.
_TRIES = 10
# Strings per page.
TEXTS = 200


@dataclass
class TensorView:
    """Tensor page for one or two open tensors."""

    query: TensorQuery
    subject: TensorSubject
    arrays: Sequence[FileTensor]
    now: str = ""  # part to compute even if it is slow
    # Stamps of the opened files. They are part of the cache key, so that a replaced file does not get old results.
    stamps: tuple[Any, ...] = ()

    @classmethod
    def of(cls, query: TensorQuery, subject: TensorSubject, now: str = "") -> TensorView:
        """Open the tensors of a page. Raises UsageError if a file is unreadable or the slice does not exist."""
        for _ in range(_TRIES):
            stamps = _stamp_tensors(subject)
            arrays = [open_tensor(side, query.dtype) for side in subject.sides]
            if stamps == _stamp_tensors(subject):
                return cls(query, subject, arrays, now, stamps)
        raise UsageError(f"{subject.name} is being written", hint="reload the page later")

    @cached_property
    def types(self) -> list[str]:
        """Dtype and shape of every tensor."""
        return [type_text(get_dtype_name(one.dtype), one.shape) for one in self.arrays]

    @property
    def pair(self) -> tuple[FileTensor, FileTensor] | None:
        """Both tensors, if hil can compare the tensors by element."""
        if len(self.arrays) < 2 or self.apart:
            return None
        return self.arrays[0], self.arrays[1]

    @property
    def apart(self) -> str:
        """Reason why the page shows two tensors without a comparison, or ""."""
        if len(self.arrays) < 2:
            return ""
        a, b = self.arrays
        if a.shape != b.shape:
            return f"shape mismatch: {self.types[0]} and {self.types[1]}"
        if not choose_common_kind(get_dtype_name(a.dtype), get_dtype_name(b.dtype)):
            return f"no common dtype for {self.types[0]} and {self.types[1]}"
        return ""

    @property
    def is_text(self) -> bool:
        """True for strings, which are shown as a table instead of a map."""
        return any(get_dtype_name(one.dtype) == "string" for one in self.arrays)

    @property
    def is_complex(self) -> bool:
        """True for complex numbers, which need a choice of part."""
        return any(one.dtype.kind == "c" for one in self.arrays)

    @property
    def has_ulps(self) -> bool:
        """True if differences can be measured in ULP."""
        return self.pair is not None and has_ulps(self.pair[0].dtype, self.pair[1].dtype)

    @property
    def size(self) -> int:
        """Number of elements in the larger tensor."""
        return max(one.size for one in self.arrays)

    @cached_property
    def plane(self) -> Plane:
        """Visible slice of the first tensor."""
        return self.query.choose_plane(self.arrays[0].shape)

    @cached_property
    def window(self) -> Window:
        """Visible part of the plane."""
        return self.query.choose_window(self.plane)

    def list_places(self) -> list[tuple[Plane, Window]]:
        """Return the plane and window of every tensor.

        A tensor with another shape is shown whole, up to the size limit.
        """
        found = [(self.plane, self.window)]
        for one in self.arrays[1:]:
            if one.shape == self.arrays[0].shape:
                found.append(found[0])
                continue
            whole = TensorQuery().choose_plane(one.shape)
            found.append((whole, whole.whole))
        return found

    def _list_drawn_places(self) -> list[tuple[int, tuple[Plane, Window]]]:
        """Return the index and place of every tensor with elements. With different shapes, one tensor may be empty."""
        return [(at, place) for at, place in enumerate(self.list_places()) if place[0].elements]

    def later(self, part: str) -> bool:
        """Return True if the page must request this part separately."""
        elements = self._count_drawn_elements(part) if part in _PICTURES else self.size
        return elements > AT_ONCE and self.now not in (part, "all") and self._cache_key(part) not in RESULTS

    def _count_drawn_elements(self, part: str) -> int:
        if part in ("errors", "tiles") and self.shows_ratio and not self.is_tolerance_known:
            return self.size  # a default tolerance depends on all elements
        if part == "tiles":
            plane = choose_tile_plane(self.query, self.arrays[0].shape, 0)
            return plane.elements * min(TILES, self.arrays[0].shape[int(self.query.tiles)])
        return self.window.rows * self.window.columns

    @property
    def shows_ratio(self) -> bool:
        """True if the maps of differences show the error divided by the tolerance."""
        return self.query.scale == "tolerance" and self.pair is not None

    @cached_property
    def axes(self) -> tuple[str, str]:
        """Names of the row axis and the column axis. Raises UsageError for an invalid layout."""
        return name_axes(self.plane, self.query.layout)

    def _choose_style(self, arrays: Sequence[FileTensor]) -> NumberStyle:
        is_whole = all(get_dtype_name(one.dtype) in EXACT_DTYPES for one in arrays)
        unit = "rad" if self.is_complex and self.query.part == "phase" else ""
        return NumberStyle(is_whole, unit)

    def _add_axes(self, figure: Figure, place: int = 0) -> Figure:
        same = self.arrays[place].shape == self.arrays[0].shape
        axes = self.axes if same else name_axes(TensorQuery().choose_plane(self.arrays[place].shape))
        return replace(figure, axes=axes)

    def values(self) -> list[Figure]:
        """Return the maps of values, one per tensor."""
        return self._get_cached("values", self._make_value_figures, _sum_bytes)

    def _make_value_figures(self) -> list[Figure]:
        pool, kind = self.query.pool or "mean", self._value_scale
        found = {
            at: make_value_map(self.arrays[at], plane, window, pool=pool, part=self.query.part)
            for at, (plane, window) in self._list_drawn_places()
        }
        shared = None if self.apart else choose_value_scale(list(found.values()), kind)
        alone = len(self.arrays) < 2
        return [
            self._add_axes(
                make_value_figure(
                    f"value-{at}",
                    self.subject.sides[at].title,
                    self.types[at],
                    one,
                    shared or choose_value_scale([one], kind),
                    pool=pool,
                    alone=alone,
                    style=self._choose_style([self.arrays[at]]),
                ),
                at,
            )
            for at, one in found.items()
        ]

    @property
    def _value_scale(self) -> str:
        """Color scale of values. All values of bools are visible on a linear scale."""
        return "linear" if all(one.dtype.kind == "b" for one in self.arrays) else self.query.scale or "automatic"

    def errors(self) -> list[Figure]:
        """Return the map of differences and the map of NaN and infinities."""
        # As in `worst`, compute the tolerance outside the slot of the pictures.
        tolerance = self.tolerance if self.shows_ratio else None
        return self._get_cached("errors", lambda: self._make_error_figures(tolerance), _sum_bytes)

    def _make_error_figures(self, tolerance: Tolerance | None) -> list[Figure]:
        if self.pair is None:
            return [
                self._add_axes(
                    make_nonfinite_figure(
                        f"nonfinite-{at}",
                        f"NaN and infinities, {self.subject.sides[at].title}",
                        make_nonfinite_map(self.arrays[at], *place),
                        alone=True,
                    ),
                    at,
                )
                for at, place in self._list_drawn_places()
            ]
        found = make_error_map(*self.pair, self.plane, self.window, part=self.query.part)
        odd = make_nonfinite_figure("nonfinite", "NaN and infinities", found, alone=False)
        title, style, by = "Difference", self._choose_style(self.pair), "abs"
        scale = None if self.shows_ratio else choose_error_scale(found, self.query.scale or "automatic")
        if self.shows_ratio:
            found = make_ratio_map(*self.pair, self.plane, self.window, tolerance)
            title, style, by = "Error ÷ tolerance", NumberStyle(), "ratio"
            scale = choose_limit_scale(found, tolerance)
        worst = self._find_worst(found.get_cell_window(*find_worst_cell(found)), by, tolerance)
        text = "" if worst is None else f"worst: {worst.difference:.6g} at {list(worst.index)}"
        figure = make_difference_figure("difference", title, found, scale, text, style)
        return [self._add_axes(figure), self._add_axes(odd)]

    def tiles(self) -> TilePage | None:
        """Return the small maps of the requested axis, or None without tiles. Raises UsageError for invalid axes."""
        if not self.query.tiles or self.is_text or not self.size:
            return None
        tolerance = self.tolerance if self.shows_ratio and self._tile_values == "difference" else None
        return self._get_cached("tiles", lambda: self._make_tiles(tolerance), lambda found: found.bytes)

    @property
    def _tile_values(self) -> str:
        wanted = self.query.tile_of or "difference"
        if wanted == "second" and self.pair is not None:
            return wanted
        return wanted if wanted == "difference" and self.pair is not None else "first"

    def _make_tiles(self, tolerance: Tolerance | None) -> TilePage:
        if self._tile_values == "difference" and self.pair is not None:
            title = "Error ÷ tolerance" if self.shows_ratio else "Difference"
            style = NumberStyle() if self.shows_ratio else self._choose_style(self.pair)
            return make_tile_page(self.query, TileSource(self.pair, title, self.types[0], style, tolerance))
        at = 1 if self._tile_values == "second" else 0
        style = self._choose_style([self.arrays[at]])
        query = replace(self.query, scale=self._value_scale)
        found = make_tile_page(
            query, TileSource([self.arrays[at]], self.subject.sides[at].title, self.types[at], style)
        )
        return found

    def ulps(self) -> list[Figure]:
        """Return the map of differences in ULP."""
        return self._get_cached("ulps", self._make_ulp_figures, _sum_bytes)

    def _make_ulp_figures(self) -> list[Figure]:
        assert self.pair is not None
        found = make_ulp_map(*self.pair, self.plane, self.window)
        worst = self._find_worst(found.get_cell_window(*find_worst_cell(found)), "ulp")
        text = "" if worst is None else f"worst: {worst.ulp} ULP at {list(worst.index)}"
        scale = choose_error_scale(found, self.query.scale or "automatic")
        return [self._add_axes(make_difference_figure("ulp", "ULP", found, scale, text, NumberStyle(True, "ULP")))]

    def judgement(self) -> Judgement:
        """Compare within the requested tolerance, or by default within the recorded one."""
        return self._get_cached("numbers", self._judge_tensors, lambda _: 10_000)

    def _judge_tensors(self) -> Judgement:
        assert self.pair is not None
        if self.is_text and max(one.dtype.itemsize for one in self.pair) * min(self.size, CHUNK) > _TEXT_BYTES:
            return Judgement(None, "strings exceed the size limit for this page: use hil compare", None)
        rtol, atol = self.query.tolerance
        if rtol is None and atol is None:
            return judge_recorded(self.subject.name, *self.pair, *read_recorded_tolerance(self.subject.recorded))
        return judge_within(self.subject.name, *self.pair, rtol=rtol, atol=atol)

    @property
    def tolerance(self) -> Tolerance | None:
        """Tolerance of the comparison; None is exact. A default tolerance depends on all elements of the reference."""
        if (given := self._get_given_tolerance()) is not None:
            return given
        comparison = self.judgement().comparison
        return None if comparison is None else comparison.tolerance

    def _get_given_tolerance(self) -> Tolerance | None:
        """Return the requested or recorded tolerance, or None if rtol or atol is missing."""
        rtol, atol = self.query.tolerance
        if rtol is None and atol is None:
            rtol, atol = read_recorded_tolerance(self.subject.recorded)
        return None if rtol is None or atol is None else Tolerance(rtol, atol)

    @property
    def is_tolerance_known(self) -> bool:
        """True if the tolerance needs no pass over many elements."""
        given = self._get_given_tolerance() is not None
        return given or self.size <= AT_ONCE or self._cache_key("numbers") in RESULTS

    @property
    def tolerance_now(self) -> Tolerance | None:
        """The tolerance if it is known, otherwise None."""
        return self.tolerance if self.is_tolerance_known else None

    def worst(self) -> list[Element]:
        """Return the worst elements of the whole tensors."""
        assert self.pair is not None
        a, b = self.pair
        # Compute the tolerance first. The computation needs the slot for slow results, so waiting for it inside this
        # slot would be a deadlock.
        tolerance, by = self.tolerance, self.query.by or "excess"
        return self._get_cached(
            "worst", lambda: find_worst_elements(a, b, tolerance, by=by, most=_WORST), lambda found: 2000 * len(found)
        )

    def texts(self) -> list[TextRow]:
        """Return a page of strings in reading order."""
        return list_text_rows(self.arrays if self.pair else self.arrays[:1], self.query.top, TEXTS)

    def charts(self) -> Overview:
        """Return counts over all elements, for the histograms."""
        return self._get_cached("charts", self._make_overview, lambda _: 400_000)

    def _make_overview(self) -> Overview:
        return count_elements(*(self.pair or self.arrays[:1]), part=self.query.part)

    def mark_in(self, figure: Figure) -> tuple[float, float] | None:
        """Return the position of the marked or worst element in a figure, or None if it is not visible."""
        marked = self.query.get_marked(self.arrays[0].shape)
        cell = figure.worst if marked is None else find_cell(figure.window, self.plane, marked)
        return None if cell is None else figure.find_center(cell)

    def find_worst_element(self, part: Window) -> Element | None:
        """Return the worst element in a small part of the plane, or None if all are equal."""
        if self.shows_ratio and self.is_tolerance_known:
            return self._find_worst(part, "ratio", self.tolerance_now)
        return self._find_worst(part, "abs", self.tolerance_now)

    def _find_worst(self, part: Window, by: str, tolerance: Tolerance | None = None) -> Element | None:
        assert self.pair is not None
        index = find_worst_in(*self.pair, self.plane, part, by, tolerance)
        return None if index is None else read_element(*self.pair, index, tolerance)

    def _get_cached(self, part: str, make: Callable[[], T], size: Callable[[T], int]) -> T:
        def make_with_size() -> tuple[T, int]:
            found = make()
            return found, size(found)

        # Tiles of a last axis read the file once per tile.
        slow = part not in _PICTURES or (part == "tiles" and self._count_drawn_elements(part) > AT_ONCE)
        return RESULTS.get(self._cache_key(part), make_with_size, slow=slow)

    def _cache_key(self, part: str) -> tuple[Any, ...]:
        stamps = self.stamps
        dtypes = tuple(get_dtype_name(one.dtype) for one in self.arrays)
        query = self.query
        if part in _PICTURES:
            pool = query.pool if part == "values" else ""
            shown = (query.part, pool, query.scale, query.layout, query.tolerance if self.shows_ratio else ())
            if part == "tiles":
                return (part, stamps, dtypes, query.query(), self._get_given_tolerance())
            return (part, stamps, dtypes, self.plane, self.window, *shown, self._get_given_tolerance())
        if part == "charts":
            return (part, stamps, dtypes, query.part)
        recorded = read_recorded_tolerance(self.subject.recorded)
        order = query.by if part == "worst" else ""
        return (part, stamps, dtypes, self.subject.name, query.rtol, query.atol, recorded, order)


def _stamp_tensors(subject: TensorSubject) -> tuple[Any, ...]:
    return tuple(stamp_of(side.path) for side in subject.sides)


def _sum_bytes(figures: Sequence[Figure]) -> int:
    return sum(one.bytes for one in figures)
