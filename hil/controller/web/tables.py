"""Tables with specific columns for bisections, studies, benches, gates and matrices."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from hil.controller.records.decisions.gate import GateRecord, GateSide, GateVerdictName
from hil.controller.records.decisions.triage import HIDDEN
from hil.controller.storage.outcomes import ABSENT, NOT_RUN, is_failing
from hil.controller.storage.screen.texts import format_joules
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.readers.analyses import WHOLES, make_row_name, read_row_toolchain
from hil.controller.web.readers.fields import read_grade, read_mapping, read_mappings
from hil.controller.web.readers.matrices import list_targets
from hil.controller.web.readers.runs import name_sides
from hil.controller.web.text.entries import read_int, read_real, read_text
from hil.controller.web.text.numbers import format_number, format_seconds_or_blank
from hil.controller.workloads.gate.verdict_texts import COMMIT_DIGITS, list_details, name_verdict
from hil.controller.workloads.history.tables import describe_key
from hil.controller.workloads.matrix.report import MatrixCell, MatrixRow

# Maximum table rows on a page, and maximum results of a matrix.
ROWS, _RESULTS = 500, 50_000


@dataclass(frozen=True)
class TableCell:
    """Table cell: text, a formatted number, an outcome, or a combination. May link to a case, session or series."""

    text: str = ""
    outcome: str = ""
    case: str = ""  # name of the linked case
    session: str = ""  # query of the linked session, or of the case's session if it differs from the table's session
    series: str = ""  # ID of the linked series of the history
    kind: str = ""  # colour of the text: a kind of outcomes
    value: float | None = None  # number before rounding
    unit: str = ""  # unit of the value, if the column name has none

    def make_link(self, session: str, series: Container[str]) -> str:
        """Return the URL of the cell's case, session or series, or "".

        Args:
            session: query that selects the table's session.
            series: IDs of the series with a page.
        """
        if self.series:
            return f"/series?{urlencode({'id': self.series})}" if self.series in series else ""
        if self.case:
            return f"/case?{self.session or session}&{urlencode({'case': self.case})}"
        return f"/session?{self.session}" if self.session else ""


@dataclass(frozen=True)
class SessionTable:
    """Table with a label."""

    label: str
    columns: Sequence[tuple[str, bool]]  # name, and True for numbers
    rows: Sequence[Sequence[TableCell]]
    left_out: int = 0  # number of omitted rows


def bisect_table(document: Mapping[str, Any], most: int = ROWS) -> SessionTable:
    """Return a bisection's layers, isolated and cumulative (within the whole model)."""
    rows: list[Sequence[TableCell]] = []
    for layer in read_mappings(document.get("layers")):
        name = read_text(layer.get("name"))
        head = [
            TableCell(read_text(layer.get("depth"))),
            TableCell(name, case=name),
            TableCell(read_text(layer.get("op"))),
        ]
        alone, within = read_mapping(layer.get("isolated")), read_mapping(layer.get("cumulative"))
        reason = read_text(alone.get("reason")) or read_text(within.get("reason"))
        rows.append([*head, *_make_finding_cells(alone), *_make_finding_cells(within), TableCell(reason)])
    for name in WHOLES:
        if found := read_mapping(document.get(name)):
            called = {"whole": "unmodified model", "exposed": "with intermediate outputs"}[name]
            empty = [TableCell()] * 3
            rows.append(
                [
                    TableCell(),
                    TableCell(called, case=name),
                    TableCell(),
                    *empty,
                    *_make_finding_cells(found),
                    TableCell(read_text(found.get("reason"))),
                ]
            )
    columns = [("Depth", True), ("Layer", False), ("Operator", False)]
    for way in ("isolated", "cumulative"):
        columns += [(f"Outcome {way}", False), (f"Max abs {way}", True), (f"SQNR {way}, dB", True)]
    return _make_table("Layers", [*columns, ("Reason", False)], rows, most)


def _make_finding_cells(found: Mapping[str, Any]) -> list[TableCell]:
    return [
        TableCell(outcome=read_text(found.get("outcome"))),
        _number_cell(found.get("max_abs")),
        _number_cell(found.get("sqnr_db")),
    ]


def make_study_table(document: Mapping[str, Any], most: int = ROWS) -> SessionTable:
    """Return a study's rows: a row per experiment and compiler, a column per stage."""
    found = read_mappings(document.get("rows"))
    names = list(
        dict.fromkeys(read_text(one.get("name")) for row in found for one in read_mappings(row.get("stages")))
    )[:32]
    rows: list[Sequence[TableCell]] = []
    for row in found:
        stages = {read_text(one.get("name")): one for one in read_mappings(row.get("stages"))}
        worst = read_mapping(row.get("worst"))
        far = _number_cell(worst.get("max_abs")).text
        where = f"{far} in {read_text(worst.get('of'))}, step {read_text(worst.get('step'))}" if far else ""
        rows.append(
            [
                TableCell(read_text(row.get("experiment")), case=make_row_name(row)),
                TableCell(read_row_toolchain(row)),
                TableCell(outcome=read_text(row.get("outcome"))),
                *(_stage_cell(read_mapping(stages.get(name))) for name in names),
                TableCell(read_text(row.get("steps"))),
                TableCell(where),
                TableCell(read_text(row.get("message"))),
            ]
        )
    columns = [("Experiment", False), ("Compiler", False), ("Outcome", False), *((name, True) for name in names)]
    return _make_table(
        "Rows", [*columns, ("Steps", True), ("Largest difference", False), ("Message", False)], rows, most
    )


def _stage_cell(stage: Mapping[str, Any]) -> TableCell:
    took, outcome = read_real(stage.get("seconds")), read_text(stage.get("outcome"))
    if outcome in ("", "pass"):
        return TableCell(format_seconds_or_blank(took), value=took, unit="s" if took is not None else "")
    return TableCell(" ".join(filter(None, (outcome, format_seconds_or_blank(took)))))


def make_bench_table(document: Mapping[str, Any], most: int = ROWS) -> SessionTable:
    """Return a bench's sides with the uncertainty of times. If a side has an energy, show energy and power."""
    energies = [read_mapping(side.get("energy")) for _, side in name_sides(document)]
    # With --generate, also of tokens.
    units = [name for name in _UNITS if name == "per_inference" or any(read_mapping(one.get(name)) for one in energies)]
    rows: list[Sequence[TableCell]] = []
    for name, side in name_sides(document):
        times = read_mapping(side.get("times"))
        median = read_mapping(times.get("median"))
        low, high = (_time_cell(median.get(end)).text for end in ("low", "high"))
        drift = read_mapping(times.get("drift"))
        rows.append(
            [
                TableCell(read_text(side.get("label"))),
                TableCell(name, case=name),
                TableCell(outcome=read_text(side.get("outcome"))),
                _time_cell(times.get("p50_ns")),
                TableCell(f"{low} to {high}" if low and high else ""),
                *(_time_cell(times.get(key)) for key in ("p90_ns", "p99_ns", "min_ns")),
                TableCell(read_text(read_int(times.get("iterations")))),
                _number_cell(side.get("iterations_per_s")),
                TableCell("drifts" if drift.get("marked") is True else ""),
                TableCell(read_grade(side)),
                *(_energy_cells(side, units) if any(energies) else ()),
            ]
        )
    columns = [("Side", False), ("Model", False), ("Outcome", False), ("Median", True), ("Its interval", True)]
    columns += [("p90", True), ("p99", True), ("Least", True), ("Iterations", True), ("A second", True), ("", False)]
    columns += [("Grade", False)]
    if any(energies):
        columns += [pair for name in units for pair in ((_UNITS[name], True), ("Its interval", True))]
        columns += [("Average", True), ("Peak", True), ("Idle", True), ("Energy refused", False)]
    return _make_table("Sides", columns, rows, most)


# Energies of a side, and their columns.
_UNITS = {
    "per_inference": "Energy",
    "per_prompt_token": "Energy of a prompt token",
    "per_generated_token": "Energy of a generated token",
}


def _energy_cells(side: Mapping[str, Any], units: Sequence[str]) -> list[TableCell]:
    """Return the energies with their intervals, the average, peak and idle power, and why hil refused them."""
    found = read_mapping(side.get("energy"))
    energies = [cell for name in units for cell in _unit_energy_cells(read_mapping(found.get(name)))]
    refused = ": ".join(filter(None, (read_text(found.get("refused")), read_text(found.get("reason")))))
    powers = (found.get(name) for name in ("average_w", "peak_w", "idle_w"))
    return [*energies, *(_unit_cell(one, "W", lambda watts: f"{watts:.3g} W") for one in powers), TableCell(refused)]


def _unit_energy_cells(unit: Mapping[str, Any]) -> list[TableCell]:
    interval = read_mapping(unit.get("interval"))
    low, high = (read_real(interval.get(end)) for end in ("low", "high"))
    text = "" if low is None or high is None else f"{format_joules(low)} to {format_joules(high)}"
    return [_unit_cell(unit.get("joules"), "J", format_joules), TableCell(text)]


def _unit_cell(value: Any, unit: str, format_value: Callable[[float], str]) -> TableCell:
    number = read_real(value)
    return TableCell() if number is None else TableCell(format_value(number), value=number, unit=unit)


def evaluation_table(document: Mapping[str, Any], most: int = ROWS) -> SessionTable:
    """Return the samples of an evaluation whose scores are worse on the board than on the reference."""
    scores = read_mapping(document.get("scores"))
    rows: list[Sequence[TableCell]] = [
        [
            TableCell(read_text(one.get("name"))),
            *(_number_cell(one.get(side)) for side in ("board", "reference")),
            *(TableCell(_answer_text(one.get(f"{side}_answer"))) for side in ("board", "reference")),
        ]
        for one in read_mappings(scores.get("worst"))
    ]
    columns = [("Sample", False), ("Board", True), ("Reference", True)]
    columns += [("Answer of the board", False), ("Answer of the reference", False)]
    return _make_table("Worst samples", columns, rows, most)


def _answer_text(answer: Any) -> str:
    return "" if answer is None else read_text(json.dumps(answer))


def make_matrix_table(
    database: sqlite3.Connection, document: Mapping[str, Any], children: Sequence[IndexedSession], most: int = ROWS
) -> SessionTable:
    """Return a matrix with a row per case and a column per target. Differing and failing rows are first."""
    by_name = {one.id.rpartition("/")[2]: one for one in children}
    errors = {
        read_text(one.get("name")): read_mapping(one.get("error")) for one in read_mappings(document.get("targets"))
    }
    names = list_targets(document)
    known, further = read_matrix_rows(database, names, by_name, errors)
    rows = sorted(known, key=lambda row: (not row.differs, not row.fails))
    drawn: list[Sequence[TableCell]] = []
    for row in rows:
        cells = [TableCell(row.id), TableCell("differs" if row.differs else "")]
        for name, found in zip(names, row.cells, strict=True):
            where = by_name.get(name)
            has_case = where is not None and found.word not in (NOT_RUN, ABSENT)
            link = (row.id, where.link) if where is not None and has_case else ("", "")
            cells.append(TableCell(found.message, found.word, *link))
        drawn.append(cells)
    columns = [("Case", False), ("", False), *((name, False) for name in names)]
    return _make_table("Cases on targets", columns, drawn, most, further)


def read_matrix_rows(
    database: sqlite3.Connection,
    names: Sequence[str],
    children: Mapping[str, IndexedSession],
    errors: Mapping[str, Mapping[str, Any]],
) -> tuple[list[MatrixRow], int]:
    """Read the rows of a matrix from the index, in the format of the matrix report.

    At most :data:`_RESULTS` results are read.

    Returns:
        The rows, and the number of omitted cases.
    """
    called = {child.key: name for name, child in children.items()}
    of_targets = "session in (select value from json_each(:targets))"
    values = {"targets": json.dumps([*called]), "most": _RESULTS // max(len(children), 1)}
    query = (
        f"with chosen as materialized (select name, min(number) as first from cases where {of_targets}"
        " group by name order by first, name limit :most)"
        " select n.word, o.word, m.word, device_p50_ns, session from chosen cross join cases using (name)"
        " join words n on n.key = cases.name join words o on o.key = cases.outcome"
        f" join words m on m.key = cases.message where {of_targets} order by first, cases.name"
    )
    found: dict[str, dict[str, MatrixCell]] = {}
    for case, outcome, message, device_ns, key in database.execute(query, values):
        told = message or format_seconds_or_blank(None if device_ns is None else device_ns / 1e9)
        found.setdefault(case, {})[called[key]] = MatrixCell(outcome or NOT_RUN, None, told)
    every = database.execute(f"select count(distinct name) from cases where {of_targets}", values).fetchone()[0]
    rows = []
    for case, cells in found.items():
        filled = []
        for name in names:
            error = errors.get(name) or {}
            absent = NOT_RUN if name not in children or not children[name].finished else ABSENT
            other = MatrixCell(read_text(error.get("outcome")) or absent, None, read_text(error.get("message")))
            filled.append(cells.get(name, other))
        rows.append(MatrixRow(case, "", "", "", tuple(filled)))
    return rows, every - len(rows)


# Verdict of a gate -> kind of outcomes.
_VERDICT_KINDS: Mapping[GateVerdictName, str] = {
    "broken": "fail",
    "regressed": "fail",
    "toolchain": "error",
    "undecided": "unfinished",
    "board fault": "board",
    "improved": "pass",
    "no change": "pass",
    "new": "quiet",
}


def gate_table(record: GateRecord, runs: Mapping[str, str], most: int = ROWS) -> SessionTable:
    """Return a gate's verdicts, most serious first.

    Args:
        runs: query of the session per run ID, for the runs that pages can show.
    """
    rows = []
    for one in record.verdicts:
        bounds = f"{one.interval.low:.3f} to {one.interval.high:.3f}" if one.interval is not None else ""
        kind = "quiet" if one.triage in HIDDEN else _VERDICT_KINDS[one.verdict]
        ratio = TableCell("" if one.ratio is None else f"{one.ratio:.3f}", value=one.ratio)
        rows.append(
            [
                TableCell(name_verdict(one), kind=kind),
                TableCell(read_text(describe_key(one.key)), series=one.series),
                *(ratio, TableCell(bounds), TableCell(str(one.rounds or ""))),
                TableCell(read_text("; ".join((one.reason, *list_details(one))))),
                *_gate_side_cells(one.old, runs),
                *_gate_side_cells(one.new, runs),
            ]
        )
    columns = [("Verdict", False), ("Series", False), ("Ratio", True), ("Its interval", True), ("Rounds", True)]
    columns.append(("Reason", False))
    for side in ("Baseline", "New"):
        columns += [(side, False), (f"{side} run", False), (f"{side} median", True)]
    return _make_table("Verdicts", columns, rows, most)


def _gate_side_cells(side: GateSide | None, runs: Mapping[str, str]) -> list[TableCell]:
    if side is None:
        return [TableCell()] * 3
    return [
        TableCell(read_text(side.commit)[:COMMIT_DIGITS]),
        TableCell(read_text(side.run), session=runs.get(side.run, "")),
        TableCell(outcome=read_text(side.outcome)) if is_failing(side.outcome) else _time_cell(side.p50_ns),
    ]


def _number_cell(value: Any) -> TableCell:
    number = read_real(value)
    return TableCell(format_number(number), value=number)


def _time_cell(value: Any) -> TableCell:
    found = read_real(value)
    return TableCell(
        format_seconds_or_blank(None if found is None else found / 1e9),
        value=found,
        unit="ns" if found is not None else "",
    )


def _make_table(
    label: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[TableCell]], most: int, further: int = 0
) -> SessionTable:
    return SessionTable(label, columns, rows[:most], max(len(rows) - most, 0) + further)


def make_plain_rows(table: SessionTable) -> tuple[list[str], list[list[Any]]]:
    """Convert a table for a spreadsheet: header, and rows with unrounded numbers."""
    head = []
    for place, (name, _) in enumerate(table.columns):
        unit = next((row[place].unit for row in table.rows if row[place].unit), "")
        head.append(f"{name} ({unit})" if unit else name)
    return head, [[_make_plain_value(cell) for cell in row] for row in table.rows]


def _make_plain_value(cell: TableCell) -> Any:
    return " ".join(filter(None, (cell.outcome, cell.text))) if cell.value is None else cell.value
