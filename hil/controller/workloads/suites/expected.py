"""Expected failures: which cases are known to fail, how, where and why; a file ``expected.toml`` beside the models.

::

    [[compile]]                      # ends in import or compile
    cases = ["reshape_*"]            # a shell pattern over the cases' ids, or a list of them
    except = ["reshape_plain"]       # what is left out
    outcome = "COMPILE_CRASH"        # a word, or a list of those that it may be
    reason = "allowzero kills the compiler"
    issue = "https://example.com/issues/1"
    flow = "iree*"                   # where it counts: patterns, or lists of them; what is left out is everywhere
    runtime = "iree"
    board = "sim*"                   # a board's name or hardware type
    until = 2030-12-31               # the last day on which it counts

    [[run]]                          # ends in any later stage, FAIL among them
    cases = "resize_cubic"
    outcome = "FAIL"
    reason = "rounds half up"

    [made_with]                      # what the list is for, where that matters: package -> version; before the entries
    onnxruntime = "1.31.1"

Of several entries that match a case one counts: what is not expected to compile is not expected to run, so
``[[compile]]`` goes before ``[[run]]``, and within either the last one goes before the others. It is strict: a case
that passes although it should not is XPASS, but where ``PASS`` is one of several outcomes that it may have: what the
machine decides, or chance. A lost board is never expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from hil.controller.storage.versions import version
from hil.controller.workloads.suites.expected_file import (
    TABLES,
    Expectation,
    Place,
    is_wild,
    made_with,
    matches,
    parse,
    read_text,
    table_of,
)
from hil.controller.workloads.suites.record import CaseRecord
from hil.core.results import Outcome

__all__ = ["Expectation", "Expectations", "message_of"]

_PASS = Outcome.PASS.value


@dataclass(frozen=True)
class _Place:
    id: str
    flow: str
    runtime: str
    board: str = ""
    hw_type: str = ""


@dataclass(frozen=True)
class Expectations:
    """What a file expects.

    Attributes:
        path: the file, there or not; None where there can be none.
        entries: those of ``[[compile]]``, then those of ``[[run]]``, each in the file's order.
        today: the day by which entries expire.
        made_with: package -> the version that the file was made with.
    """

    path: Path | None = None
    entries: tuple[Expectation, ...] = ()
    today: date = field(default_factory=date.today)
    made_with: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None, *, today: date | None = None) -> Expectations:
        """Read a file; none, or one that is not there, expects nothing.

        Raises:
            UsageError: it is no such file; says which entry and what is wrong with it.
        """
        text = read_text(path) if path else ""
        return cls(path, parse(text, path), today or date.today(), made_with(text))

    @cached_property
    def _live(self) -> tuple[Expectation, ...]:
        """What counts today, in the order in which the first that matches does."""
        live = [entry for entry in reversed(self.entries) if not entry.expired(self.today)]
        return tuple(sorted(live, key=lambda entry: list(TABLES).index(entry.table)))

    def find(self, place: Place) -> Expectation | None:
        """The entry that counts for a case where it runs; None where it should pass."""
        return next((entry for entry in self._live if entry.speaks_of(place)), None)

    def selects(self, case_id: str, flow: str, board: str, runtime: str, hw_type: str = "") -> bool:
        """Whether a case is expected to fail there: what ``--only-expected-failures`` runs.

        Args:
            case_id: the case.
            flow, runtime: what it runs in.
            board, hw_type: the board's name and its hardware type.
        """
        return self.find(_Place(case_id, flow, runtime, board, hw_type)) is not None

    def judge(self, record: CaseRecord) -> CaseRecord:
        """The record of a case that has just ended, with what was expected of it.

        What failed as foreseen is XFAIL, and what passed although it should not is XPASS. What failed in another way
        stays what it is, and so does what failed as an entry foresaw whose day is over; the message then tells what
        had been expected. Where the file was made with other versions, the hint to what surprises says so. ``ended``
        stays as it is.
        """
        if record.ended != _PASS and not table_of(record):
            return record
        found = self.find(record)
        if record.ended == _PASS and (found is None or found.foresees(record)):
            return record
        if found is None:
            old = next((one for one in self.expired() if one.speaks_of(record) and one.foresees(record)), None)
            told = _told(record, {**_said(old), "until": str(old.until)}) if old else record
            return self._hinted(told, "")
        if found.foresees(record):
            return replace(record, outcome=Outcome.XFAIL.value, expectation=_said(found))
        told = _told(record, _said(found))
        if record.ended != _PASS:
            return self._hinted(told, "")
        hint = "take it out of the expected failures: hil suite expect --update does, from this run"
        return self._hinted(replace(told, outcome=Outcome.XPASS.value), hint)

    def _hinted(self, record: CaseRecord, hint: str) -> CaseRecord:
        return replace(record, hint="; ".join(filter(None, (record.hint or hint, self.other_versions))))

    @cached_property
    def other_versions(self) -> str:
        """In which versions the file was made, where other ones are installed; else ""."""
        found = [(name, made, _installed(name)) for name, made in self.made_with.items()]
        differ = [one for one in found if _public(one[1]) != _public(one[2])]
        told = ", ".join(f"{name} {made} (here: {here})" for name, made, here in differ)
        return f"the expected failures were listed with {told}" if told else ""

    def expired(self) -> tuple[Expectation, ...]:
        """The entries whose last day is over: they no longer count."""
        return tuple(entry for entry in self.entries if entry.expired(self.today))

    def unused(self, ids: Iterable[str], *, flow: str, runtime: str) -> dict[Expectation, tuple[str, ...]]:
        """What matches no case of a whole suite: entry -> those of its patterns.

        Args:
            ids: of all cases, those that a filter leaves out among them.
            flow, runtime: what the suite runs in. Entries for others are left out: their cases may differ.
        """
        every = dict.fromkeys(ids)
        found = {}
        for entry in self.entries:
            idle = [one for one in entry.cases if one not in every and not (is_wild(one) and _any(one, every))]
            if idle and replace(entry, board=()).in_scope(_Place("", flow, runtime)):
                found[entry] = tuple(idle)
        return found

    def remarks(self, ids: Iterable[str], *, flow: str, runtime: str) -> list[str]:
        """What a person should be warned of, a line each: :meth:`unused`, :meth:`expired`, :attr:`other_versions`."""
        lines = []
        for entry, idle in self.unused(ids, flow=flow, runtime=runtime).items():
            some = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            lines.append(f"{self.path}: [[{entry.table}]] entry {entry.number}: no case is called {some}")
        for entry in self.expired():
            where = f"{self.path}: [[{entry.table}]] entry {entry.number}"
            lines.append(f"{where}: counted until {entry.until}, which is over ({entry.reason})")
        return lines + ([f"{self.path}: {self.other_versions}"] if self.other_versions else [])


def message_of(record: CaseRecord) -> str:
    """A judged record's message without what :meth:`Expectations.judge` added."""
    if not record.expectation:
        return record.message
    return record.message.removesuffix(_note(record.expectation)).removesuffix("; ")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _public(version: str) -> str:
    """PyTorch's builds differ by what is behind a plus: ``2.13.0+cpu``."""
    return version.partition("+")[0]


def _any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches((pattern,), name) for name in names)


def _said(entry: Expectation) -> dict[str, str]:
    return {"outcome": " or ".join(entry.outcomes), "reason": entry.reason, "issue": entry.issue}


def _note(expectation: Mapping[str, str]) -> str:
    until = f" until {expectation['until']}" if "until" in expectation else ""
    return f"{expectation['outcome']} was expected{until} ({expectation['reason']})"


def _told(record: CaseRecord, expectation: Mapping[str, str]) -> CaseRecord:
    start = f"{record.message}; " if record.message else ""
    return replace(record, message=start + _note(expectation), expectation=expectation)
