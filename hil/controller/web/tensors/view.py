"""Parts of a tensor's page.

Fast parts are computed immediately. Slow parts of large tensors are computed when the page requests them.

A request reads a tensor in chunks, never as a whole. All requests use at most :data:`MAX_BYTES` of memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from hil.compare.values import CHUNK, choose_common_kind
from hil.controller.analysis.tensors.elements import has_ulps
from hil.controller.analysis.tensors.judging import Judgement, judge_recorded, judge_within
from hil.controller.analysis.tensors.maps import (
    make_error_map,
    make_nonfinite_map,
    make_ulp_map,
    make_value_map,
    max_scratch_bytes,
)
from hil.controller.analysis.tensors.overview import Overview, count_elements
from hil.controller.analysis.tensors.pictures import choose_error_scale, choose_value_scale
from hil.controller.analysis.tensors.planes import Plane, Window
from hil.controller.analysis.tensors.texts import TextRow, list_text_rows
from hil.controller.analysis.tensors.worst import Element, find_worst_elements, find_worst_in, read_element
from hil.controller.web.files.cached import Results
from hil.controller.web.tensors.figures import (
    Figure,
    find_cell,
    find_worst_cell,
    make_difference_figure,
    make_nonfinite_figure,
    make_value_figure,
)
from hil.controller.web.tensors.query import TensorQuery
from hil.controller.web.tensors.tensors import TensorSubject, open_tensor, read_recorded_tolerance, stamp_of
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
_PICTURES = ("values", "errors", "ulps")
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
        drawn = self.window.rows * self.window.columns
        elements = drawn if part in _PICTURES else self.size
        return elements > AT_ONCE and self.now not in (part, "all") and self._cache_key(part) not in RESULTS

    def values(self) -> list[Figure]:
        """Return the maps of values, one per tensor."""
        return self._get_cached("values", self._make_value_figures, _sum_bytes)

    def _make_value_figures(self) -> list[Figure]:
        pool = self.query.pool or "mean"
        found = {
            at: make_value_map(self.arrays[at], plane, window, pool=pool, part=self.query.part)
            for at, (plane, window) in self._list_drawn_places()
        }
        shared = None if self.apart else choose_value_scale(list(found.values()))
        alone = len(self.arrays) < 2
        return [
            make_value_figure(
                f"value-{at}",
                self.subject.sides[at].title,
                self.types[at],
                one,
                shared or choose_value_scale([one]),
                pool=pool,
                alone=alone,
            )
            for at, one in found.items()
        ]

    def errors(self) -> list[Figure]:
        """Return the map of differences and the map of NaN and infinities."""
        return self._get_cached("errors", self._make_error_figures, _sum_bytes)

    def _make_error_figures(self) -> list[Figure]:
        if self.pair is None:
            return [
                make_nonfinite_figure(
                    f"nonfinite-{at}",
                    f"NaN and infinities, {self.subject.sides[at].title}",
                    make_nonfinite_map(self.arrays[at], *place),
                    alone=True,
                )
                for at, place in self._list_drawn_places()
            ]
        found = make_error_map(*self.pair, self.plane, self.window, part=self.query.part)
        worst = self._find_worst(found.get_cell_window(*find_worst_cell(found)), "abs")
        text = "" if worst is None else f"worst: {worst.difference:.6g} at {list(worst.index)}"
        return [
            make_difference_figure("difference", "Difference", found, choose_error_scale(found), text),
            make_nonfinite_figure("nonfinite", "NaN and infinities", found, alone=False),
        ]

    def ulps(self) -> list[Figure]:
        """Return the map of differences in ULP."""
        return self._get_cached("ulps", self._make_ulp_figures, _sum_bytes)

    def _make_ulp_figures(self) -> list[Figure]:
        assert self.pair is not None
        found = make_ulp_map(*self.pair, self.plane, self.window)
        worst = self._find_worst(found.get_cell_window(*find_worst_cell(found)), "ulp")
        text = "" if worst is None else f"worst: {worst.ulp} ULP at {list(worst.index)}"
        return [make_difference_figure("ulp", "ULP", found, choose_error_scale(found), text)]

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
        """Tolerance of the comparison; None is exact."""
        comparison = self.judgement().comparison
        return None if comparison is None else comparison.tolerance

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
        return self._find_worst(part, "abs")

    def _find_worst(self, part: Window, by: str) -> Element | None:
        assert self.pair is not None
        index = find_worst_in(*self.pair, self.plane, part, by)
        return None if index is None else read_element(*self.pair, index, None)

    def _get_cached(self, part: str, make: Callable[[], T], size: Callable[[T], int]) -> T:
        def make_with_size() -> tuple[T, int]:
            found = make()
            return found, size(found)

        return RESULTS.get(self._cache_key(part), make_with_size, slow=part not in _PICTURES)

    def _cache_key(self, part: str) -> tuple[Any, ...]:
        stamps = self.stamps
        dtypes = tuple(get_dtype_name(one.dtype) for one in self.arrays)
        query = self.query
        if part in _PICTURES:
            return (part, stamps, dtypes, self.plane, self.window, query.part, query.pool if part == "values" else "")
        if part == "charts":
            return (part, stamps, dtypes, query.part)
        recorded = read_recorded_tolerance(self.subject.recorded)
        order = query.by if part == "worst" else ""
        return (part, stamps, dtypes, self.subject.name, query.rtol, query.atol, recorded, order)


def _stamp_tensors(subject: TensorSubject) -> tuple[Any, ...]:
    return tuple(stamp_of(side.path) for side in subject.sides)


def _sum_bytes(figures: Sequence[Figure]) -> int:
    return sum(one.bytes for one in figures)
