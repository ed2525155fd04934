"""The entries of a file of expected failures, and what is wrong with one that is none."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from hil.controller.workloads.suites.record import CaseRecord
from hil.core import files
from hil.core.config_files import parse_toml
from hil.core.results import Outcome, Stage
from hil.errors import UsageError, did_you_mean

# The tables, the one that goes before the other first, and what an entry of each may foresee. A time limit may be
# outlived in both. A board that is lost tells nothing of a case, so that is never foreseen.
TABLES: Mapping[str, tuple[str, ...]] = {
    "compile": ("IMPORT_ERROR", "COMPILE_ERROR", "COMPILE_CRASH", "TIMEOUT"),
    "run": ("FAIL", "BLIND", "LOAD_ERROR", "RUN_ERROR", "RUN_CRASH", "TIMEOUT", "FALLBACK", "REFERENCE_ERROR"),
}
_EARLY = (Stage.IMPORT.value, Stage.COMPILE.value)
_PASS = Outcome.PASS.value
# The table that is no list of entries: package -> the version that the file was made with.
MADE_WITH = "made_with"
_KEYS = ("cases", "except", "outcome", "reason", "issue", "flow", "runtime", "board", "until")


class Place(Protocol):
    """A case and where it runs: what an entry is chosen by. A :class:`CaseRecord` is one."""

    @property
    def id(self) -> str:
        """The case's."""

    @property
    def flow(self) -> str:
        """The flow's name."""

    @property
    def runtime(self) -> str:
        """The runtime's name."""

    @property
    def board(self) -> str:
        """The board's name; "" where none has run it."""

    @property
    def hw_type(self) -> str:
        """The hardware type that it is compiled for or runs on."""


@dataclass(frozen=True)
class Expectation:
    """An entry.

    Attributes:
        table: ``compile`` or ``run``.
        number: its place in its table, from 1.
        cases: patterns over the cases' ids.
        outcomes: words that it may end in. ``PASS`` among them is for what the machine decides, or chance.
        reason: why, for people.
        issue: where that is followed; "" is nowhere.
        without: patterns of cases that are left out (``except`` in the file).
        flow, runtime, board: patterns of where it counts; empty is everywhere.
        until: the last day on which it counts; None is for ever.
    """

    table: str
    number: int
    cases: tuple[str, ...]
    outcomes: tuple[str, ...]
    reason: str
    issue: str = ""
    without: tuple[str, ...] = ()
    flow: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    board: tuple[str, ...] = ()
    until: date | None = None

    def covers(self, case_id: str) -> bool:
        """Whether it speaks of a case, wherever that runs."""
        return matches(self.cases, case_id) and not matches(self.without, case_id)

    def in_scope(self, place: Place) -> bool:
        """Whether it counts where a case runs, whichever case that is."""
        return (
            (not self.flow or matches(self.flow, place.flow))
            and (not self.runtime or matches(self.runtime, place.runtime))
            and (not self.board or matches(self.board, place.board) or matches(self.board, place.hw_type))
        )

    def speaks_of(self, place: Place) -> bool:
        """Whether it is about a case where that runs."""
        return self.in_scope(place) and self.covers(place.id)

    def foresees(self, record: CaseRecord) -> bool:
        """Whether a case ended in the way that was expected."""
        return record.ended in self.outcomes and (record.ended == _PASS or table_of(record) == self.table)

    def expired(self, today: date) -> bool:
        """Whether its last day is over."""
        return self.until is not None and today > self.until


def table_of(record: CaseRecord) -> str:
    """The table that speaks of what a case ended in: ``compile`` or ``run``; "" for what nothing can foresee."""
    if record.ended == Outcome.TIMEOUT.value:
        return "compile" if record.stage in _EARLY else "run"
    return next((table for table, words in TABLES.items() if record.ended in words), "")


def is_wild(pattern: str) -> bool:
    """Whether a pattern may match another name than the one that it is."""
    return any(sign in pattern for sign in "*?[")


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether one of some shell patterns matches a name, in which case counts."""
    names, wild = _compiled(patterns)
    return name in names or (wild is not None and wild.match(name) is not None)


@lru_cache(maxsize=4096)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Lists of hundreds of plain names are usual: those are looked up, and the others are one expression."""
    wild = [pattern for pattern in patterns if is_wild(pattern)]
    return frozenset(patterns) - {*wild}, re.compile("|".join(map(fnmatch.translate, wild))) if wild else None


def read_text(path: Path) -> str:
    """A file's text; "" where there is none.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return files.read_text(path)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def parse(text: str, path: Path | None) -> tuple[Expectation, ...]:
    """The entries of ``[[compile]]``, then those of ``[[run]]``, each in the file's order.

    Args:
        text: of the file.
        path: the file, for messages.

    Raises:
        UsageError: it is no such file; says which entry and what is wrong with it.
    """
    data = parse_toml(text, path)
    place = next((number for number, name in enumerate(data) if name == MADE_WITH), 0)
    versions = data.pop(MADE_WITH, {})
    if not isinstance(versions, dict) or not all(isinstance(one, str) for one in versions.values()):
        raise UsageError(f"{path}: [{MADE_WITH}] must name versions", hint='for example onnx = "1.23.2"')
    if versions and place:
        raise UsageError(f"{path}: [{MADE_WITH}] must stand before the entries")
    for name in sorted(data.keys() - TABLES.keys()):
        hint = f"{did_you_mean(name, [*TABLES, MADE_WITH])}an entry begins with [[compile]] or [[run]]"
        raise UsageError(f"{path}: {name!r} is no table of expected failures", hint=hint)
    entries: list[Expectation] = []
    for table in TABLES:
        rows = data.get(table, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{path}: {table} must be a list of tables", hint=f"begin each entry with [[{table}]]")
        entries += (_entry(f"{path}: [[{table}]] entry {n}", table, n, row) for n, row in enumerate(rows, 1))
    return tuple(entries)


def made_with(text: str) -> dict[str, str]:
    """Package -> the version that a file was made with, of the text of a file that :func:`parse` takes."""
    return dict(parse_toml(text, None).get(MADE_WITH, {}))


def _entry(where: str, table: str, number: int, row: Mapping[str, Any]) -> Expectation:
    for key in row:
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {key!r}", hint=f"{did_you_mean(key, _KEYS)}of {', '.join(_KEYS)}")
    for key in ("cases", "outcome", "reason"):
        if key not in row:
            raise UsageError(f"{where} has no {key!r}", hint="an entry needs cases, outcome and reason")
    texts = {key: _texts(where, key, value) for key, value in row.items() if key not in ("reason", "issue", "until")}
    plain = {"reason": "", "issue": "", **{key: row[key] for key in ("reason", "issue") if key in row}}
    for key, value in plain.items():
        if not isinstance(value, str) or (key == "reason" and not value.strip()):
            raise UsageError(f"{where}: {key} must be a text")
    if {*texts["outcome"]} == {_PASS}:
        raise UsageError(f"{where}: PASS cannot be expected alone", hint=f"one of {', '.join(TABLES[table])}")
    for word in texts["outcome"]:
        _check_word(where, table, word)
    until = row.get("until")
    if isinstance(until, datetime) or not isinstance(until, date | None):
        raise UsageError(f"{where}: until must be a day", hint="for example until = 2030-12-31, without quotes")
    return Expectation(
        table,
        number,
        cases=texts["cases"],
        outcomes=texts["outcome"],
        without=texts.get("except", ()),
        flow=texts.get("flow", ()),
        runtime=texts.get("runtime", ()),
        board=texts.get("board", ()),
        until=until,
        **plain,
    )


def _texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise UsageError(f"{where}: {key} must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _check_word(where: str, table: str, word: str) -> None:
    if word in (*TABLES[table], _PASS):
        return
    allowed = ", ".join(TABLES[table])
    other = next((name for name, words in TABLES.items() if word in words), "")
    if other:
        hint = f"it belongs into [[{other}]]; a case of [[{table}]] ends in one of {allowed}"
        raise UsageError(f"{where}: nothing ends in {word} there", hint=hint)
    if word in Outcome.__members__:
        raise UsageError(f"{where}: {word} cannot be expected", hint=f"one of {allowed}")
    every = [one for words in TABLES.values() for one in words]
    raise UsageError(f"{where}: unknown outcome {word!r}", hint=f"{did_you_mean(word.upper(), every)}one of {allowed}")
