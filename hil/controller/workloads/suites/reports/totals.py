"""What a run's cases come to together: the counts that every report tells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.storage.texts import counted
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports.delegation import summary_words
from hil.controller.workloads.suites.reports.load import SuiteResults
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import EXIT_OK, EXIT_STAGE

WHOLE_MODEL = "whole model"
CONFIRM = "confirm"
EXPECTED = Outcome.XFAIL.value
UNEXPECTED = Outcome.XPASS.value


def is_failing(outcome: str) -> bool:
    """Whether a case that ended so needs somebody's eye; a word of a newer hil does."""
    known = outcome in Outcome.__members__
    return (Outcome(outcome).exit_code if known else EXIT_STAGE) != EXIT_OK


def kind_of(outcome: str) -> str:
    """An outcome's kind: ``pass``, ``fail`` (a wrong answer), ``error``, ``board``, or ``quiet`` (nothing to do)."""
    if outcome == Outcome.PASS.value:
        return "pass"
    if outcome in (Outcome.FAIL.value, Outcome.BLIND.value, UNEXPECTED):
        return "fail"
    if outcome in BOARD_OUTCOMES:
        return "board"
    return "error" if is_failing(outcome) else "quiet"


@dataclass(frozen=True)
class Totals:
    """Counts over a run.

    Attributes:
        outcomes: how many cases ended in each outcome that occurs, in the order of :class:`hil.core.results.Outcome`.
        failing: the cases that need an eye, in the suite's order.
        by_op, by_stage: how many of those there are by operator and by stage, most first.
        run_by_op: how many cases there are of each operator.
        expected: how many failed as expected.
        confirmed: how many mismatches that were run again turned out "always wrong", "flaky", "one bad board".
        retries: how often a case was tried again because the infrastructure failed; of these, ``retried`` cases.
        unjudged: the cases that passed with an output that was allowed to be blind.
        elsewhere: the cases of which a part ran on another device than it was told to.
        delegated: how much of the programs a backend took over, in words; "" where no compiler told.
        agentless: why boards have no agent -> how many cases ran there by command.
    """

    outcomes: Mapping[str, int]
    failing: tuple[CaseRecord, ...]
    by_op: Mapping[str, int]
    by_stage: Mapping[str, int]
    run_by_op: Mapping[str, int]
    expected: int
    confirmed: Mapping[str, int]
    retries: int
    retried: int
    elsewhere: tuple[CaseRecord, ...] = ()
    unjudged: tuple[CaseRecord, ...] = ()
    delegated: str = ""
    agentless: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: SuiteResults) -> Totals:
        """Count a run's cases."""
        records = run.records
        outcomes = Counter(record.outcome for record in records)
        failing = tuple(record for record in records if is_failing(record.outcome))
        retries = [tries for record in records if (tries := sum(one.get("why") != CONFIRM for one in record.attempts))]
        order = [one.value for one in Outcome]
        return cls(
            outcomes={
                key: outcomes[key]
                for key in sorted(outcomes, key=lambda one: order.index(one) if one in order else len(order))
            },
            failing=failing,
            by_op=_counts(record.op or WHOLE_MODEL for record in failing),
            by_stage=_counts(record.stage or "-" for record in failing),
            run_by_op=_counts(record.op or WHOLE_MODEL for record in records),
            expected=outcomes[EXPECTED],
            confirmed=_counts(record.confirmed for record in records if record.confirmed),
            retries=sum(retries),
            retried=len(retries),
            elsewhere=tuple(record for record in records if record.elsewhere),
            unjudged=tuple(record for record in records if _is_unjudged(record)),
            delegated=summary_words(records),
            agentless=_counts(record.agentless for record in records if record.agentless),
        )

    @property
    def words(self) -> list[str]:
        """What is neither a pass nor a failure and must not be hidden, in words; what did not happen is left out.

        The share that was delegated is the last of them.
        """
        said = []
        if self.expected:
            said.append(f"{self.expected} failed as expected")
        if passed := self.outcomes.get(UNEXPECTED):
            said.append(f"{passed} passed against expectation: take {'it' if passed == 1 else 'them'} off the list")
        if self.confirmed:
            told = ", ".join(f"{count} {word}" for word, count in self.confirmed.items())
            said.append(f"mismatches that were run again: {told}")
        if self.retries:
            times = "once" if self.retries == 1 else f"{self.retries} times"
            said.append(f"the infrastructure failed {times}: {counted(self.retried, 'case')} tried again")
        if self.elsewhere:
            first = self.elsewhere[0]
            said.append(f"{counted(len(self.elsewhere), 'case')} ran elsewhere in part: {first.id}: {first.elsewhere}")
        if self.unjudged:
            told = "passed with an output that nobody could judge, as allowed"
            said.append(f"{counted(len(self.unjudged), 'case')} {told}: {self.unjudged[0].id}")
        said += [f"{counted(count, 'case')} ran without an agent: {why}" for why, count in self.agentless.items()]
        if self.delegated:
            said.append(self.delegated)
        return said


def _is_unjudged(record: CaseRecord) -> bool:
    return record.outcome == Outcome.PASS.value and any(output.get("blind") for output in record.outputs)


def number(value: Any) -> float | None:
    """A statistic of a record: None stays None, the texts of inf and nan become numbers."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def worst(outputs: Sequence[Mapping[str, Any]]) -> int | None:
    """The place of the output that a row shows: one that failed, then the one with the least SQNR; None without any."""

    def badness(place: int) -> tuple[bool, float, float]:
        output = outputs[place]
        passed, share, sqnr = (
            output.get("passed"),
            number(output.get("mismatch_share")),
            number(output.get("sqnr_db")),
        )
        if share is None:
            share = 0.0 if passed else 1.0  # shapes differ: nothing agrees
        return not passed, share, -math.inf if sqnr is None or math.isnan(sqnr) else -sqnr

    return max(range(len(outputs)), key=badness, default=None)


def host_seconds(record: CaseRecord) -> float:
    """The host's seconds over all stages."""
    return sum(value for value in record.timings.values() if value)


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0])))
