"""What a module's traces came to: a report with a trace a row and a backend a column, beside its artifacts."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.storage.runs import storing, write_file
from hil.controller.workloads.matrix.files import write_matrix
from hil.controller.workloads.matrix.report import MatrixReport, TargetResults, nothing_of
from hil.controller.workloads.suites.store import CaseRecord
from hil.core.text import jsonable

# Beside the reference's trace: what the trace came to, a line a backend.
RESULTS = "results.jsonl"


def write_report(module: Path, reference: Path, records: Sequence[CaseRecord]) -> None:
    """Keep what a trace came to, and write the report of all of the module's traces anew.

    Each trace has the backends that it was last compared on. Where all that makes one backend there is no report.

    Args:
        module: the module's folder.
        reference: the folder of the reference's trace.
        records: of each backend; their folders are ``BACKEND/traces/TRACE``.

    Raises:
        StorageError: something cannot be written.
    """
    with storing(module):
        for before in module.glob(f"*/traces/{glob.escape(reference.name)}/{RESULTS}"):
            before.unlink()
    lines = [json.dumps(jsonable(record.to_json())) for record in records]
    write_file(reference / RESULTS, "".join(f"{line}\n" for line in lines), option="")
    columns: dict[str, list[CaseRecord]] = {}
    for file in sorted(module.glob(f"*/traces/*/{RESULTS}")):
        for record in _read(file):
            columns.setdefault(record.folder.partition("/")[0], []).append(record)
    if len(columns) > 1 or (module / "matrix.html").exists():
        targets = [_target(module, name, found) for name, found in columns.items()]
        write_matrix(MatrixReport(records[0].model, targets), module)


def _read(file: Path) -> Iterator[CaseRecord]:
    try:
        yield from [CaseRecord.of_json(json.loads(line)) for line in file.read_text().splitlines()]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # another process writes, or it is damaged
        return


def _target(module: Path, name: str, records: Sequence[CaseRecord]) -> TargetResults:
    first = records[0]
    run = replace(
        nothing_of(module),
        suite=first.suite,
        flow=first.flow,
        runtime=first.runtime,
        boards=tuple(dict.fromkeys(one.board for one in records if one.board)),
        records=tuple(records),
    )
    return TargetResults(name, run)
