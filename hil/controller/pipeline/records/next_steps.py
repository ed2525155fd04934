"""Derive hints for outcomes that are not errors from the records of cases and verdicts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hil.compare.tolerance import DEFAULT_TOLERANCES
from hil.controller.records.outputs import StoredComparison, StoredTolerance, StoredVerdict
from hil.controller.records.run import RunCase, StoredRepetition
from hil.core.results import Outcome

_ARITHMETIC_HINT = (
    "most errors are small: find the first wrong layer with hil bisect MODEL; "
    "only if the board computes in float16 or bfloat16, declare it with --arithmetic"
)
_DEFAULT = StoredTolerance(**vars(DEFAULT_TOLERANCES["float32"]))


def make_case_hint(case: RunCase) -> str:
    """Return a hint for a case that did not pass; "" if none is known."""
    outcome = case.outcome
    if case.error:
        return case.error.hint
    if outcome is Outcome.UNSTABLE and case.generation:
        return "check that each prompt starts with an empty cache, and that no state remains from the previous prompt"
    if outcome is Outcome.UNSTABLE and case.repetition:
        return make_unstable_hint(case.repetition)
    decisive = [verdict for verdict in case.verdicts if verdict.outcome is outcome]
    if outcome is Outcome.BLIND and decisive:
        return make_blind_hint(decisive[0])
    failed = [output for verdict in decisive for output in verdict.outputs if not output.passed]
    if outcome is Outcome.FAIL and failed and _may_declare_arithmetic(case) and all(map(_is_rounding_likely, failed)):
        return _ARITHMETIC_HINT
    return ""


def make_blind_hint(verdict: StoredVerdict) -> str:
    """Return a hint for a BLIND verdict."""
    names = [output.name for output in verdict.outputs if not output.passed]
    allow = _repeat_option("--allow-blind", names) or "--allow-blind=OUTPUT"
    return f"try other inputs (such as a different --seed) or criteria (--accept); {allow} accepts the output unjudged"


def _may_declare_arithmetic(case: RunCase) -> bool:
    """Return True if declaring an arithmetic may change the verdict.

    Only ONNX models can have a control. On a board with a known arithmetic, such as an exact simulator, another
    arithmetic would hide a wrong operator.
    """
    is_onnx = case.model is not None and case.model.format == "onnx"
    is_known = case.provenance is not None and case.provenance.arithmetic
    return is_onnx and not is_known and not case.random


def _is_rounding_likely(output: StoredComparison) -> bool:
    """Return True if the errors of a float32 output look like rounding to float16 or bfloat16.

    The function checks the size and the distribution of the errors. It returns False for an output with criteria or a
    tolerance from the user: a declared arithmetic does not change the verdict on such an output.
    """
    if output.dtype != "float32" or output.tolerance != _DEFAULT or output.criteria:
        return False
    found = (output.mismatch_share, output.sqnr_db, output.max_abs, output.rmse)
    share, sqnr, worst, mean = (None if value is None else float(value) for value in found)
    if share is None or sqnr is None or worst is None or mean is None:
        return False
    # Rounding to float16 results in an SQNR of 70 dB, to bfloat16 in 56 dB. Rounding errors are spread evenly, without
    # outliers.
    return share >= 0.5 and 40 <= sqnr <= 85 and worst <= 10 * mean


def make_unstable_hint(repetition: StoredRepetition) -> str:
    """Return the iteration with the first difference, and options to find the cause or to allow it."""
    _, *others = repetition.answers
    where = f"first difference in iteration {others[0].first + 1}; " if others else ""
    allow = _repeat_option("--allow-unstable", repetition.differing)
    allowed = f"; {allow} allows differences within the tolerance" if allow else ""
    return (
        f"{where}use --repeat 5 --fresh-load to check whether a reloaded program also gives different outputs{allowed}"
    )


def _repeat_option(option: str, names: Sequence[str]) -> str:
    # A list of many outputs would fill the screen.
    return " ".join(f"{option}={shlex.quote(name)}" for name in names) if len(names) <= 3 else f"{option}='*'"
