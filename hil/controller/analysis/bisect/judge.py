"""What a program's run says of the layers in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.compare.verdict import OutputComparison, compare_output, outcome_of
from hil.controller.analysis.bisect.result import WAYS, Bisection, Finding
from hil.controller.analysis.layers import Layer
from hil.controller.models.flows import Flow, quanta
from hil.controller.pipeline.case import Case, Workshop
from hil.controller.storage.isolated import IsolatedError
from hil.controller.storage.pictures import check_picture, new_figure, save_figure
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import ImportFailed, UsageError

_TIMEOUT_S = 600.0


def quantum_atols(flow: Flow, path: Path, shop: Workshop, log: Path) -> dict[str, float]:
    """What a flow's ``quanta`` come to for each of a model's outputs: see
    :func:`hil.controller.models.flows.quantum_atol`.

    Args:
        flow: whose ``quanta``.
        path: the model, with its intermediates as outputs.
        shop: its isolated processes.
        log: for what is printed meanwhile.

    Returns:
        Output -> absolute tolerance; an output that nothing quantises has none.

    Raises:
        ImportFailed: the model cannot be read.
    """
    if flow.quanta is None:
        return {}
    arguments = {"path": str(path.absolute())}
    try:
        steps: list[dict[str, Any]] = shop.isolated.call(quanta.find_onnx, arguments, timeout=_TIMEOUT_S, log=log)
    except IsolatedError as error:
        raise ImportFailed(f"cannot read {path.name}: {error.message}", stage="import", detail=error.detail) from error
    return {one["name"]: one["step"] * min(flow.quanta, one["roundings"]) for one in steps}


_BY_CHANCE = "random numbers go into it, so no two runs agree"

# Of all tensors, or tensor name -> its own; None, or a tensor that has none, is the dtype's default.
Atol = float | Mapping[str, float] | None


def finding_of(case: Case, rtol: float | None, atol: Atol, by_chance: Collection[str] = ()) -> Finding:
    """What a case came to, its outputs judged one by one.

    A tolerance that suits a model's outputs may be as large as all that an inner tensor holds: there it cannot fail,
    and the tensor is not judged. Nor is one that differs in every run.

    Args:
        case: ended, compared within the dtypes' default tolerances.
        rtol, atol: the tolerance that is meant.
        by_chance: names of tensors that random numbers go into.
    """
    outcome = case.outcome or Outcome.SKIP
    if case.error is not None or case.result is None or not case.references:
        error = case.error
        return Finding(outcome, case.reason, case.stage if error else "", error.hint if error else "")
    (verdict,) = case.verdicts
    is_judged_already = rtol is None and atol is None and not by_chance
    if is_judged_already or not verdict.outputs:
        return Finding(outcome, case.reason, outputs=verdict.outputs)
    judged: list[OutputComparison] = []
    unjudged: dict[str, str] = {}
    given, wanted = case.result.outputs, case.references[0].outputs
    if given.keys() != wanted.keys():  # the program knows no names: they come in the model's order
        given = dict(zip(wanted, given.values(), strict=True))
    for name, reference in wanted.items():
        if name in by_chance:
            unjudged[name] = _BY_CHANCE
            continue
        own = atol.get(name) if isinstance(atol, Mapping) else atol
        try:
            judged.append(
                compare_output(
                    name,
                    given[name],
                    reference,
                    rtol=rtol,
                    atol=own,
                    noise=case.references[0].noise.get(name),
                    allow_blind=case.options.allow_blind,
                )
            )
        except UsageError as error:
            unjudged[name] = error.message
    return _finding(judged, unjudged)


def within(layer: Layer, whole: Finding) -> Finding:
    """What a layer came to in a run that returned its tensors among others."""
    names = set(layer.outputs)
    outputs = [one for one in whole.outputs if one.name in names]
    unjudged = {name: why for name, why in whole.unjudged.items() if name in names}
    if len(outputs) + len(unjudged) == len(names):
        return _finding(outputs, unjudged)
    if whole.outputs:
        return Finding(Outcome.SKIP, "it takes from a layer that could not be run, or is that layer")
    return Finding(Outcome.SKIP, f"the whole model ended in {whole.outcome.value}: {whole.reason}")


def failed_by_itself(finding: Finding) -> bool:
    """Whether it ended in an error of the model's own: not in a wrong answer, and not for the board."""
    return finding.outcome not in {Outcome.PASS, Outcome.FAIL, Outcome.BLIND, Outcome.SKIP, *BOARD_OUTCOMES}


def without_failed(layers: Sequence[Layer], failed: Collection[str]) -> list[Layer]:
    """The layers that are not among these, and take nothing from them, near or far."""
    lost: set[str] = set()
    rest = []
    for layer in layers:
        if layer.name in failed or not lost.isdisjoint(layer.inputs):
            lost.update(layer.outputs)
        else:
            rest.append(layer)
    return rest


def _finding(judged: Sequence[OutputComparison], unjudged: Mapping[str, str]) -> Finding:
    outcome = outcome_of(judged) if judged else Outcome.SKIP
    wrong = [one for one in judged if not one.passed and one.blind is (outcome is Outcome.BLIND)]
    reason = f"output {wrong[0].name}: {wrong[0].reason}" if wrong else next(iter(unjudged.values()), "")
    return Finding(outcome, reason, outputs=tuple(judged), unjudged=unjudged)


_NAMED = 40  # more layers than this have no room for their names
_NAME_LENGTH = 28
_COLOURS = {"isolated": "#3b6fb6", "cumulative": "#c77d1e"}
_WRONG = "#c33"
# Both can lie in the same place: a ring around a square shows them both.
_STYLES: dict[str, dict[str, Any]] = {
    "isolated": {"marker": "o", "linestyle": "none", "markersize": 8, "markerfacecolor": "none", "zorder": 3},
    "cumulative": {"marker": "s", "linestyle": "-", "markersize": 4, "linewidth": 1},
}
# Answers that are equal have no error that a logarithmic scale could show: they lie this share of it below the rest,
# and those that are wrong beyond any number as far above.
_MARGIN = 0.08


def plot_growth(path: Path, found: Bisection) -> None:
    """Draw each layer's error, isolated and cumulative, in topological order, as PNG, SVG or PDF (by its suffix).

    Above, the largest absolute difference, logarithmic; below, the signal-to-noise ratio in dB. Bands tell the depth.
    Red rings are layers that are wrong, crosses those that could not be run. What is wrong by no number (NaN or
    infinite where it should not be, noise where there is no signal) lies on a line of its own, beyond the worst.

    Raises:
        UsageError: as :func:`hil.controller.storage.pictures.check_picture`.
        StorageError: the file cannot be written.
    """
    check_picture(path)
    count = len(found.layers)
    figure = new_figure(min(max(9.0, 0.32 * count), 30.0), 7.5)
    # $ would begin a formula.
    figure.suptitle(
        f"{Path(found.model).name} on {found.board}\n{found.verdict}".replace("$", r"\$"), fontsize=9, wrap=True
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, found, "max_abs")
    _draw(lower, found, "sqnr_db")
    _name_layers(lower, found)
    save_figure(figure, path)


def _draw(axes: Any, found: Bisection, what: str) -> None:
    """One panel: ``max_abs`` on a logarithmic scale, or ``sqnr_db``."""
    logarithmic = what == "max_abs"
    values = {way: [_value(layer.by(way), what) for layer in found.layers] for way in WAYS}
    finite = [
        value for line in values.values() for value in line if value is not None and _drawable(value, logarithmic)
    ]
    low, high = (min(finite), max(finite)) if finite else (0.1, 1.0) if logarithmic else (0.0, 1.0)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    room = max(high - low, 1.0) * _MARGIN
    best, worst = (low - room, high + room) if logarithmic else (high + room, low - room)
    is_beyond = False
    for way, line in values.items():
        points = [
            (x, _height(value, best, worst, logarithmic=logarithmic))
            for x, value in enumerate(line)
            if value is not None
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            is_beyond |= worst in ys
            axes.plot(xs, ys, color=_COLOURS[way], label=way, **_STYLES[way])
        wrong = [(x, y) for x, y in points if _outcome(found, x, way) is Outcome.FAIL]
        if wrong:
            xs, ys = zip(*wrong, strict=True)
            axes.plot(xs, ys, "o", markersize=12, markerfacecolor="none", markeredgecolor=_WRONG, linestyle="none")
            name = _short(found.layers[wrong[0][0]].name)
            axes.annotate(name, wrong[0], (9, 4), textcoords="offset points", color=_WRONG, fontsize=8)
        for x in range(len(found.layers)):
            if _outcome(found, x, way) not in (None, Outcome.PASS, Outcome.FAIL, Outcome.BLIND, Outcome.SKIP):
                axes.plot(x, best, "x", color=_COLOURS[way], markersize=8, markeredgewidth=2)
    _draw_edge(axes, best, "equal")
    if is_beyond:
        _draw_edge(axes, worst, "off the scale (NaN/Inf)")
    axes.set_ylabel("log10 max |error|" if logarithmic else "SQNR, dB")
    _draw_depths(axes, found)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8)


def _draw_edge(axes: Any, height: float, text: str) -> None:
    """A line for what a scale cannot show."""
    axes.axhline(height, color="#bbb", linewidth=0.8, zorder=0)
    axes.text(0.002, height, text, transform=axes.get_yaxis_transform(), fontsize=7, color="#777", va="bottom")


def _height(value: float, best: float, worst: float, *, logarithmic: bool) -> float:
    """Where a value lies on an axis; NaN stands for an answer that is NaN or infinite."""
    if _drawable(value, logarithmic):
        return math.log10(value) if logarithmic else value
    is_equal = value == (0 if logarithmic else math.inf)
    return best if is_equal else worst


def _draw_depths(axes: Any, found: Bisection) -> None:
    """A band for every second depth."""
    for x, layer in enumerate(found.layers):
        if layer.depth % 2:
            axes.axvspan(x - 0.5, x + 0.5, color="#f1f1f1", linewidth=0, zorder=-1)


def _name_layers(axes: Any, found: Bisection) -> None:
    axes.set_xlim(-0.5, max(len(found.layers), 1) - 0.5)
    if len(found.layers) > _NAMED:
        axes.set_xlabel("layers in topological order (a band is a depth)")
        return
    labels = [f"{_short(layer.name)} ({layer.depth})" for layer in found.layers]
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_xlabel("layer (depth)")


def _short(name: str) -> str:
    """A layer's name, shortened; a dollar sign would begin a formula."""
    text = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    return text.replace("$", r"\$")


def _value(finding: Finding | None, what: str) -> float | None:
    if finding and finding.nonfinite:
        return math.nan
    return getattr(finding, what) if finding else None


def _drawable(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _outcome(found: Bisection, number: int, way: str) -> Outcome | None:
    finding = found.layers[number].by(way)
    return finding.outcome if finding else None
