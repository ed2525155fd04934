"""Find the triage entry of a case, and decide whether its failure is known. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any

from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GateVerdict
from hil.controller.records.decisions.triage import HIDDEN, MAX_TRIAGE_CHARS, TRIAGE_STATES, TriageEntry, TriageResult
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.expected import TABLES, choose_table, is_wild, matches, strip_judgement
from hil.core.results import Outcome
from hil.errors import UsageError, did_you_mean

_WILDCARD = re.compile(r"[*?[]")
# Pseudo outcome of a case that is slower.
SLOWER = "SLOWER"
# Outcomes that entries may cover. A lost board gives no information about the case.
OUTCOMES = (*dict.fromkeys(one for outcomes in TABLES.values() for one in outcomes), SLOWER)
# Fields that limit an entry to some cases. Together with the case, they identify the entry.
SCOPE = ("suite", "flow", "board", "runtime")
# Verdicts of a gate about a failure.
_FAILURES = ("broken", "regressed")


@dataclass(frozen=True)
class TriagedCase:
    """What identifies a case across sessions. None matches every entry."""

    case: str
    suite: str | None = ""
    flow: str = ""
    board: str = ""
    runtime: str = ""
    hw_type: str = ""


@dataclass(frozen=True)
class TriageList:
    """Triage entries."""

    entries: tuple[TriageEntry, ...] = ()
    today: date = field(default_factory=date.today)

    @cached_property
    def _by_case(self) -> dict[str, list[TriageEntry]]:
        found: dict[str, list[TriageEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.case, []).append(entry)
        return found

    @cached_property
    def _wild(self) -> dict[str, list[TriageEntry]]:
        """Entries with patterns by the text before the first wildcard, so that few of many patterns are matched."""
        found: dict[str, list[TriageEntry]] = {}
        for entry in self.entries:
            if is_wild(entry.case):
                found.setdefault(_WILDCARD.split(entry.case, maxsplit=1)[0], []).append(entry)
        return found

    def find(self, case: TriagedCase) -> TriageEntry | None:
        """Return the most specific entry for a case; among equals, the one that changed last."""
        candidates = [*self._by_case.get(case.case, ())]
        if self._wild:
            for length in range(len(case.case) + 1):
                candidates += self._wild.get(case.case[:length], ())
        found = [entry for entry in candidates if _covers(entry, case)]
        return max(found, key=measure_precision, default=None)

    def classify(self, case: TriagedCase, outcome: str, table: str = "") -> TriageResult:
        """Return the result for a failing case: a state, ``expired`` or ``other outcome``; "" without an entry.

        Args:
            outcome: outcome of the failure, or :data:`SLOWER`.
            table: ``compile`` or ``run``: when the case failed.
        """
        entry = self.find(case)
        if entry is None:
            return ""
        if entry.outcomes and outcome not in entry.outcomes:
            return "other outcome"
        if outcome == Outcome.TIMEOUT.value and entry.stage and table and entry.stage != table:
            return "other outcome"
        return "expired" if is_expired(entry, self.today) else entry.state

    def judge(self, record: CaseRecord) -> CaseRecord:
        """Return the record of a finished case with its triage.

        A known failure becomes XFAIL. A failure that is marked as fixed, or whose `wontfix` has expired, keeps its
        outcome, and the hint says so. A pass, a lost board and a result of the expected failures do not change.
        """
        table = choose_table(record)
        if not table or record.outcome == Outcome.XFAIL.value:
            return record
        case = TriagedCase(record.id, record.suite, record.flow, record.board, record.runtime, record.hw_type)
        result = self.classify(case, record.ended, table)
        entry = self.find(case)
        if not result or entry is None:
            return record
        if result in HIDDEN:
            reason = entry.note or f"triage: {result}"
            told = {"outcome": record.ended, "reason": reason, "issue": entry.issue}
            # The message may contain a different outcome of the expected failures, which no longer decides.
            message = strip_judgement(record)
            return record.replace(outcome=Outcome.XFAIL.value, message=message, expectation=told, triage=result)
        text = describe_result(entry, result)
        return record.replace(triage=result, hint="; ".join(filter(None, (record.hint, text))))

    def judge_verdict(self, verdict: GateVerdict) -> TriageResult:
        """Return the result for a gate's verdict; "" if the verdict is no failure. Entries match in every suite."""
        if verdict.verdict not in _FAILURES:
            return ""
        key = verdict.key
        case = TriagedCase(key.case, None, key.flow, key.board, key.runtime)
        failed = verdict.new.again or verdict.new.outcome
        return self.classify(case, SLOWER if verdict.verdict == "regressed" else failed)


def make_entry(**values: Any) -> TriageEntry:
    """Return a checked entry. Raises UsageError for an invalid value."""
    texts = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
    for name, value in texts.items():
        if isinstance(value, str) and len(value) > MAX_TRIAGE_CHARS:
            raise UsageError(f"{name} has {len(value)} characters, at most {MAX_TRIAGE_CHARS} are allowed")
    if not texts.get("case"):
        raise UsageError("empty case ID", hint="give the ID of a case, or a pattern")
    state = texts.get("state", "")
    if state not in TRIAGE_STATES:
        hint = f"{did_you_mean(str(state), TRIAGE_STATES)}states: {', '.join(TRIAGE_STATES)}"
        raise UsageError(f"unknown state {state!r}", hint=hint)
    for outcome in texts.get("outcomes", ()):
        if outcome not in OUTCOMES:
            hint = f"{did_you_mean(outcome.upper(), OUTCOMES)}outcomes: {', '.join(OUTCOMES)}"
            raise UsageError(f"unknown outcome {outcome!r}", hint=hint)
    entry = make_record({**texts, "until": texts.get("until") or None}, TriageEntry)
    check_entry(entry)
    return entry


def check_entry(entry: TriageEntry) -> None:
    """Raise UsageError if a last day is missing or invalid, or pages and other programs cannot show a text."""
    if entry.until is not None:
        _check_date(entry.until)
    if (entry.state == "wontfix") != (entry.until is not None):
        text = (
            "wontfix requires a last day" if entry.until is None else f"a last day requires wontfix, got {entry.state}"
        )
        raise UsageError(text, hint="example: state wontfix, until 2030-12-31")
    for name, value in entry.to_json().items():
        try:
            str("".join(value) if isinstance(value, list) else value).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{name} {value!r} is not valid text", hint="use UTF-8; ? in a pattern matches any character"
            ) from error


def _check_date(text: str) -> None:
    """Raise UsageError if a text is not a date in the form YYYY-MM-DD."""
    try:
        is_valid = str(date.fromisoformat(text)) == text  # Python also accepts other forms
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"invalid date {text[:40]!r}", hint="expected YYYY-MM-DD")


def is_expired(entry: TriageEntry, today: date) -> bool:
    """Return True if the last day of a `wontfix` has passed."""
    return entry.state == "wontfix" and entry.until is not None and str(today) > entry.until


def describe_result(entry: TriageEntry, result: TriageResult) -> str:
    """Return why a failure with an entry counts."""
    by = f" ({', '.join(filter(None, (entry.owner, entry.issue)))})" if entry.owner or entry.issue else ""
    if result == "fixed":
        return f"triage: fails again, was marked as fixed{by}"
    if result == "expired":
        return f"triage: wontfix expired after {entry.until}{by}"
    if result == "other outcome":
        return f"triage: {entry.state} as {' or '.join(entry.outcomes)}, but not with this outcome{by}"
    return f"triage: {result}{by}"


def put_entry(entries: Iterable[TriageEntry], entry: TriageEntry) -> list[TriageEntry]:
    """Return the entries with one replaced in place, or added. Entries with the same case and scope are the same."""
    found, key = list(entries), make_entry_key(entry)
    for index, one in enumerate(found):
        if make_entry_key(one) == key:
            found[index] = entry
            return found
    return [*found, entry]


def remove_entry(entries: Iterable[TriageEntry], entry: TriageEntry) -> list[TriageEntry]:
    """Return the entries without the one that has the same case and scope."""
    key = make_entry_key(entry)
    return [one for one in entries if make_entry_key(one) != key]


def find_same(entries: Iterable[TriageEntry], entry: TriageEntry) -> TriageEntry | None:
    """Return the entry with the same case and scope, or None."""
    key = make_entry_key(entry)
    return next((one for one in entries if make_entry_key(one) == key), None)


def make_entry_key(entry: TriageEntry) -> tuple[str, ...]:
    """Return the case and the scope of an entry."""
    return (entry.case, *(getattr(entry, name) for name in SCOPE))


def covers_name(pattern: str, names: Sequence[str]) -> bool:
    """Return True if a pattern of an entry is empty, or matches one of the names."""
    return not pattern or pattern in names or (is_wild(pattern) and any(matches((pattern,), name) for name in names))


def _covers(entry: TriageEntry, case: TriagedCase) -> bool:
    boards = [case.board, case.hw_type]
    return (
        covers_name(entry.case, [case.case])
        and not matches(tuple(entry.excluded), case.case)
        and (case.suite is None or covers_name(entry.suite, [case.suite]))
        and covers_name(entry.flow, [case.flow])
        and covers_name(entry.runtime, [case.runtime])
        and covers_name(entry.board, boards)
    )


def measure_precision(entry: TriageEntry) -> tuple[int, int, int, float]:
    """Return a value that is larger for an entry with fewer cases: exact names, then fields, then longer patterns."""
    texts = make_entry_key(entry)
    exact = sum(bool(text) and not is_wild(text) for text in texts)
    return exact, sum(map(bool, texts)), sum(len(_WILDCARD.sub("", text)) for text in texts), entry.changed
