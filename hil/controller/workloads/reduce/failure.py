"""Failure classes: compare how two cases failed, so that a reduction keeps the same failure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hil.controller.pipeline.case import Case
from hil.core.results import BOARD_OUTCOMES, Outcome, Stage
from hil.errors import UsageError

# Outcomes that a reduction can keep.
_REDUCIBLE = frozenset(
    {
        Outcome.FAIL,
        Outcome.UNSTABLE,
        Outcome.COMPILE_ERROR,
        Outcome.COMPILE_CRASH,
        Outcome.LOAD_ERROR,
        Outcome.RUN_ERROR,
        Outcome.RUN_CRASH,
        Outcome.TIMEOUT,
    }
)
# During a reduction, the SQNR of a wrong output may increase by at most this many dB. A larger increase shows a
# different failure, such as rounding.
_CLOSER_DB = 30.0
_OPERATION = r"['\"]([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)['\"]"
# Parts of messages that depend on the model: names, types and numbers. The names of a compiler's operations are kept.
_VARIABLE = (
    (re.compile(rf"(?:(?<=\boperation )|(?<=\boperation: )|(?<=\bop )){_OPERATION}|{_OPERATION}(?= op\b|\()"), r"\1\2"),
    (re.compile(r"'[^']*'|\"[^\"]*\"|@[\w$.]+|%[\w$.]+"), "_"),
    (re.compile(r"(?:tensor|vtensor|vector|memref)<[^>]*>|\[[^\]]*\]"), "_"),
    (re.compile(r"(?:/[\w.+-]+){2,}"), "_"),
    (re.compile(r"0x[0-9a-fA-F]+|(?<!exit code )\b\d+(?:\.\d+)?"), "N"),
)


@dataclass(frozen=True)
class Failure:
    """Properties of a failure, for the comparison with other failures."""

    outcome: str
    stage: str
    # kind of a difference (values, nonfinite, type), or the error message without names, types and numbers.
    kind: str
    sqnr_db: float | None = None  # lowest SQNR of the wrong outputs; None if undefined
    time_ns: float | None = None  # of an iteration, for a slow model; None for a failure

    def is_same(self, other: Failure, share: float = 1.0) -> bool:
        """Return True if ``other`` is the same failure, in a smaller model.

        Args:
            share: for slow models, the share of the time that the smaller model must take.
        """
        if (self.outcome, self.stage, self.kind) != (other.outcome, other.stage, other.kind):
            return False
        if self.time_ns is not None:
            return other.time_ns is not None and other.time_ns >= share * self.time_ns
        if self.sqnr_db is None or other.sqnr_db is None:
            return self.kind != "values" or self.sqnr_db is other.sqnr_db
        return other.sqnr_db <= self.sqnr_db + _CLOSER_DB


def find_failure(case: Case) -> Failure | None:
    """Return the failure of a case. Return None if the case passed, or if its failure cannot be reduced."""
    outcome = case.outcome
    if outcome not in _REDUCIBLE:
        return None
    if outcome is Outcome.FAIL:
        wrong = [one for one in case.verdicts[0].outputs if not one.passed and not one.blind] if case.verdicts else []
        kinds = {"type" if one.mismatches is None else "nonfinite" if one.nonfinite else "values" for one in wrong}
        kind = next((kind for kind in ("type", "nonfinite", "values") if kind in kinds), "")
        ratios = [one.sqnr_db for one in wrong if one.sqnr_db is not None]
        return Failure(outcome.value, case.stage, kind, min(ratios, default=None))
    # For UNSTABLE, there is no message to compare.
    kind = "" if outcome is Outcome.UNSTABLE else normalise(case.reason)
    return Failure(outcome.value, case.stage, kind)


def measure_slowness(case: Case) -> Failure | None:
    """Return the time of a case as a failure, to reduce a slow model. Return None without a time.

    The time is the shortest iteration on the device, because other load only adds time.
    """
    times = case.result.device_ns if case.result is not None else ()
    if case.error is not None or not times:
        return None
    return Failure("PASS", Stage.RUN.value, "slow", time_ns=float(min(times)))


def normalise(message: str) -> str:
    """Return the first line of an error message without names, types, paths and numbers."""
    text = message.strip().splitlines()[0] if message.strip() else ""
    # A compiler may report several errors. The number of errors depends on the model's size.
    text = text.split("; ", 1)[0]
    for pattern, by in _VARIABLE:
        text = pattern.sub(by, text)
    return text[:300]


def require_failure(case: Case, *, is_slow: bool = False) -> Failure:
    """Return the failure of a case, or its time if the model is slow.

    Raises UsageError if the outcome cannot be reduced, and BoardError if the board failed.
    """
    if case.outcome in BOARD_OUTCOMES and case.error is not None:
        raise case.error
    failure = measure_slowness(case) if is_slow else find_failure(case)
    if failure is None:
        known = ", ".join(sorted(one.value for one in _REDUCIBLE))
        raise UsageError(
            f"cannot reduce {case.name}: {case.outcome.value if case.outcome else 'no outcome'} {case.reason}".rstrip(),
            hint="--slow needs a model that runs, and a board that reports device times"
            if is_slow
            else f"hil reduce needs a model that fails with one of {known}",
        )
    return failure
