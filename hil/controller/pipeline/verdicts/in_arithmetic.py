"""Judge a board with a declared arithmetic by a control: the same model computed in this arithmetic on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hil.compare.verdict import Verdict
from hil.controller.backends.references.control import measure_control
from hil.controller.pipeline.case import Case
from hil.core.arithmetic import FLOAT32
from hil.core.results import RunResult
from hil.errors import ReferenceFailed

_HINT = "set a tolerance (--rtol, --atol), or judge the board as float32: --arithmetic float32"


def get_arithmetic(result: RunResult) -> str:
    """Return the arithmetic that the result's board declares; "" is float32."""
    declared = str(result.provenance.get("arithmetic", ""))
    return "" if declared == FLOAT32 else declared


def drop_other_control(case: Case) -> Case:
    """If the board computes in float32, remove the control that a bundle contains."""
    has_control = any(one.control for one in case.references)
    if case.result is None or get_arithmetic(case.result) or not has_control:
        return case
    return replace(case, references=tuple(replace(one, control={}) for one in case.references))


def needs_control(case: Case) -> bool:
    """Return True if a case needs a control. A tolerance from the user takes precedence."""
    options, model = case.options, case.model
    given = (options.rtol is not None or options.atol is not None) and not options.replace_blind_tolerance
    return (
        case.result is not None
        and bool(get_arithmetic(case.result))
        and not given
        and not (model is not None and model.random)
        and any(map(_may_change, case.verdicts))
    )


def add_control(case: Case, settings: dict[str, Any]) -> Case:
    """Add the control for the board's arithmetic to every reference of a case.

    Args:
        settings: Arguments for :func:`measure_control`.

    Raises:
        ReferenceFailed: the model has no control, or the bundle has a control for another arithmetic.
        StageTimeout: computing the control timed out.
    """
    assert case.result is not None
    arithmetic = get_arithmetic(case.result)
    known = {one.arithmetic for reference in case.references for one in reference.control.values()}
    if known:  # a bundle contains controls
        if known != {arithmetic}:
            raise ReferenceFailed(
                f"arithmetic mismatch: the board computes in {arithmetic}, "
                f"but the bundle has a control in {', '.join(sorted(known))}",
                stage="refer",
                hint=f"create the bundle with --arithmetic {arithmetic}; {_HINT}",
            )
        return case
    if case.model is None or case.inputs is None:
        raise ReferenceFailed(
            f"cannot compute the model in {arithmetic}: model or inputs are missing", stage="refer", hint=_HINT
        )
    try:
        control = measure_control(case.model, case.inputs, arithmetic, **settings)
    except ReferenceFailed as error:
        error.hint = error.hint or _HINT
        raise
    return replace(case, references=tuple(replace(one, control=control) for one in case.references))


def _may_change(verdict: Verdict) -> bool:
    """Return True if an output's values differ or cannot be judged. A wider bound may change such a verdict."""
    return any(
        not (one.passed or one.criteria) and one.elements is not None and one.dtype == one.reference_dtype
        for one in verdict.outputs
    )
