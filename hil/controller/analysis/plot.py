"""Draw the difference between two outputs, for ``hil compare --plot``.

Three panels: a map of |a-b| over the tensor, an error histogram, and actual against reference values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.compare.comparison import OutputComparison
from hil.compare.stats import STATISTICS
from hil.compare.values import CHUNK, choose_common_kind, make_reader
from hil.compare.verdict import decide_outcome
from hil.controller.analysis.tensors import elements
from hil.controller.storage.screen.pictures import make_figure, save_figure
from hil.core.tensors import Array, shape_text, type_text
from hil.errors import UsageError

_MAP_ROWS, _MAP_COLUMNS = 256, 256
_LONG_ROW = 64
_DRAWABLE = 1e300  # largest drawable value, which leaves space for the margin of the axis
_SCATTER_POINTS = 20_000
_DECADES = (-324, 309)  # decades with nonzero float64 magnitudes
_BINS_A_DECADE = 4

Floats = npt.NDArray[np.float64]


class Picture:
    """The data of the panels, collected in one chunked pass. Memory does not grow with tensor size."""

    def __init__(self, actual: Array, reference: Array, worst: int | None) -> None:
        # All dimensions but the last form the rows.
        columns = actual.shape[-1] if actual.ndim else 1
        rows = actual.size // columns if columns else 0
        # Fold a long vector into a square in reading order, because a single row would show only thin lines.
        self.folded = rows == 1 and columns > _LONG_ROW
        if self.folded:
            columns = math.ceil(math.sqrt(columns))
            rows = math.ceil(actual.size / columns)
        self.shown = (rows, columns)  # rows and columns of the tensor; in a smaller map, a cell covers several elements
        # The largest |a-b| in every cell; inf if only one side is NaN or infinite.
        self.cells: Floats = np.full((min(rows, _MAP_ROWS), min(columns, _MAP_COLUMNS)), np.nan)
        # Histogram of |a-b|: quarters of a decade, starting at 1e-324.
        self.errors = np.zeros((_DECADES[1] - _DECADES[0]) * _BINS_A_DECADE, np.int64)
        self.equal = self.nonfinite = 0  # counts: equal elements, and elements NaN or infinite on one side only
        step = max(1, math.ceil(actual.size / _SCATTER_POINTS))
        points: list[tuple[Array, Array]] = []
        read_a, read_b = make_reader(actual), make_reader(reference)
        with np.errstate(all="ignore"):
            for start in range(0, actual.size, CHUNK):
                a, b = (read(start, start + CHUNK) for read in (read_a, read_b))
                difference = elements.compute_difference(a, b)
                self._add_chunk(start, difference)
                places = {
                    *range(-start % step, a.size, step),
                    int(np.where(difference < np.inf, difference, -1).argmax()),
                }
                if worst is not None and start <= worst < start + a.size:
                    places.add(worst - start)
                chosen = sorted(places)
                points.append((_convert_to_reals(a[chosen]), _convert_to_reals(b[chosen])))
        pairs = np.concatenate([np.stack(pair) for pair in points], axis=1) if points else np.empty((2, 0))
        # Finite (actual, reference) pairs: a regular sample, the worst element, and the element with the largest
        # difference in each chunk.
        self.points: Floats = pairs[:, np.isfinite(pairs).all(axis=0)]

    def _add_chunk(self, start: int, difference: Floats) -> None:
        self.equal += int(np.count_nonzero(difference == 0))
        self.nonfinite += int(np.count_nonzero(difference == np.inf))
        finite = difference[(difference > 0) & (difference < np.inf)]
        bins = np.floor((np.log10(finite) - _DECADES[0]) * _BINS_A_DECADE).astype(np.int64)
        self.errors += np.bincount(bins, minlength=self.errors.size)
        row, column = np.divmod(np.arange(start, start + difference.size), self.shown[1])
        row, column = (
            place * cells // total
            for place, cells, total in zip((row, column), self.cells.shape, self.shown, strict=True)
        )
        np.fmax.at(self.cells, (row, column), difference)


def is_drawable(comparison: OutputComparison) -> bool:
    """Return True if the difference can be drawn: both are numeric and have the same shape."""
    kind = choose_common_kind(comparison.dtype, comparison.reference_dtype)
    return comparison.shape == comparison.reference_shape and kind not in ("", "string")


def plot_difference(path: Path, name: str, actual: Array, reference: Array, comparison: OutputComparison) -> None:
    """Draw the difference between an output and the reference, as PNG, SVG or PDF by the path's suffix.

    Raises:
        UsageError: matplotlib is not installed, the shapes differ, or the values are not numeric.
        StorageError: the file cannot be written.
    """
    if not is_drawable(comparison):
        raise UsageError(
            f"cannot draw output {name}: {comparison.reason or 'values are strings'}",
            hint="drawing requires numeric outputs with the same shape",
        )
    figure = make_figure(15, 5.6)
    worst = comparison.worst_index
    flat = None if worst is None else int(np.ravel_multi_index(worst, actual.shape))
    picture = Picture(np.asarray(actual), np.asarray(reference), flat)
    figure.suptitle(_format_title(name, comparison), fontsize=11, family="monospace")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _draw_map(figure, left, picture, actual.shape, flat)
    _draw_errors(middle, picture, comparison)
    _draw_scatter(right, picture, comparison)
    save_figure(figure, path)


def _format_title(name: str, comparison: OutputComparison) -> str:
    mismatches, elements = comparison.mismatches or 0, comparison.elements or 0
    numbers = []
    for one in STATISTICS:
        if (value := getattr(comparison, one.key)) is not None:
            numbers.append(f"{one.title} {value:{'.9f' if one.key == 'cosine' else '.4g'}} {one.unit}".rstrip())
    outcome = decide_outcome([comparison]).value
    wrong = "out of tolerance" if comparison.tolerance else "different"
    share = f"{mismatches} of {elements} {wrong} ({100 * (comparison.mismatch_share or 0):.3g} %)"
    head = "   ".join((outcome, name, type_text(comparison.dtype, comparison.shape), share))
    return f"{head}\n{'   '.join(numbers)}"


def _draw_map(figure: Any, axes: Any, picture: Picture, shape: tuple[int, ...], worst: int | None) -> None:
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    rows, columns = picture.shown
    if not picture.cells.size:
        axes.text(0.5, 0.5, "no elements", ha="center", va="center", transform=axes.transAxes)
        return
    notes = ["grey: equal"]
    if picture.nonfinite:
        notes.append("blue: NaN or infinite on one side only")
    if picture.cells.shape != picture.shown:
        cell = (math.ceil(total / cells) for total, cells in zip(picture.shown, picture.cells.shape, strict=True))
        notes.append(f"each cell shows the maximum of up to {'x'.join(map(str, cell))}")
    axes.set_title("log10 |actual - reference|\n" + ", ".join(notes), fontsize=9)
    with np.errstate(divide="ignore"):
        decades = np.log10(picture.cells)  # -inf if equal: grey, below the scale; inf: blue, above the scale
    finite = decades[np.isfinite(decades)]
    high = float(finite.max(initial=-324.0)) if finite.size else 0.0
    # The scale covers one to eight decades. A single difference gets the brightest colour.
    low = min(max(float(finite.min(initial=high)), high - 8), high - 1)
    shown = np.where(np.isfinite(decades), np.maximum(decades, low), np.where(decades > 0, high + 1, low - 1))
    colours = matplotlib.colormaps["inferno"].with_extremes(under="#e0e0e0", over="#00b4ff", bad="white")
    image = axes.imshow(
        np.ma.masked_where(np.isnan(decades), shown),
        vmin=low,
        vmax=high,
        cmap=colours,
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    figure.colorbar(image, ax=axes, extend="both" if picture.nonfinite else "min", fraction=0.05)
    if worst is not None:
        row, column = divmod(worst, columns)
        green = "#00e05a"
        axes.plot(column, row, "o", markersize=13, markerfacecolor="none", markeredgecolor=green, markeredgewidth=2)
        axes.annotate(
            "worst", (column, row), (9, 7), textcoords="offset points", color=green, weight="bold", fontsize=9
        )
    axes.set_xlabel(f"index modulo {columns}" if picture.folded else f"last dimension ({columns})")
    leading = shape_text(shape[:-1]) if len(shape) > 1 else "none"
    label = f"leading dimension ({leading})" if len(shape) == 2 else f"leading dimensions ({leading}), flattened"
    axes.set_ylabel(f"index // {columns}" if picture.folded else label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_errors(axes: Any, picture: Picture, comparison: OutputComparison) -> None:
    apart = f", {picture.nonfinite} NaN or infinite on one side only" if picture.nonfinite else ""
    axes.set_title(f"absolute difference\n{picture.equal} equal{apart}", fontsize=9)
    axes.set_xlabel("log10 |actual - reference|")
    axes.set_ylabel("elements")
    used = np.flatnonzero(picture.errors)
    if used.size:
        first, last = int(used[0]), int(used[-1]) + 1
        edges = _DECADES[0] + np.arange(first, last) / _BINS_A_DECADE
        axes.bar(edges, picture.errors[first:last], width=1 / _BINS_A_DECADE, align="edge", color="#3b6fb6")
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
        axes.set_xlim(edges[0] - 0.5, edges[-1] + 0.75)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    if comparison.tolerance is not None and comparison.tolerance.atol > 0 and used.size:
        at = math.log10(comparison.tolerance.atol)
        axes.axvline(at, color="#c33", linestyle="--", linewidth=1, label=f"atol {comparison.tolerance.atol:g}")
        axes.set_xlim(min(axes.get_xlim()[0], at - 0.5), max(axes.get_xlim()[1], at + 0.5))
        axes.legend(loc="upper right", fontsize=8)


def _draw_scatter(axes: Any, picture: Picture, comparison: OutputComparison) -> None:
    actual, reference = np.clip(picture.points, -_DRAWABLE, _DRAWABLE)
    sampled = (comparison.elements or 0) > _SCATTER_POINTS
    axes.set_title(f"actual against reference\n{actual.size} {'sampled ' if sampled else ''}pairs", fontsize=9)
    axes.set_xlabel("reference")
    axes.set_ylabel("actual")
    if not actual.size:
        axes.text(0.5, 0.5, "no finite pairs", ha="center", va="center", transform=axes.transAxes)
        return
    low, high = float(min(actual.min(), reference.min())), float(max(actual.max(), reference.max()))
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    span = (low - margin, high + margin)
    axes.plot(span, span, color="#888", linewidth=1, zorder=1)
    size = 6 if actual.size > 500 else 24
    axes.scatter(reference, actual, s=size, alpha=0.5, color="#3b6fb6", linewidths=0, rasterized=True, zorder=2)
    if comparison.worst_values is not None:
        a, b = (_convert_to_reals(np.asarray([value])) for value in comparison.worst_values)
        if np.isfinite(a[0]) and np.isfinite(b[0]):
            b, a = (np.clip(value, -_DRAWABLE, _DRAWABLE) for value in (b, a))
            axes.scatter(b, a, s=90, facecolors="none", edgecolors="#c33", linewidths=1.5, zorder=3, label="worst")
            axes.legend(loc="best", fontsize=8)
    axes.set_xlim(span)
    axes.set_ylim(span)
    axes.set_aspect("equal", adjustable="box")


def _widen_numbers(chunk: Array) -> Array:
    return chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64)


def _convert_to_reals(values: Array) -> Floats:
    """Return one float64 per element: the modulus for complex values."""
    numbers = _widen_numbers(values)
    return np.abs(numbers) if numbers.dtype.kind == "c" else numbers
