"""Compare two tensors by hil's rules for outputs, with a tolerance that the user selects."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hil.compare.comparison import OutputComparison
from hil.compare.verdict import compare_output
from hil.core.file_tensor import Tensor
from hil.core.results import Outcome
from hil.errors import HilError, UsageError, VacuousTolerance


@dataclass(frozen=True)
class Judgement:
    """The verdict on an output within a tolerance."""

    outcome: Outcome | None  # PASS, FAIL or BLIND; None if hil rejects the tolerance
    reason: str  # a text line; "" for a pass
    comparison: OutputComparison | None  # with the statistics; None if they cannot be computed with this tolerance


def judge_within(name: str, a: Tensor, b: Tensor, *, rtol: float | None = None, atol: float | None = None) -> Judgement:
    """Judge an output within a tolerance; None selects the dtype's default.

    A tolerance that would also accept wrong outputs is reported in the result, not raised. The result contains
    statistics if they can be computed with the tolerance.
    """
    try:
        found = compare_output(name, a, b, rtol=rtol, atol=atol)
    except VacuousTolerance as error:
        # Compare with all names in allow_blind: the tolerance is then accepted, and the statistics are the same.
        found = compare_output(name, a, b, rtol=rtol, atol=atol, allow_blind=["*"])
        return Judgement(None, f"tolerance rejected: {error.message}", found)
    except UsageError as error:
        return Judgement(None, _format_error(error), None)
    outcome = Outcome.PASS if found.passed else Outcome.BLIND if found.blind else Outcome.FAIL
    return Judgement(outcome, found.reason, found)


def judge_recorded(name: str, a: Tensor, b: Tensor, rtol: float | None, atol: float | None) -> Judgement:
    """Judge an output within the record's tolerance. If the dtype's default equals this tolerance, use the default.

    Args:
        rtol, atol: the recorded tolerance. It differs from the default if hil derived it from the noise.
    """
    found = judge_within(name, a, b)
    tolerance = None if found.comparison is None else found.comparison.tolerance
    if rtol is None or atol is None or tolerance is None:
        return found
    same = math.isclose(tolerance.rtol, rtol, rel_tol=1e-9) and math.isclose(tolerance.atol, atol, rel_tol=1e-9)
    return found if same else judge_within(name, a, b, rtol=rtol, atol=atol)


def _format_error(error: HilError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
