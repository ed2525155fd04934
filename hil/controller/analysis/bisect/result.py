"""Results of a bisection: the verdict from the findings of the layers, as text and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hil.controller.records.decisions.bisect import BisectFinding, BisectFindings, BisectRecord, BisectWay, LayerFinding
from hil.controller.records.outputs import StoredComparison
from hil.controller.storage.screen.pictures import check_picture, make_figure, save_figure
from hil.controller.storage.screen.texts import line, make_table
from hil.core.results import WRONG, Outcome, exit_code_of

if TYPE_CHECKING:
    from rich.console import Console


WAYS: tuple[BisectWay, ...] = ("isolated", "cumulative")
_NAMES_SHOWN = 4
# Possible causes of a wrong output if no isolated layer is wrong. Each program runs only once, so an intermittent board
# fault is also possible.
_TOGETHER = (
    "layers give different results when compiled together, or the board had an intermittent error (repeat to check)"
)
_ANY_CAUSE = f"errors accumulate across layers, {_TOGETHER}"


# Outcomes of a finding with outputs that differ from the reference, or between runs.
_DIFFERS = (Outcome.FAIL, Outcome.UNSTABLE)


def make_finding(
    outcome: Outcome,
    reason: str = "",
    *,
    stage: str = "",
    hint: str = "",
    outputs: Sequence[StoredComparison] = (),
    unjudged: Mapping[str, str] | None = None,
) -> BisectFinding:
    """Return a finding with the worst statistics of its outputs."""
    errors = [float(one.max_abs) for one in outputs if one.max_abs is not None]
    ratios = [float(one.sqnr_db) for one in outputs if one.sqnr_db is not None]
    return BisectFinding(
        outcome=outcome,
        reason=reason,
        stage=stage,
        hint=hint,
        max_abs=max(errors, default=None),
        sqnr_db=min(ratios, default=None),
        unjudged=dict(unjudged or {}),
        outputs=list(outputs),
    )


def find_first_wrong(found: BisectFindings, way: BisectWay) -> LayerFinding | None:
    """Return the first wrong or unstable layer in topological order."""
    return next((layer for layer in found.layers if layer.outcome(way) in _DIFFERS), None)


def find_exit_code(found: BisectFindings) -> int:
    """Return the exit code: 4 board error, 3 layer or model error, 1 wrong output, 0 success, 5 nothing ran."""
    findings = [finding for layer in found.layers for way in WAYS if (finding := layer.get_finding(way))]
    findings += [finding for finding in (found.whole, found.exposed) if finding]
    return exit_code_of(finding.outcome for finding in findings)


def describe_verdict(found: BisectFindings) -> str:
    """Return the conclusion, in a sentence."""
    alone, within = find_first_wrong(found, "isolated"), find_first_wrong(found, "cumulative")
    if alone and within:
        return _describe_both_wrong(alone, within, found.layers)
    if alone:
        return f"first wrong layer: {describe_layer(alone)}, isolated{_describe_whole_model(found, alone)}"
    if within:
        return _describe_cumulative_wrong(found, within)
    if _get_outcome(found.whole) in _DIFFERS:
        causes = _TOGETHER if all(_has_passed(layer.cumulative) for layer in found.layers) else _ANY_CAUSE
        return f"{_describe_none_wrong(found)}, but the unchanged model gives a wrong output: {causes}"
    if failure := next(_iter_errors(found), None):
        what, way, finding = failure
        return f"no output is wrong; {what} ended in {finding.outcome.value}, {way}"
    return _describe_none_wrong(found)


def describe_layer(layer: LayerFinding) -> str:
    """Return a layer's name, operators and nodes."""
    return f"{layer.name} ({layer.op}, node{'' if len(layer.nodes) == 1 else 's'} {join_names(layer.nodes)})"


def join_names(names: Sequence[str]) -> str:
    """Join at most four names to a line. For more names, append the number of remaining names."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMES_SHOWN])} and {more} more"


def _iter_errors(found: BisectFindings) -> Iterator[tuple[str, str, BisectFinding]]:
    """Yield every error as a tuple: the layer or model, the kind of run, and the finding.

    The kind of run is "isolated" or "cumulative" for a layer, "unchanged" or "with intermediate outputs" for the model.
    """
    for way in WAYS:
        for layer in found.layers:
            if (finding := layer.get_finding(way)) and _is_error(finding):
                yield describe_layer(layer), way, finding
    for model, how in ((found.whole, "unchanged"), (found.exposed, "with intermediate outputs")):
        if model and _is_error(model):
            yield "the whole model", how, model


def _describe_whole_model(found: BisectFindings, alone: LayerFinding) -> str:
    """Describe the result of the whole model, for a model with a layer that is wrong only in isolation."""
    if _get_outcome(found.whole) in _DIFFERS:
        return "; the unchanged model also gives a wrong output, but with intermediate outputs no layer is wrong"
    return "; within tolerance in the whole model" if _has_passed(alone.cumulative) else ""


def _describe_cumulative_wrong(found: BisectFindings, layer: LayerFinding) -> str:
    name = describe_layer(layer)
    if not any(_was_compared(one.isolated) for one in found.layers):
        return f"first wrong layer: {name}, cumulative"
    all_right = all(_has_passed(one.isolated) for one in found.layers)
    right = "every isolated layer is correct" if all_right else "the isolated layers that ran are correct"
    return f"{right}; in the whole model the first layer out of tolerance is {name}: {_ANY_CAUSE}"


def _describe_none_wrong(found: BisectFindings) -> str:
    layers = found.layers
    ways = [way for way in WAYS if any(_was_compared(layer.get_finding(way)) for layer in layers)]
    if not ways:
        return "no layer was judged"
    judged = all(_was_compared(layer.get_finding(way)) for layer in layers for way in ways)
    blind = [describe_layer(layer) for layer in layers if any(layer.outcome(way) is Outcome.BLIND for way in WAYS)]
    unjudged = f"; cannot judge {join_names(blind)}" if blind else ""
    return f"no {'' if judged else 'judged '}layer is wrong, {' and '.join(ways)}{unjudged}"


def _describe_both_wrong(alone: LayerFinding, within: LayerFinding, layers: Sequence[LayerFinding]) -> str:
    if alone is within:
        return f"first wrong layer: {describe_layer(alone)}, isolated and cumulative"
    found, other = f"first wrong layer: {describe_layer(alone)}, isolated", describe_layer(within)
    if layers.index(within) < layers.index(alone):
        return f"{found}; but in the whole model {other} is out of tolerance before it: {_ANY_CAUSE}"
    return f"{found}; in the whole model the first layer out of tolerance is {other}"


def _get_outcome(finding: BisectFinding | None) -> Outcome | None:
    return finding.outcome if finding else None


def _has_passed(finding: BisectFinding | None) -> bool:
    return _get_outcome(finding) is Outcome.PASS


def _was_compared(finding: BisectFinding | None) -> bool:
    return _get_outcome(finding) in (Outcome.PASS, *_DIFFERS)


def _is_error(finding: BisectFinding) -> bool:
    return finding.outcome not in {*WRONG, Outcome.PASS, Outcome.SKIP}


_STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "red",
    Outcome.UNSTABLE: "red",
    Outcome.BLIND: "yellow",
    Outcome.SKIP: "dim",
}
_REASONS_SHOWN = 10
# Minimum terminal width for the columns of operators and nodes. Narrower terminals omit them, because a layer's name
# contains both, possibly shortened.
_ROOMY = 110
# Minimum width of a layer's name. If there is not enough space, columns with numbers are dropped first.
_MIN_NAME_WIDTH = 14
_NUMBERS = {"max abs": 8, "SQNR dB": 7}
# Width for output to a file or a pipe, which is not wrapped.
_UNBOUNDED = 1000


def print_bisection(console: Console, found: BisectRecord) -> None:
    """Print the table, the reasons and the verdict."""

    ways = [way for way in WAYS if any(layer.get_finding(way) for layer in found.layers)]
    if not console.is_terminal:
        console.width = _UNBOUNDED
    roomy = console.width >= _ROOMY
    numbers = _select_columns(console.width, found, ways)
    heads = ["depth", "layer", *(["op", "nodes"] if roomy else ())]
    rows = [
        [str(layer.depth), layer.name, *([layer.op, join_names(layer.nodes)] if roomy else ())]
        for layer in found.layers
    ]
    for way in ways:
        heads += [way, *numbers]
        for row, layer in zip(rows, found.layers, strict=True):
            row += _format_cells(layer.get_finding(way))[: 1 + len(numbers)]
    layers = make_table(heads, rows, numbers=("depth", *numbers), whole=ways, gap=1)
    layers.columns[1].min_width = _MIN_NAME_WIDTH
    compiled = f", compiled from {found.artifact_model}" if found.artifact_model != found.model else ""
    flow = f", flow {found.flow}" if found.flow else ""
    head = f"{found.model} on {found.board} by {found.runtime}{flow}{compiled}; against {found.against}"
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    console.print(layers)
    for text in (*_collect_reasons(found), *(f"note: {note}" for note in found.notes)):
        # Runtime messages may have multiple lines.
        console.print(" ".join(text.split()), style="dim", markup=False, highlight=False, soft_wrap=True)
    style = "bold green" if found.exit_code == 0 else "bold red"
    console.print(found.verdict, style=style, markup=False, highlight=False, soft_wrap=True)


def _select_columns(width: int, found: BisectRecord, ways: Sequence[BisectWay]) -> list[str]:
    """Return the number columns that fit next to depth, name and outcomes."""
    outcomes = [
        max(len(way), *(len(one.outcome.value) for layer in found.layers if (one := layer.get_finding(way))))
        for way in ways
    ]
    room = width - len("depth ") - _MIN_NAME_WIDTH - 1 - sum(outcomes) - len(ways)
    numbers = list(_NUMBERS)
    while numbers and len(ways) * sum(_NUMBERS[title] + 1 for title in numbers) > room:
        numbers.pop()
    return numbers


def _format_cells(finding: BisectFinding | None) -> tuple[Any, str, str]:
    from rich.text import Text

    if finding is None:
        return "-", "-", "-"
    outcome = Text(finding.outcome.value, style=_STYLES.get(finding.outcome, "magenta"))
    if _count_nonfinite(finding):  # the other statistics alone would suggest an almost correct output
        return outcome, "NaN/Inf", "-"
    error, ratio = ("-" if value is None else f"{float(value):.3g}" for value in (finding.max_abs, finding.sqnr_db))
    return outcome, error, ratio


def _count_nonfinite(finding: BisectFinding) -> int:
    """Return the number of elements that are NaN or infinite on one side only.

    No other statistic includes these elements.
    """
    return sum(one.nonfinite or 0 for one in finding.outputs)


def _collect_reasons(found: BisectRecord) -> list[str]:
    """Return reasons for the first wrong layers, the whole model, every error, and all tensors without a verdict."""
    reasons = []
    for way in WAYS:
        if (layer := find_first_wrong(found, way)) and (wrong := layer.get_finding(way)):
            reasons.append(f"{layer.name}, {way}: {wrong.reason}")
    if found.whole and found.whole.outcome in WRONG:
        reasons.append(f"unchanged model: {found.whole.reason}")
    alike: dict[str, list[str]] = {}
    for what, how, finding in _iter_errors(found):
        alike.setdefault(f"{how}: {finding.outcome.value}: {finding.reason}", []).append(what)
    for way in WAYS:
        for layer in found.layers:
            if (skipped := layer.get_finding(way)) and skipped.outcome in (Outcome.BLIND, Outcome.SKIP):
                alike.setdefault(f"{way}: not judged: {skipped.reason}", []).append(layer.name)
    reasons += [f"{join_names(names)}, {reason}" for reason, names in alike.items()]
    if len(reasons) > _REASONS_SHOWN:
        reasons = [*reasons[:_REASONS_SHOWN], f"and {len(reasons) - _REASONS_SHOWN} more: see --json"]
    return reasons


_MAX_LISTED = 40  # with more layers, names do not fit
_NAME_LENGTH = 28
_COLOURS = {"isolated": "#3b6fb6", "cumulative": "#c77d1e"}
_WRONG = "#c33"
# Markers may overlap: a ring around a square shows both.
_MARKS: dict[str, dict[str, Any]] = {
    "isolated": {"marker": "o", "linestyle": "none", "markersize": 8, "markerfacecolor": "none", "zorder": 3},
    "cumulative": {"marker": "s", "linestyle": "-", "markersize": 4, "linewidth": 1},
}
# A logarithmic scale cannot show a zero error. Equal outputs are drawn below the other points, at this fraction of the
# range. NaN and infinite errors are drawn above the other points, at the same distance.
_MARGIN = 0.08


def plot_growth(path: Path, found: BisectRecord) -> None:
    """Draw each layer's error, isolated and cumulative, in topological order, as PNG, SVG or PDF (by suffix).

    The upper panel shows the largest absolute difference, logarithmic. The lower panel shows the signal-to-noise
    ratio in dB. Bands mark the depth. Red rings mark wrong layers. Crosses mark layers that ended in an error. Errors
    without a finite value (NaN or infinite on one side only, noise without signal) are drawn on a separate line, beyond
    the worst finite error.

    Raises:
        UsageError: see :func:`hil.controller.storage.screen.pictures.check_picture`.
        StorageError: the file cannot be written.
    """
    check_picture(path)
    count = len(found.layers)
    figure = make_figure(min(max(9.0, 0.32 * count), 30.0), 7.5)
    # Escape the dollar sign, which would start a formula in matplotlib.
    figure.suptitle(
        f"{Path(found.model).name} on {found.board}\n{found.verdict}".replace("$", r"\$"), fontsize=9, wrap=True
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_panel(upper, found, "max_abs")
    _draw_panel(lower, found, "sqnr_db")
    lower.set_xlim(-0.5, max(count, 1) - 0.5)
    if count > _MAX_LISTED:
        lower.set_xlabel("layers in topological order (bands show depth)")
    else:
        labels = [f"{_shorten_name(layer.name)} ({layer.depth})" for layer in found.layers]
        lower.set_xticks(range(count), labels, rotation=60, ha="right", fontsize=8)
        lower.set_xlabel("layer (depth)")
    save_figure(figure, path)


def _draw_panel(axes: Any, found: BisectRecord, what: Literal["max_abs", "sqnr_db"]) -> None:
    """Draw a panel: ``max_abs`` on a logarithmic scale, or ``sqnr_db``."""
    logarithmic = what == "max_abs"
    heights = {way: [_compute_height(layer.get_finding(way), what) for layer in found.layers] for way in WAYS}
    finite = [y for ys in heights.values() for y in ys if y is not None and math.isfinite(y)]
    low, high = (min(finite), max(finite)) if finite else (-1.0, 0.0) if logarithmic else (0.0, 1.0)
    room = max(high - low, 1.0) * _MARGIN
    best, worst = (low - room, high + room) if logarithmic else (high + room, low - room)
    is_beyond = False
    for way, ys in heights.items():
        # An infinite height means equal outputs, NaN an error without a finite value.
        known = {x: y for x, y in enumerate(ys) if y is not None}
        places = {x: y if math.isfinite(y) else worst if math.isnan(y) else best for x, y in known.items()}
        is_beyond |= worst in places.values()
        if places:
            axes.plot(list(places), list(places.values()), color=_COLOURS[way], label=way, **_MARKS[way])
        outcomes = [layer.outcome(way) for layer in found.layers]
        wrong = [(x, y) for x, y in places.items() if outcomes[x] in _DIFFERS]
        if wrong:
            across, up = zip(*wrong, strict=True)
            axes.plot(across, up, "o", markersize=12, markerfacecolor="none", markeredgecolor=_WRONG, linestyle="none")
            name = _shorten_name(found.layers[wrong[0][0]].name)
            axes.annotate(name, wrong[0], (9, 4), textcoords="offset points", color=_WRONG, fontsize=8)
        for x, layer in enumerate(found.layers):
            if (finding := layer.get_finding(way)) and _is_error(finding):
                axes.plot(x, best, "x", color=_COLOURS[way], markersize=8, markeredgewidth=2)
    _draw_edge(axes, best, "equal")
    if is_beyond:
        _draw_edge(axes, worst, "off the scale (NaN/Inf)")
    axes.set_ylabel("log10 max |error|" if logarithmic else "SQNR, dB")
    for x, layer in enumerate(found.layers):
        if layer.depth % 2:
            axes.axvspan(x - 0.5, x + 0.5, color="#f1f1f1", linewidth=0, zorder=-1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8)


def _draw_edge(axes: Any, height: float, text: str) -> None:
    """Draw a labelled line for values that are off the scale."""
    axes.axhline(height, color="#bbb", linewidth=0.8, zorder=0)
    axes.text(0.002, height, text, transform=axes.get_yaxis_transform(), fontsize=7, color="#777", va="bottom")


def _compute_height(finding: BisectFinding | None, what: Literal["max_abs", "sqnr_db"]) -> float | None:
    """Return a finding's height in a panel, or None without a value.

    The height of equal outputs is infinite. NaN means that the value is off the scale.
    """
    if finding is None:
        return None
    if _count_nonfinite(finding):
        return math.nan
    number = finding.max_abs if what == "max_abs" else finding.sqnr_db
    if number is None:
        return None
    value = float(number)
    if what == "sqnr_db":
        return value if value > -math.inf else math.nan
    return math.log10(value) if 0 < value < math.inf else -math.inf if value == 0 else math.nan


def _shorten_name(name: str) -> str:
    """Shorten a layer's name, and escape the dollar sign, which would start a formula."""
    return line(name, _NAME_LENGTH).replace("$", r"\$")
