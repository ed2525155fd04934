"""Show a study's table on the terminal, as CSV and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.backends.compilers.tensorflow.tfcompile import COMPILE, GENERATE, LINK
from hil.controller.records.base import parse_number
from hil.controller.records.outputs import StoredComparison
from hil.controller.records.study import StudyRow, StudyStage
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.screen.texts import make_table
from hil.controller.workloads.matrix.files import write_matrix
from hil.controller.workloads.matrix.report import MatrixReport, TargetResults, make_empty_results
from hil.controller.workloads.study.toolchains import LOAD, LOWER, MATCH, RUN
from hil.controller.workloads.suites.reports.summary import format_markdown_table
from hil.controller.workloads.suites.reports.tables import format_csv
from hil.core.results import Outcome

if TYPE_CHECKING:
    from rich.table import Table

CSV, MARKDOWN = "study.csv", "study.md"
# Column -> stages. A compiler has at most one stage per column.
_COLUMNS = {
    "config / lower": (GENERATE, LOWER),
    "compile": (COMPILE,),
    "link": (LINK,),
    "load": (LOAD,),
    "run": (RUN,),
    "match": (MATCH,),
}


def list_cells(row: StudyRow) -> dict[str, str]:
    """Return a row's text by column."""
    found = {"experiment": row.experiment, "compiler": row.toolchain}
    for column, stage in _list_stages(row).items():
        if stage is None:
            found[column] = "none"
        elif stage.outcome != "pass":
            found[column] = "FAIL" if stage.outcome == "fail" else "-"
        elif stage.name == MATCH:
            found[column] = f"{row.steps} steps"
        else:
            found[column] = f"{stage.seconds or 0.0:.1f} s" if (stage.seconds or 0) >= 0.1 else "ok"
    worst = parse_number(row.worst.max_abs) if row.worst else None
    found["max difference"] = "" if worst is None else f"{worst:.1e}"
    found["size"] = "" if row.bytes is None else f"{row.bytes / 1024:.0f} KiB"
    found["outcome"] = row.outcome.value if row.outcome else "not run"
    if row.outcome is Outcome.PASS:
        found["outcome"] = row.relation.named(found["outcome"])
    found["reported"] = row.reported
    return found


def _list_stages(row: StudyRow) -> dict[str, StudyStage | None]:
    """Return a row's stage by column."""
    return {
        column: next((stage for stage in row.stages if stage.name in names), None) for column, names in _COLUMNS.items()
    }


def list_failures(rows: Sequence[StudyRow]) -> list[str]:
    """Return a line per failed row: the stage and the compiler's message."""
    return [f"{row.experiment}, {row.toolchain}: {row.failed_stage}: {row.message}" for row in rows if row.failed_stage]


def make_terminal_table(rows: Sequence[StudyRow]) -> Table:
    """Return the table for a terminal."""
    from rich.text import Text

    lines = [list_cells(row) for row in rows]
    styles = {Outcome.PASS: "green", None: "dim"}
    shown = [
        {**line, "outcome": Text(line["outcome"], styles.get(row.outcome, "red"))}
        for row, line in zip(rows, lines, strict=True)
    ]
    return make_table(list(lines[0]) if lines else (), [list(line.values()) for line in shown])


def format_markdown(rows: Sequence[StudyRow]) -> str:
    """Return the table in Markdown, followed by the failures."""
    lines = [list_cells(row) for row in rows]
    if not lines:
        return ""
    texts = [[cell.replace("|", "\\|") for cell in line.values()] for line in lines]
    failed = [f"- {line}" for line in list_failures(rows)]
    return "\n".join([*format_markdown_table(list(lines[0]), texts), *([""] if failed else []), *failed, ""])


def make_matrix(rows: Sequence[StudyRow], folder: Path) -> MatrixReport:
    """Return a matrix with experiments as rows and compilers as columns."""
    targets = []
    for toolchain in dict.fromkeys(row.toolchain for row in rows):
        mine = [row for row in rows if row.toolchain == toolchain]
        records = tuple(_record(row) for row in mine if row.outcome is not None)
        missing = tuple(row.experiment for row in mine if row.outcome is None)
        targets.append(
            TargetResults(
                toolchain, replace(make_empty_results(folder), flow=toolchain, records=records, missing=missing)
            )
        )
    return MatrixReport("study", targets)


def _record(row: StudyRow) -> CaseRecord:
    outcome, worst = str(row.outcome and row.outcome.value), row.worst
    return CaseRecord(
        id=row.experiment,
        model=row.experiment,
        suite="study",
        flow=row.toolchain,
        runtime="",
        outcome=outcome,
        ended=outcome,
        stage=row.failed_stage,
        message=row.message,
        detail=row.detail,
        against="TensorFlow's training",
        relation=row.relation.value,
        timings={stage.name: stage.seconds for stage in row.stages},
        artifact_bytes=row.bytes,
        outputs=[StoredComparison(name=worst.of, passed=not row.failed_stage, max_abs=worst.max_abs)] if worst else [],
    )


def write_tables(rows: Sequence[StudyRow], folder: Path) -> None:
    """Write the table as CSV (with all stages' seconds) and Markdown, and the compilers' matrix."""
    write_matrix(make_matrix(rows, folder), folder)
    (folder / MARKDOWN).write_text(format_markdown(rows))
    lines = []
    for row in rows:
        document = row.to_json()
        names = ("experiment", "title", "toolchain", "compiler", "relation", "outcome", "failed_stage", "message")
        line = {name: document[name] for name in names}
        for column, stage in _list_stages(row).items():
            line[column] = stage and stage.outcome
            line[f"{column} (s)"] = None if stage is None or stage.seconds is None else round(stage.seconds, 3)
        line |= {"bytes": row.bytes, "steps": row.steps, "max_abs": row.worst and row.worst.max_abs}
        lines.append(line | {"reported": row.reported})
    (folder / CSV).write_text(format_csv(list(lines[0]) if lines else [], [list(line.values()) for line in lines]))
