"""Expected failures: the file ``expected.toml`` in the models' directory lists cases that are known to fail.

::

    [[compile]]                      # the case ends in import or compile
    cases = ["reshape_*"]            # shell patterns of case IDs: a string or a list
    except = ["reshape_plain"]       # patterns of cases that the entry does not cover
    outcome = "COMPILE_CRASH"        # an outcome, or a list of possible ones
    reason = "allowzero kills the compiler"
    issue = "https://example.com/issues/1"
    flow = "iree*"                   # the entry's scope: a pattern or a list; default: all
    runtime = "iree"
    board = "sim*"                   # a board's name or hardware type
    until = 2030-12-31               # the last day on which the entry applies

    [[run]]                          # the case ends in a later stage, or with FAIL
    cases = "resize_cubic"
    outcome = "FAIL"
    reason = "rounds half up"

    [made_with]                      # optional, before the entries: package -> version used to create the list
    onnxruntime = "1.31.1"

If multiple entries match a case, only one applies. ``[[compile]]`` has priority over ``[[run]]``, because a case that
fails to compile cannot run. Later entries have priority over earlier ones. An unexpected pass is XPASS, unless ``PASS``
is among multiple outcomes of the entry (for results that depend on the machine or on chance). A lost board is never
expected.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.store import list_installed
from hil.core import files
from hil.core.config_files import parse_toml
from hil.core.results import Outcome, Stage
from hil.errors import UsageError, did_you_mean

# Tables by priority, with the outcomes that entries of each table may expect. TIMEOUT can occur in both tables. A lost
# board cannot be expected, because it gives no information about the case.
TABLES: Mapping[str, tuple[str, ...]] = {
    "compile": ("IMPORT_ERROR", "COMPILE_ERROR", "COMPILE_CRASH", "TIMEOUT"),
    "run": (
        *("FAIL", "BLIND", "UNSTABLE"),
        *("LOAD_ERROR", "RUN_ERROR", "RUN_CRASH", "TIMEOUT", "FALLBACK", "REFERENCE_ERROR"),
    ),
}
_EARLY = (Stage.IMPORT.value, Stage.COMPILE.value)
_PASS = Outcome.PASS.value
# The table without entries: package -> version that the file was created with.
MADE_WITH = "made_with"
_KEYS = ("cases", "except", "outcome", "reason", "issue", "flow", "runtime", "board", "until")
_FIELDS = {"except": "without", "outcome": "outcomes"}


@dataclass(frozen=True)
class Expectation:
    """An entry of the file."""

    table: str  # ``compile`` or ``run``
    number: int  # position in the table, from 1
    cases: tuple[str, ...]
    # Expected outcomes. They include ``PASS`` if the result depends on the machine or on chance.
    outcomes: tuple[str, ...]
    reason: str
    issue: str = ""
    without: tuple[str, ...] = ()  # patterns of excluded cases (``except`` in the file)
    # flow, runtime, board: patterns that limit the scope; empty for all.
    flow: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    board: tuple[str, ...] = ()
    until: date | None = None  # the last day on which it applies; None for no limit

    def covers(self, case_id: str) -> bool:
        """Return whether the patterns match a case's ID."""
        return matches(self.cases, case_id) and not matches(self.without, case_id)

    def in_scope(self, flow: str, runtime: str, board: str = "", hw_type: str = "") -> bool:
        """Return whether the flow, runtime and board are in scope, regardless of the case's ID."""
        return (
            (not self.flow or matches(self.flow, flow))
            and (not self.runtime or matches(self.runtime, runtime))
            and (not self.board or matches(self.board, board) or matches(self.board, hw_type))
        )

    def applies_to(self, record: CaseRecord) -> bool:
        """Return whether the entry applies to a case with the record's flow, runtime and board."""
        return self.in_scope(record.flow, record.runtime, record.board, record.hw_type) and self.covers(record.id)

    def expects(self, record: CaseRecord) -> bool:
        """Return whether the outcome of a case is one that the entry expects."""
        return record.ended in self.outcomes and (record.ended == _PASS or choose_table(record) == self.table)

    def expired(self, today: date) -> bool:
        """Return whether the entry has expired."""
        return self.until is not None and today > self.until


@dataclass(frozen=True)
class Expectations:
    """The expectations of a file."""

    path: Path | None = None  # the file, which may be missing, or None
    # ``[[compile]]`` entries, then ``[[run]]`` entries, both in the file's order.
    entries: tuple[Expectation, ...] = ()
    today: date = field(default_factory=date.today)  # the date for the entries' expiry
    made_with: Mapping[str, str] = field(default_factory=dict)  # package -> version that the file was created with

    @classmethod
    def load(cls, path: Path | None, *, today: date | None = None) -> Expectations:
        """Read a file. A missing file expects no failures. Raises UsageError if the file is unreadable or invalid."""
        text = read_text(path) if path else ""
        return cls(path, parse(text, path), today or date.today(), parse_toml(text, path).get(MADE_WITH, {}))

    @cached_property
    def _active_entries(self) -> tuple[Expectation, ...]:
        """The entries that have not expired, by priority."""
        live = [entry for entry in reversed(self.entries) if not entry.expired(self.today)]
        return tuple(sorted(live, key=lambda entry: list(TABLES).index(entry.table)))

    def find(self, record: CaseRecord) -> Expectation | None:
        """Return the entry that applies to a case, or None if the case should pass."""
        return next((entry for entry in self._active_entries if entry.applies_to(record)), None)

    def selects(self, case_id: str, flow: str, board: str, runtime: str, hw_type: str = "") -> bool:
        """Return whether a case is expected to fail, so that ``--only-expected-failures`` selects it."""
        return any(one.covers(case_id) and one.in_scope(flow, runtime, board, hw_type) for one in self._active_entries)

    def judge(self, record: CaseRecord) -> CaseRecord:
        """Return the record of a finished case with the expectation applied.

        An expected failure becomes XFAIL, an unexpected pass XPASS. Other failures keep their outcome, even if they
        have an expired entry. The message then contains the expected outcome. If the file was created with other
        versions, the hint of an unexpected result reports them. ``ended`` never changes.
        """
        passed, found = record.ended == _PASS, self.find(record)
        as_expected = found.expects(record) if found else passed
        if not (passed or choose_table(record)) or (passed and as_expected):
            return record
        if found and as_expected:
            return record.replace(outcome=Outcome.XFAIL.value, expectation=_summarize_entry(found))
        judged, hint = record, record.hint
        if found:
            judged = _add_expectation(record, _summarize_entry(found))
        elif old := next((one for one in self.expired() if one.applies_to(record) and one.expects(record)), None):
            judged = _add_expectation(record, {**_summarize_entry(old), "until": str(old.until)})
        if passed:
            judged = judged.replace(outcome=Outcome.XPASS.value)
            hint = hint or "remove the case from the expected failures: run hil suite expect --update on this run"
        return judged.replace(hint="; ".join(filter(None, (hint, self.other_versions))))

    @cached_property
    def other_versions(self) -> str:
        """Text about the versions that the file was created with, or "" if the same versions are installed."""
        here = list_installed(tuple(self.made_with))
        found = [(name, made, here.get(name, "none")) for name, made in self.made_with.items()]
        # Ignore the local part, so that 2.13.0 equals PyTorch's 2.13.0+cpu.
        differ = [one for one in found if one[1].partition("+")[0] != one[2].partition("+")[0]]
        text = ", ".join(f"{name} {made} (here: {now})" for name, made, now in differ)
        return f"the expected failures were recorded with {text}" if text else ""

    def expired(self) -> tuple[Expectation, ...]:
        """Return the entries that have expired."""
        return tuple(entry for entry in self.entries if entry.expired(self.today))

    def list_unused(self, ids: Iterable[str], *, flow: str, runtime: str) -> dict[Expectation, tuple[str, ...]]:
        """Return the entries with patterns that match no case of the suite, and these patterns.

        Args:
            ids: IDs of all cases, including cases that a filter excludes.
            flow, runtime: flow and runtime of the suite's run. Entries for other flows and runtimes are ignored,
                because the cases may differ.
        """
        every = frozenset(ids)

        def is_idle(pattern: str) -> bool:
            return pattern not in every and not (is_wild(pattern) and any(matches((pattern,), one) for one in every))

        mine = [entry for entry in self.entries if replace(entry, board=()).in_scope(flow, runtime)]
        found = {entry: tuple(filter(is_idle, entry.cases)) for entry in mine}
        return {entry: idle for entry, idle in found.items() if idle}

    def list_remarks(self, ids: Iterable[str], *, flow: str, runtime: str) -> list[str]:
        """Return warning lines for :meth:`list_unused`, :meth:`expired` and :attr:`other_versions`."""
        lines = []
        for entry, idle in self.list_unused(ids, flow=flow, runtime=runtime).items():
            some = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            lines.append(f"[[{entry.table}]] entry {entry.number}: no case matches {some}")
        for entry in self.expired():
            lines.append(f"[[{entry.table}]] entry {entry.number}: expired after {entry.until} ({entry.reason})")
        return [f"{self.path}: {line}" for line in (*lines, self.other_versions) if line]


def choose_table(record: CaseRecord) -> str:
    """Return the table for a case's outcome: ``compile``, ``run``, or "" if the outcome cannot be expected."""
    return choose_table_of(record.ended, record.stage)


def choose_table_of(outcome: str, stage: str) -> str:
    """Return the table for an outcome in a stage: see :func:`choose_table`."""
    if outcome == Outcome.TIMEOUT.value:
        return "compile" if stage in _EARLY else "run"
    return next((table for table, words in TABLES.items() if outcome in words), "")


def is_wild(pattern: str) -> bool:
    """Return whether a pattern has wildcards."""
    return any(sign in pattern for sign in "*?[")


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether any shell pattern matches a name. Matching is case-sensitive."""
    names, wild = _compile_patterns(patterns)
    return name in names or (wild is not None and wild.match(name) is not None)


@lru_cache(maxsize=4096)
def _compile_patterns(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Return plain names as a set and patterns as a single regular expression, for speed with hundreds of names."""
    wild = [pattern for pattern in patterns if is_wild(pattern)]
    return frozenset(patterns) - {*wild}, re.compile("|".join(map(fnmatch.translate, wild))) if wild else None


def read_text(path: Path) -> str:
    """Read a file's text; "" if the file does not exist. Raises UsageError for unreadable files."""
    try:
        return files.read_text(path)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def parse(text: str, path: Path | None) -> tuple[Expectation, ...]:
    """Parse the ``[[compile]]`` entries, then the ``[[run]]`` entries. Raises UsageError for an invalid file."""
    data = parse_toml(text, path)
    position = next((number for number, name in enumerate(data) if name == MADE_WITH), 0)
    versions = data.pop(MADE_WITH, {})
    if not isinstance(versions, dict) or not all(isinstance(one, str) for one in versions.values()):
        raise UsageError(f"{path}: [{MADE_WITH}] must map packages to versions", hint='example: onnx = "1.23.2"')
    if versions and position:
        raise UsageError(f"{path}: [{MADE_WITH}] must come before the entries")
    for name in sorted(data.keys() - TABLES.keys()):
        hint = f"{did_you_mean(name, [*TABLES, MADE_WITH])}begin each entry with [[compile]] or [[run]]"
        raise UsageError(f"{path}: unknown table {name!r}", hint=hint)
    entries: list[Expectation] = []
    for table in TABLES:
        rows = data.get(table, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{path}: {table} must be an array of tables", hint=f"begin each entry with [[{table}]]")
        entries += (_parse_entry(f"{path}: [[{table}]] entry {n}", table, n, row) for n, row in enumerate(rows, 1))
    return tuple(entries)


def _parse_entry(where: str, table: str, number: int, row: Mapping[str, Any]) -> Expectation:
    for key in row:
        if key not in _KEYS:
            raise UsageError(
                f"{where}: unknown key {key!r}", hint=f"{did_you_mean(key, _KEYS)}expected one of {', '.join(_KEYS)}"
            )
    for key in ("cases", "outcome", "reason"):
        if key not in row:
            raise UsageError(f"{where}: missing {key!r}", hint="an entry requires cases, outcome and reason")
    values: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("reason", "issue"):
            if not isinstance(value, str) or (key == "reason" and not value.strip()):
                raise UsageError(f"{where}: {key} must be a string, and reason must not be empty")
        elif key == "until":
            if isinstance(value, datetime) or not isinstance(value, date):
                hint = "example: until = 2030-12-31, without quotes"
                raise UsageError(f"{where}: until must be a date", hint=hint)
        else:
            value = _parse_texts(where, key, value)
        values[_FIELDS.get(key, key)] = value
    if {*values["outcomes"]} == {_PASS}:
        raise UsageError(f"{where}: outcome must not be only PASS", hint=f"add one of {', '.join(TABLES[table])}")
    for outcome in values["outcomes"]:
        _check_outcome(where, table, outcome)
    return Expectation(table, number, **values)


def _parse_texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise UsageError(f"{where}: {key} must be a non-empty string or a non-empty list of such strings")
    return tuple(texts)


def _check_outcome(where: str, table: str, outcome: str) -> None:
    if outcome in (*TABLES[table], _PASS):
        return
    allowed = ", ".join(TABLES[table])
    other = next((name for name, outcomes in TABLES.items() if outcome in outcomes), "")
    if other:
        hint = f"move the entry to [[{other}]]; [[{table}]] supports {allowed}"
        raise UsageError(f"{where}: unsupported outcome {outcome} in [[{table}]]", hint=hint)
    if outcome in Outcome.__members__:
        raise UsageError(f"{where}: unsupported outcome {outcome}", hint=f"expected one of {allowed}")
    every = [one for outcomes in TABLES.values() for one in outcomes]
    hint = f"{did_you_mean(outcome.upper(), every)}expected one of {allowed}"
    raise UsageError(f"{where}: unknown outcome {outcome!r}", hint=hint)


def strip_judgement(record: CaseRecord) -> str:
    """Return a judged record's message without the text that :meth:`Expectations.judge` added."""
    if not record.expectation:
        return record.message
    return record.message.removesuffix(_format_expectation(record.expectation)).removesuffix("; ")


def _summarize_entry(entry: Expectation) -> dict[str, str]:
    return {"outcome": " or ".join(entry.outcomes), "reason": entry.reason, "issue": entry.issue}


def _format_expectation(expectation: Mapping[str, str]) -> str:
    until = f" until {expectation['until']}" if "until" in expectation else ""
    return f"{expectation['outcome']} was expected{until} ({expectation['reason']})"


def _add_expectation(record: CaseRecord, expectation: Mapping[str, str]) -> CaseRecord:
    start = f"{record.message}; " if record.message else ""
    return record.replace(message=start + _format_expectation(expectation), expectation=dict(expectation))
