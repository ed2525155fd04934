"""Define the measures (:data:`MEASURES`) that criteria can use.

``a`` is the board's output, ``b`` is the reference's output. A row runs along the last axis, or along ``axis=N``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hil.compare.row_sets import BOXES, match_share
from hil.compare.stats import STATISTICS, Statistic, measure
from hil.compare.tolerance import choose_tolerance
from hil.compare.values import CHUNK, EXACT_DTYPES, Floats
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array, get_dtype_name
from hil.errors import UsageError, VacuousTolerance

# Smaller probabilities are raised to this value: a float16 softmax has zeros at values of 1e-9 in float32.
PROBABILITY_FLOOR = 1e-12
# Rows of non-negative values with a sum this close to 1 are probabilities; other rows are logits.
PROBABILITY_SUM_ERROR = 1e-2
# A float output is quantized if it has at least this many distinct values, all on one grid. GRID_ERROR is the allowed
# distance from the grid, in steps.
MIN_GRID_VALUES = 8
GRID_ERROR = 0.02
_TOP = re.compile(r"top([1-9][0-9]{0,8})")


class Pair:
    """Pair of tensors of the same shape and dtype, with cached statistics and float64 values."""

    def __init__(
        self, actual: Tensor, reference: Tensor, tolerance: Tolerance | None, kind: str, stats: Any = None
    ) -> None:
        self.dtype = get_dtype_name(reference.dtype)
        self.tolerance = tolerance
        self._actual, self._reference, self._kind = actual, reference, kind
        self._stats = stats

    @cached_property
    def stats(self) -> Any:
        """Statistics of the pair: an object with the fields of :class:`hil.compare.stats.Stats`."""
        if self._stats is not None:
            return self._stats
        return measure(self._actual, self._reference, self.tolerance, self._kind)

    @cached_property
    def values(self) -> tuple[Floats, Floats]:
        """Both tensors as float64. Raises UsageError for strings and complex numbers."""
        self._check_kind()
        return _widen(np.asarray(self._actual)), _widen(np.asarray(self._reference))

    def iter_rows(self, axis: int = -1) -> Iterator[tuple[Floats, Floats]]:
        """Yield both tensors as float64 matrices, a chunk of rows at a time. Rows run along ``axis``.

        Raises:
            UsageError: the tensors are strings or complex, or the axis does not exist.
        """
        self._check_kind()
        actual, reference = (np.atleast_1d(np.asarray(one)) for one in (self._actual, self._reference))
        if not -actual.ndim <= axis < actual.ndim:
            raise UsageError(f"invalid axis={axis}: the output has {actual.ndim} axes")
        size = actual.shape[axis]
        first, second = (np.moveaxis(one, axis, -1).reshape(-1, size) for one in (actual, reference))
        count = max(CHUNK // max(size, 1), 1)
        for start in range(0, len(first), count):
            yield _widen(first[start : start + count]), _widen(second[start : start + count])

    def _check_kind(self) -> None:
        if self._kind not in ("real", "integer"):
            raise UsageError(f"unsupported for {self.dtype} outputs")


def _widen(values: Array) -> Floats:
    with np.errstate(invalid="ignore"):  # casting a signalling NaN warns
        return values.astype(np.float64)


@dataclass(frozen=True)
class Measure:
    """Measure that a criterion can use, with a name and the function that computes the value."""

    key: str
    meaning: str  # Markdown text
    value: Callable[..., float | None]  # called with a :class:`Pair` and the arguments
    is_higher_better: bool
    best: float
    worst: float
    # argument name -> parser of its text; raises ValueError.
    arguments: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    default: float | None = None  # default bound of a criterion; None if the criterion must specify a bound
    is_positional: bool = True  # True if the measure compares elements with the same index
    # True if the measure compares classes or class probabilities, so that logits may be scaled.
    is_of_classes: bool = False
    is_of_direction: bool = False  # True if the value is independent of scale
    name: str = ""  # name in the guide, if it differs from the key

    def find_axes(self, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the axes along which values are measured together; empty if each element is measured separately."""
        if not self.is_positional:
            return -2, -1
        return (arguments.get("axis", -1),) if "axis" in self.arguments else ()

    @property
    def title(self) -> str:
        """Name followed by its argument names."""
        return (self.name or self.key) + (f"({', '.join(self.arguments)})" if self.arguments else "")


def find_measure(name: str) -> tuple[Measure | None, dict[str, Any]]:
    """Return the measure with this name, and the arguments that the name implies (``top5`` is ``top`` with k = 5)."""
    if top := _TOP.fullmatch(name):
        return _BY_NAME["top"], {"k": int(top[1])}
    return (None if name == "top" else _BY_NAME.get(name)), {}


def measure_names() -> list[str]:
    """Return all measure names, as used in the guide."""
    return [measure.name or measure.key for measure in MEASURES]


def _make_measure(statistic: Statistic) -> Measure:
    lowest, highest = (-1.0, 1.0) if statistic.key == "cosine" else (-math.inf, math.inf)
    higher = statistic.worst is min

    def read_value(pair: Pair) -> float | None:
        found = getattr(pair.stats, statistic.key)
        if found is None and statistic.key == "max_ulp" and pair.dtype in EXACT_DTYPES:
            raise UsageError(f"unsupported for {pair.dtype} outputs")
        return None if found is None else float(found)

    return Measure(
        statistic.key,
        statistic.meaning,
        read_value,
        higher,
        highest if higher else 0.0,
        lowest if higher else math.inf,
        is_of_direction=statistic.key == "cosine",
    )


def _count_mismatches(pair: Pair) -> float:
    return float(pair.stats.mismatches)


def _compute_mismatch_share(pair: Pair) -> float:
    return float(pair.stats.mismatches / max(pair.stats.elements, 1))


def _measure_top(pair: Pair, k: int = 1, axis: int = -1) -> float | None:
    rows = hits = 0
    for actual, reference in pair.iter_rows(axis):
        if actual.shape[1] <= k:
            raise VacuousTolerance(
                f"top{k} cannot fail: a row has {actual.shape[1]} value{'s' * (actual.shape[1] != 1)}",
                hint="use a smaller k, or axis=N for the axis of the classes",
            )
        actual, reference = (np.where(np.isnan(one), -np.inf, one) for one in (actual, reference))
        best = reference == reference.max(axis=1, keepdims=True)
        # If several values share the reference's maximum, each of them counts as a hit. On the board, a wrong value
        # that equals the hit ranks before the hit.
        chosen = np.where(best, actual, -np.inf).max(axis=1, keepdims=True)
        ahead = np.count_nonzero((actual >= chosen) & ~best, axis=1)
        hits += int(np.count_nonzero(ahead < k))
        rows += len(ahead)
    return hits / rows if rows else None


def _measure_kl(pair: Pair, axis: int = -1) -> float | None:
    def iter_comparable() -> Iterator[tuple[Floats, Floats]]:
        for actual, reference in pair.iter_rows(axis):
            fine = ~(np.isnan(reference) | np.isposinf(reference)).any(axis=1)
            if fine.any():
                yield actual[fine], reference[fine]

    probabilities, scaled = True, False
    with np.errstate(all="ignore"):
        for actual, reference in iter_comparable():
            probabilities = bool((reference >= 0).all()) and _add_up_to_1(reference)
            if not probabilities:
                break
            scaled = scaled or not _add_up_to_1(actual)
        if probabilities and scaled:
            return math.inf  # not probabilities: scaled, or incomplete
        found = [_find_largest_divergence(*one, probabilities=probabilities) for one in iter_comparable()]
    # np.max propagates NaN.
    return float(np.max(found)) if found else None


def _add_up_to_1(rows: Floats) -> bool:
    return bool((np.abs(rows.sum(axis=1) - 1) <= PROBABILITY_SUM_ERROR).all())


def _find_largest_divergence(actual: Floats, reference: Floats, *, probabilities: bool) -> Any:
    p, q = (_log_probabilities(one, probabilities) for one in (reference, actual))
    terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
    return np.maximum(terms.sum(axis=1).max(), 0.0)


def _log_probabilities(rows: Floats, probabilities: bool) -> Floats:
    if probabilities:
        floored = np.maximum(rows, PROBABILITY_FLOOR)
        logarithms: Floats = np.log(floored / floored.sum(axis=1, keepdims=True))
        return logarithms
    shifted = rows - rows.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logarithms


def _measure_psnr_db(pair: Pair, peak: float | None = None) -> float | None:
    actual, reference = pair.values
    fine = np.isfinite(actual) & np.isfinite(reference)
    if not fine.any():
        return None
    error = float(np.mean((actual[fine] - reference[fine]) ** 2))
    kept = reference[fine]
    largest = peak or float(np.ptp(kept)) or float(np.abs(kept).max())
    if not error:
        return math.inf
    return 20 * math.log10(largest) - 10 * math.log10(error) if largest else -math.inf


def _measure_lsb(pair: Pair, step: float | None = None) -> float | None:
    actual, reference = pair.values
    if pair.dtype in EXACT_DTYPES and step is None:
        return float(pair.stats.max_abs)
    fine = np.isfinite(actual) & np.isfinite(reference)
    step = step or _find_grid_step(reference[fine])
    return float((np.abs(actual - reference)[fine] / step).max(initial=0.0))


def _find_grid_step(values: Floats) -> float:
    """Return the grid step of the values. Raises UsageError without a grid or without enough values."""
    distinct = np.unique(values)
    if distinct.size >= MIN_GRID_VALUES:
        step = float(np.diff(distinct).min())
        places = (distinct - distinct[0]) / step
        if float(np.abs(places - np.round(places)).max()) <= GRID_ERROR:
            return step
    raise UsageError(
        "unknown quantization step: the reference's values have no common step", hint="set the step: lsb(step=0.05)<=1"
    )


def _set(pair: Pair, **arguments: Any) -> float:
    rtol, atol = arguments.pop("rtol", None), arguments.pop("atol", None)
    given = choose_tolerance(pair.dtype, rtol, atol) if (rtol, atol) != (None, None) else pair.tolerance
    return match_share(*pair.values, given or Tolerance(0.0, 0.0), **arguments)


def _number(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError("expected a number above 0")
    return number


def _parse_not_negative(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError("expected a number of 0 or more")
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError("expected a number above 0, at most 1")
    return share


def _parse_box(text: str) -> str:
    if text not in BOXES:
        raise ValueError(f"expected {' or '.join(BOXES)}")
    return text


_AXIS: dict[str, Callable[[str], Any]] = {"axis": int}
MEASURES = (
    *map(_make_measure, STATISTICS),
    Measure("mismatches", "elements out of tolerance", _count_mismatches, False, 0.0, math.inf),
    Measure("mismatch_share", "share of elements out of tolerance, 0 to 1", _compute_mismatch_share, False, 0.0, 1.0),
    Measure(
        "top",
        "share of rows in which the reference's largest value is among the K largest on the board. If a wrong value on "
        "the board equals the right one, the wrong value ranks first. If several values share the reference's maximum, "
        "each of them is right",
        _measure_top,
        True,
        1.0,
        0.0,
        _AXIS,
        is_of_classes=True,
        name="topK",
    ),
    Measure(
        "argmax",
        "the same share as `top1`. Without a bound, every row must match",
        _measure_top,
        True,
        1.0,
        0.0,
        _AXIS,
        default=1.0,
        is_of_classes=True,
    ),
    Measure(
        "kl",
        "largest Kullback-Leibler divergence of a row, in nats. If every row of the reference adds up to 1, the values "
        "are probabilities. Otherwise hil applies softmax first",
        _measure_kl,
        False,
        0.0,
        math.inf,
        _AXIS,
        is_of_classes=True,
    ),
    Measure(
        "psnr_db",
        "`10 log10(peak^2 / mean((a - b)^2))`; the peak is the range of the reference's values",
        _measure_psnr_db,
        True,
        math.inf,
        -math.inf,
        {"peak": _number},
    ),
    Measure(
        "lsb",
        "largest `abs(a - b)` in steps of size `step`. The default is 1 for integers, and the step of the reference's "
        "quantization grid for floats",
        _measure_lsb,
        False,
        0.0,
        math.inf,
        {"step": _number},
    ),
    Measure(
        "set",
        "share of rows that match a row of the reference in any order, within the tolerance. With `iou`, the four "
        "columns that start at column `at` are a box (`xyxy` or `cxcywh`), and the boxes must overlap by at least "
        "`iou`. Without a bound, every row must match",
        _set,
        True,
        1.0,
        0.0,
        {"iou": _share, "box": _parse_box, "at": int, "rtol": _parse_not_negative, "atol": _parse_not_negative},
        default=1.0,
        is_positional=False,
    ),
)
ALIASES = {"ulp": "max_ulp", "sqnr": "sqnr_db", "psnr": "psnr_db"}
_BY_NAME = {measure.key: measure for measure in MEASURES}
_BY_NAME |= {alias: _BY_NAME[key] for alias, key in ALIASES.items()}
