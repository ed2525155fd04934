"""Two tensors judged within a tolerance, as hil judges an output, where the tolerance is one that somebody tries."""

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
    """What hil says of an output within a tolerance."""

    outcome: Outcome | None  # PASS, FAIL or BLIND; None where hil refuses the tolerance
    reason: str  # why, in a line; "" of a pass
    comparison: OutputComparison | None  # with the statistics; None where there is none with such a tolerance


def judge_within(name: str, a: Tensor, b: Tensor, *, rtol: float | None = None, atol: float | None = None) -> Judgement:
    """Judge one output within a tolerance; what is None of it is the dtype's default.

    A tolerance that hil refuses, because wrong answers would agree as well, is told and not raised; where it can be
    computed with, the statistics are there all the same.
    """
    try:
        found = compare_output(name, a, b, rtol=rtol, atol=atol)
    except VacuousTolerance as error:
        # Any name is allowed to be blind: then nothing is refused, and what is counted is the same.
        found = compare_output(name, a, b, rtol=rtol, atol=atol, allow_blind=["*"])
        return Judgement(None, f"hil refuses this tolerance: {error.message}", found)
    except UsageError as error:
        return Judgement(None, _told(error), None)
    outcome = Outcome.PASS if found.passed else Outcome.BLIND if found.blind else Outcome.FAIL
    return Judgement(outcome, found.reason, found)


def judge_recorded(name: str, a: Tensor, b: Tensor, rtol: float | None, atol: float | None) -> Judgement:
    """Judge an output as its record did: within the dtype's default where that comes to what the record has.

    Args:
        rtol, atol: the record's tolerance. A default that was fitted to noise is in no option; it is then given.
    """
    found = judge_within(name, a, b)
    tolerance = None if found.comparison is None else found.comparison.tolerance
    if rtol is None or atol is None or tolerance is None:
        return found
    same = math.isclose(tolerance.rtol, rtol, rel_tol=1e-9) and math.isclose(tolerance.atol, atol, rel_tol=1e-9)
    return found if same else judge_within(name, a, b, rtol=rtol, atol=atol)


def _told(error: HilError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
