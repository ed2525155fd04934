"""Stored runs as Python objects, with tables as data frames."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hil.controller.analysis.bench.store import read_bench
from hil.controller.analysis.profile.store import find_folder, find_profile, read_profile
from hil.controller.analysis.profile.totals import GROUPS, sum_rows
from hil.controller.records.base import parse_number
from hil.controller.records.decisions.evaluation import EvaluationRecord
from hil.controller.records.measurements.bench import BenchRecord
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.paths import is_folder
from hil.controller.storage.runs import RECORD, Run, RunStore
from hil.controller.storage.screen.texts import format_count
from hil.controller.storage.session_folders import find_session_folder, has_record, list_roots
from hil.controller.workloads.evaluation.stored import find_evaluation, read_samples
from hil.controller.workloads.matrix.report import load_results
from hil.controller.workloads.suites.reports.results import SuiteResults, Totals, find_worst_output
from hil.controller.workloads.suites.reports.tables import ResultTable, make_case_table, make_output_table
from hil.controller.workloads.suites.store import HEAD
from hil.controller.workloads.tables.bench_tables import make_iteration_table, make_side_table
from hil.controller.workloads.tables.evaluation_tables import make_sample_table, make_score_table
from hil.controller.workloads.tables.trace_tables import make_call_table, make_tensor_table
from hil.controller.workloads.traces.stored import find_traces
from hil.controller.workloads.traces.trace import Trace
from hil.core.html_table import make_html_table
from hil.core.timeline import Profile
from hil.errors import UsageError, did_you_mean, format_expected

# Records write these numbers as strings, because JSON lacks them.
_NOT_IN_JSON = ("inf", "-inf", "nan")
_SHOWN_ROWS = 50
# Libraries with their arguments. In polars, a column may mix integers and floats, and its first values may be empty.
_LIBRARIES: dict[str, dict[str, Any]] = {"pandas": {}, "polars": {"strict": False, "infer_schema_length": None}}


def load_run(run: str | Path = "latest", *, out: str | Path | None = None) -> LoadedRun:
    """Load a stored run of `hil run`, `bundle run`, `suite run`, `bench`, `eval` or `trace run`, or stored traces.

    Args:
        run: directory of a run or a suite run, its ID, a unique prefix of an ID, or ``latest``, the newest of all; or
            a directory with traces, at any depth.
        out: directory with the runs (default: ``hil-runs`` and ``hil-suites``).

    Raises:
        UsageError: no run or multiple runs match, or the record is unreadable.
    """
    if is_folder(Path(run)) and not has_record(Path(run), (RECORD, HEAD)):
        with contextlib.suppress(UsageError):
            find_traces(Path(run))
            return LoadedRun(_make_trace_results(Path(run)))
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

    @property
    def bench(self) -> BenchRecord:
        """Record of `hil bench`, with the comparison of two programs. Raises UsageError for other runs."""
        return read_bench(self._stored_run)

    def sides(self, frame: str = "") -> Any:
        """Return a data frame with a row per side of a bench: its board, times in ms and s, and grade."""
        return make_frame(make_side_table(self.bench), frame)

    @property
    def evaluation(self) -> EvaluationRecord:
        """Record of `hil eval`. Raises UsageError for other runs."""
        found = find_evaluation(self._stored_run)
        if found is None:
            raise UsageError(f"run {self.id} is not an evaluation", hint="choose a run of `hil eval`")
        return found

    def scores(self, frame: str = "") -> Any:
        """Return a data frame with a row: the scores of an evaluation, and the interval of their difference."""
        return make_frame(make_score_table(self.evaluation), frame)

    def samples(self, frame: str = "") -> Any:
        """Return a data frame with a row per sample of an evaluation, or per measured iteration of a bench.

        Raises:
            UsageError: the run is neither a bench nor an evaluation, or has no samples.
        """
        if find_evaluation(self._stored_run) is not None:
            return make_frame(make_sample_table(read_samples(self.folder)), frame)
        read_bench(self._stored_run)  # raises UsageError for other runs
        return make_frame(make_iteration_table(self.folder), frame)

    @property
    def traces(self) -> Mapping[str, Trace]:
        """Traces in the run's directory with all tensors, by relative path. Raises UsageError if there are none."""
        return {name: Trace.load(folder) for name, folder in find_traces(self.folder).items()}

    def calls(self, frame: str = "") -> Any:
        """Return a data frame with a row per call of the traces, with the outcome of a stored comparison."""
        return make_frame(make_call_table(find_traces(self.folder)), frame)

    def tensors(self, frame: str = "") -> Any:
        """Return a data frame with a row per input, output and assigned variable of the traces' calls."""
        return make_frame(make_tensor_table(find_traces(self.folder)), frame)

    @property
    def _stored_run(self) -> Run:
        """The run with run.json. Raises UsageError for suite runs and traces."""
        if not has_record(self.folder, (RECORD,)):
            raise UsageError(f"run {self.id} is neither a bench nor an evaluation", hint="choose a run of `hil bench`")
        return RunStore(self.folder.parent).open(str(self.folder))

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


def _make_trace_results(folder: Path) -> SuiteResults:
    """Return results without cases, for a directory with traces."""
    return SuiteResults(
        folder=folder,
        id=folder.resolve().name,
        source="",
        suite="",
        flow="",
        runtime="",
        boards=(),
        started=None,
        finished=None,
        exit_code=None,
        command="",
        versions={},
        interrupted=False,
        records=(),
    )


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
    if found := [*parts, *([f"{len(run.missing)} not run"] if run.missing else [])]:
        return ", ".join(found)
    try:
        return format_count(len(find_traces(run.folder)), "trace")
    except UsageError:
        return "no cases"


def _describe_case(record: CaseRecord) -> Sequence[Any]:
    worst = find_worst_output(record.outputs)
    time = None if record.device_p50_ns is None else record.device_p50_ns / 1e6
    error = None if worst is None else parse_number(worst.max_abs)
    return record.id, record.outcome, time, worst and worst.name, error, record.message


def _note_rest(title: str, rows: int) -> str:
    return title if rows <= _SHOWN_ROWS else f"{title} (first {_SHOWN_ROWS} of {rows} rows)"
