"""Tables of a suite run: case columns, and the files results.csv and outputs.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from hil.compare.stats import STATISTICS
from hil.controller.pipeline.records.energy_text import ENERGY_COLUMNS as ENERGY_VALUES
from hil.controller.pipeline.records.energy_text import format_energy, format_token_energy, list_energy
from hil.controller.pipeline.records.evidence import (
    format_criterion,
    format_evidence,
    format_reference,
    format_unanswered,
)
from hil.controller.pipeline.records.print_generation import find_worst_position
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.measurements.generation import StoredGeneration
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.screen.texts import as_text, make_plain
from hil.controller.workloads.suites.reports.results import Delegation, SuiteResults, find_worst_output
from hil.core.results import Timings

_OUTPUT = (
    *("id", "beside", "against", "name", "passed", "reason", "dtype", "shape", "reference_dtype", "reference_shape"),
    *("rtol", "atol", "criteria", "elements", "mismatches", "mismatch_share", *(one.key for one in STATISTICS)),
    *("first_index", "first_values", "worst_index", "worst_values"),
)


@dataclass(frozen=True)
class CaseColumn:
    """Column in the table of cases."""

    name: str  # header in results.csv
    value: Callable[[CaseRecord], Any]  # returns a case's cell as a JSON value; None for an empty cell
    title: str = ""  # header in report.html's table; "" if the column is only in results.csv
    unit: str = "text"  # format in report.html: ``text``, ``number``, ``bytes`` or ``seconds``


def _make_field_columns(*names: str) -> list[CaseColumn]:
    return [CaseColumn(name, attrgetter(name)) for name in names]


def _make_worst_column(name: str, statistic: str) -> CaseColumn:
    return CaseColumn(name, lambda record: getattr(find_worst_output(record.outputs), statistic, None))


def _make_note_column(name: str) -> CaseColumn:
    return CaseColumn(name, lambda record: record.notes.get(name))


def _make_delegation_column(name: str, value: Callable[[Delegation], Any]) -> CaseColumn:
    return CaseColumn(name, lambda record: None if (found := Delegation.of(record)) is None else value(found))


def _make_timing_column(name: str) -> CaseColumn:
    return CaseColumn(name, lambda record: record.timings.get(name))


def _make_output_column(index: int, statistic: str) -> CaseColumn:
    def read_value(record: CaseRecord) -> Any:
        return getattr(record.outputs[index], statistic) if index < len(record.outputs) else None

    return CaseColumn(f"output_{index}_{statistic}", read_value)


def _make_generation_column(name: str, value: Callable[[StoredGeneration], Any], **shown: str) -> CaseColumn:
    return CaseColumn(name, lambda record: None if record.generation is None else value(record.generation), **shown)


def _make_time_column(name: str, field: str) -> CaseColumn:
    return _make_generation_column(name, lambda found: found.times and _convert_to_ms(getattr(found.times, field)))


def _find_worst_kl(generation: StoredGeneration) -> Any:
    worst = find_worst_position(generation)
    return None if worst is None else worst.kl


def _format_energy(found: EnergyMeasurement | None) -> str:
    """Return the energy of an inference and of tokens, or why it is refused."""
    return "; ".join(filter(None, (format_energy(found), format_token_energy(found)))) if found else ""


def _make_energy_column(number: int, name: str) -> CaseColumn:
    return CaseColumn(name, lambda record: list_energy(record.energy)[number])


COLUMNS: tuple[CaseColumn, ...] = (
    *_make_field_columns(
        "id", "suite", "model", "layer", "op", "flow", "runtime", "board", "hw_type", "outcome", "ended", "stage"
    ),
    *(_make_timing_column(one.name) for one in fields(Timings)),
    CaseColumn("device_p50_ms", lambda record: _convert_to_ms(record.device_p50_ns)),
    CaseColumn("device_p90_ms", lambda record: _convert_to_ms(record.device_p90_ns)),
    CaseColumn("iterations", lambda record: record.iterations or None, title="Iterations", unit="number"),
    CaseColumn("cold", lambda record: record.cold if record.iterations else None),
    CaseColumn("grade", lambda record: record.grade and record.grade.grade, title="Grade"),
    CaseColumn("grade_reasons", lambda record: "; ".join(record.grade.reasons) if record.grade else ""),
    *_make_field_columns("answers", "agentless"),
    CaseColumn("artifact_bytes", lambda record: record.artifact_bytes, title="Size", unit="bytes"),
    *_make_field_columns("cached"),
    _make_worst_column("worst_output", "name"),
    *(_make_worst_column(one.key, one.key) for one in STATISTICS if one.report),
    _make_worst_column("mismatches", "mismatches"),
    CaseColumn("plain_sqnr_db", lambda record: getattr(find_worst_output(record.plain_outputs), "sqnr_db", None)),
    *_make_field_columns("disagreement", "confirmed", "decided_by"),
    CaseColumn("reference", lambda record: format_reference(record.against, record.relation)),
    CaseColumn("unanswered", lambda record: "; ".join(map(format_unanswered, record.unanswered))),
    CaseColumn("evidence", lambda record: "; ".join(format_evidence(record))),
    CaseColumn("attempts", lambda record: len(record.attempts)),
    *_make_field_columns("message"),
)
# Compiler reports and test parameters. They are included only if the run contains any.
COMPILER_COLUMNS: tuple[CaseColumn, ...] = (
    CaseColumn("params", lambda record: _dump_sorted(record.params)),
    _make_delegation_column("delegated", lambda found: found.delegated_nodes > 0),
    _make_note_column("quantise_s"),
    _make_note_column("lower_s"),
    _make_delegation_column("delegated_nodes", lambda found: found.delegated_nodes),
    _make_delegation_column("undelegated_nodes", lambda found: found.undelegated_nodes),
    _make_delegation_column("delegated_ops", lambda found: _dump_sorted(found.delegated)),
    _make_delegation_column("undelegated_ops", lambda found: _dump_sorted(found.undelegated)),
    _make_note_column("program_bytes"),
    # outputs.csv has all outputs' statistics.
    *(_make_output_column(index, statistic) for index in range(2) for statistic in ("max_abs", "mean_abs", "sqnr_db")),
)


# Columns of energies. They are included only if the run contains any.
ENERGY_COLUMNS: tuple[CaseColumn, ...] = (
    *(_make_energy_column(number, name) for number, name in enumerate(ENERGY_VALUES)),
    CaseColumn("energy_refused", lambda record: record.energy and record.energy.refused),
    CaseColumn("energy", lambda record: _format_energy(record.energy), title="Energy"),
)


# Columns of prompts. They are included only if the run contains any.
GENERATION_COLUMNS: tuple[CaseColumn, ...] = (
    _make_generation_column("prompt_tokens", lambda found: sum(token >= 0 for token in found.prompt_tokens)),
    _make_generation_column("steps", lambda found: found.steps),
    _make_generation_column("first_divergent", lambda found: found.first_divergent),
    _make_generation_column("worst_kl", _find_worst_kl, title="Worst KL", unit="number"),
    _make_generation_column("kl_bound", lambda found: found.kl_bound),
    _make_generation_column("top1", lambda found: found.top1),
    _make_time_column("ttft_ms", "ttft_ns"),
    _make_time_column("host_ttft_ms", "host_ttft_ns"),
    _make_time_column("tpot_p50_ms", "tpot_p50_ns"),
    _make_time_column("tpot_p90_ms", "tpot_p90_ns"),
    _make_time_column("tpot_max_ms", "tpot_max_ns"),
    _make_generation_column("prefill_tokens_per_s", lambda found: found.times and found.times.prefill_tokens_per_s),
    _make_generation_column(
        "decode_tokens_per_s",
        lambda found: found.times and found.times.decode_tokens_per_s,
        title="Decode tokens/s",
        unit="number",
    ),
)


def list_columns(run: SuiteResults) -> tuple[CaseColumn, ...]:
    """Return the columns of a run's cases."""
    has_notes = any(record.notes or record.params for record in run.records)
    has_prompts = any(record.generation for record in run.records)
    has_energy = any(record.energy for record in run.records)
    return (
        COLUMNS
        + (ENERGY_COLUMNS if has_energy else ())
        + (GENERATION_COLUMNS if has_prompts else ())
        + (COMPILER_COLUMNS if has_notes else ())
    )


@dataclass(frozen=True)
class ResultTable:
    """Table of values as in records: numbers, texts, booleans, lists, and None for an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def make_case_table(run: SuiteResults) -> ResultTable:
    """Make a row per case with the columns from :func:`list_columns`."""
    columns = list_columns(run)
    rows = [[column.value(record) for column in columns] for record in run.records]
    return ResultTable([column.name for column in columns], rows)


def make_output_table(run: SuiteResults) -> ResultTable:
    """Make a row per output and reference.

    References are the flow's reference, additional references, and the reference for the model before the flow's
    recipe.
    """
    rows = []
    for record in run.records:
        for beside, against, outputs in (
            ("own", record.against, record.outputs),
            *(("other", other.against, other.outputs) for other in record.other_references),
            ("plain", record.plain_against, record.plain_outputs),
        ):
            for output in outputs:
                known = {**output.to_json(), **(output.tolerance.to_json() if output.tolerance else {})}
                known["criteria"] = "; ".join(map(format_criterion, output.criteria))
                known |= {"id": record.id, "beside": beside, "against": against}
                rows.append([known.get(name) for name in _OUTPUT])
    return ResultTable(_OUTPUT, rows)


def format_cases_csv(run: SuiteResults) -> str:
    """Write the table of cases as CSV."""
    table = make_case_table(run)
    return format_csv(table.columns, table.rows)


def format_outputs_csv(run: SuiteResults) -> str:
    """Write the table of outputs as CSV."""
    table = make_output_table(run)
    return format_csv(table.columns, table.rows)


def format_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_format_cell(name) for name in header])
    writer.writerows([_format_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _format_cell(value: Any) -> Any:
    """Convert a value for csv. True, False and None become "yes", "no" and "". Spreadsheet formulas are escaped."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return " ".join(str(_format_cell(one)) for one in value)
    if not isinstance(value, str) or value in ("inf", "-inf", "nan"):
        return value
    return as_text(make_plain(value))


def _convert_to_ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _dump_sorted(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(sorted(value.items()))) if value else ""
