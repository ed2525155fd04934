"""Stored runs as Python objects, with tables as data frames."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.store import find_folder, find_profile, read_profile
from hil.controller.analysis.profile.totals import GROUPS, sum_rows
from hil.controller.records.base import parse_number
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.runs import RECORD
from hil.controller.storage.session_folders import find_session_folder, list_roots
from hil.controller.workloads.matrix.report import load_results
from hil.controller.workloads.suites.reports.results import SuiteResults, Totals, find_worst_output
from hil.controller.workloads.suites.reports.tables import ResultTable, make_case_table, make_output_table
from hil.controller.workloads.suites.store import HEAD
from hil.core.html_table import make_html_table
from hil.core.timeline import Profile
from hil.errors import UsageError, did_you_mean, format_expected

# Records write these numbers as strings, because JSON lacks them.
_NOT_IN_JSON = ("inf", "-inf", "nan")
_SHOWN_ROWS = 50
# Libraries with their arguments. In polars, a column may mix integers and floats, and its first values may be empty.
_LIBRARIES: dict[str, dict[str, Any]] = {"pandas": {}, "polars": {"strict": False, "infer_schema_length": None}}


def load_run(run: str | Path = "latest", *, out: str | Path | None = None) -> LoadedRun:
    """Load a stored run of `hil run`, `hil bundle run` or `hil suite run`.

    Args:
        run: directory of a run or a suite run, its ID, a unique prefix of an ID, or ``latest``, the newest of all.
        out: directory with the runs (default: ``hil-runs`` and ``hil-suites``).

    Raises:
        UsageError: no run or several runs match, or the record is unreadable.
    """
    roots = list_roots() if out is None else (Path(out),)
    return LoadedRun(load_results(find_session_folder(str(run), roots, (RECORD, HEAD), "run")))


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A stored run. Its tables are data frames of pandas, or of polars if pandas is missing."""

    results: SuiteResults

    @property
    def id(self) -> str:
        """ID of the run."""
        return self.results.id

    @property
    def folder(self) -> Path:
        """Directory of the run."""
        return self.results.folder

    @property
    def records(self) -> Mapping[str, CaseRecord]:
        """Records of the finished cases, by ID of the case."""
        return {record.id: record for record in self.results.records}

    def cases(self, frame: str = "") -> Any:
        """Return a data frame with a row per finished case: the columns of results.csv, with times in ms and s.

        Args:
            frame: ``pandas`` or ``polars`` (default: the first that is installed).

        Raises:
            UsageError: the library is not installed.
        """
        return make_frame(make_case_table(self.results), frame)

    def outputs(self, frame: str = "") -> Any:
        """Return a data frame with a row per output and reference: the columns of outputs.csv. See :meth:`cases`."""
        return make_frame(make_output_table(self.results), frame)

    def profile(self, case: str = "") -> LoadedProfile:
        """Return the profile of a case. Raises UsageError unless exactly one profile matches."""
        return LoadedProfile(read_profile(find_folder(find_profile(str(self.folder), case))))

    def __repr__(self) -> str:
        return f"<LoadedRun {self.id}: {_count_outcomes(self.results)}>"

    def _repr_html_(self) -> str:
        rows = [_describe_case(record) for record in self.results.records[:_SHOWN_ROWS]]
        columns = ("case", "outcome", "device p50 (ms)", "worst output", "max abs", "reason")
        title = f"{self.id}: {_count_outcomes(self.results)}"
        return make_html_table(_note_rest(title, len(self.results.records)), columns, rows)


@dataclass(frozen=True, repr=False)
class LoadedProfile:
    """Profile of a stored run. ``data`` has all rows, calls and samples."""

    data: Profile

    def totals(self, by: str = "op", frame: str = "") -> Any:
        """Return a data frame with the times per ``op``, ``node`` or ``type``, largest first.

        Raises:
            UsageError: ``by`` is unknown, or the library is not installed.
        """
        if by not in GROUPS:
            raise UsageError(f"unknown group {by!r}", hint=did_you_mean(by, GROUPS) + format_expected(GROUPS))
        rows = [one.to_json() for one in sum_rows(self.data.rows, by)]
        columns = list(rows[0]) if rows else ["name"]
        return make_frame(ResultTable(columns, [list(row.values()) for row in rows]), frame)

    def __repr__(self) -> str:
        return f"<LoadedProfile {self.data.model} on {self.data.board}: {len(self.data.rows)} rows>"

    def _repr_html_(self) -> str:
        totals = sum_rows(self.data.rows, "op")
        rows = [(one.name, one.calls, one.run_ns / 1e6, f"{one.share:.1%}") for one in totals[:_SHOWN_ROWS]]
        title = f"{self.data.model} on {self.data.board}, {self.data.runtime}"
        return make_html_table(_note_rest(title, len(totals)), ("operation", "calls", "ms per run", "share"), rows)


def make_frame(table: ResultTable, frame: str = "") -> Any:
    """Convert a table to a data frame of pandas or polars. Raises UsageError if the library is not installed."""
    if frame and frame not in _LIBRARIES:
        raise UsageError(
            f"unknown library {frame!r}", hint=did_you_mean(frame, _LIBRARIES) + format_expected(_LIBRARIES)
        )
    found = [name for name in ((frame,) if frame else _LIBRARIES) if find_spec(name) is not None]
    if not found:
        raise UsageError(
            f"data frames need {frame or ' or '.join(_LIBRARIES)}",
            hint=f"pip install {frame or next(iter(_LIBRARIES))}",
        )
    columns = {name: [_convert_value(row[index]) for row in table.rows] for index, name in enumerate(table.columns)}
    return importlib.import_module(found[0]).DataFrame(columns, **_LIBRARIES[found[0]])


def _convert_value(value: Any) -> Any:
    return parse_number(value) if value in _NOT_IN_JSON else value


def _count_outcomes(run: SuiteResults) -> str:
    parts = [f"{count} {outcome}" for outcome, count in Totals(run).outcomes.items()]
    return ", ".join([*parts, *([f"{len(run.missing)} not run"] if run.missing else [])]) or "no cases"


def _describe_case(record: CaseRecord) -> Sequence[Any]:
    worst = find_worst_output(record.outputs)
    time = None if record.device_p50_ns is None else record.device_p50_ns / 1e6
    error = None if worst is None else parse_number(worst.max_abs)
    return record.id, record.outcome, time, worst and worst.name, error, record.message


def _note_rest(title: str, rows: int) -> str:
    return title if rows <= _SHOWN_ROWS else f"{title} (first {_SHOWN_ROWS} of {rows} rows)"
