"""Report on the traces of a module: a row per trace and a column per backend."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.records.suite import CaseRecord, make_case_record
from hil.controller.storage.runs import convert_write_errors, write_file
from hil.controller.workloads.matrix.files import write_matrix
from hil.controller.workloads.matrix.report import MatrixReport, TargetResults, make_empty_results
from hil.core.bounded_json import parse_json
from hil.core.files import read_file
from hil.errors import UsageError

# File in a reference trace's directory, with the other backends' results, one line per backend.
RESULTS = "results.jsonl"


def write_report(module: Path, reference: Path, records: Sequence[CaseRecord]) -> None:
    """Store the results of a trace, and rewrite the report on all the module's traces.

    The report contains the last comparison of every trace. With results from only one backend, no report is written.

    Args:
        module: the module's directory.
        reference: the directory of the reference's trace.
        records: one per backend; their directories are ``BACKEND/traces/TRACE``.

    Raises:
        StorageError: a file cannot be written.
    """
    with convert_write_errors(module):
        for before in module.glob(f"*/traces/{glob.escape(reference.name)}/{RESULTS}"):
            before.unlink()
    lines = [json.dumps(record.to_json()) for record in records]
    write_file(reference / RESULTS, "".join(f"{line}\n" for line in lines), option="")
    columns: dict[str, list[CaseRecord]] = {}
    for file in sorted(module.glob(f"*/traces/*/{RESULTS}")):
        for record in _read(file):
            columns.setdefault(record.folder.partition("/")[0], []).append(record)
    if len(columns) > 1 or (module / "matrix.html").exists():
        targets = [_make_target(module, name, found) for name, found in columns.items()]
        write_matrix(MatrixReport(records[0].model, targets), module)


def _read(file: Path) -> Iterator[CaseRecord]:
    try:
        yield from [make_case_record(parse_json(line)) for line in read_file(file).splitlines()]
    except (OSError, ValueError, UsageError):  # being written by a different process, or damaged
        return


def _make_target(module: Path, name: str, records: Sequence[CaseRecord]) -> TargetResults:
    first = records[0]
    run = replace(
        make_empty_results(module),
        suite=first.suite,
        flow=first.flow,
        runtime=first.runtime,
        boards=tuple(dict.fromkeys(one.board for one in records if one.board)),
        records=tuple(records),
    )
    return TargetResults(name, run)
