"""Read suite runs: one record for the run, and a line for every completed case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hil.controller.web.readers.commands import make_suite_command
from hil.controller.web.readers.fields import (
    read_common_fields,
    read_digests,
    read_grade,
    read_joules,
    read_mapping,
    read_statistics,
    read_times,
)
from hil.controller.web.text.entries import (
    CaseEntry,
    SessionEntry,
    parse_program_number,
    read_int,
    read_real,
    read_text,
    read_texts,
)
from hil.controller.workloads.suites.store import LINES
from hil.core.bounded_json import parse_json
from hil.core.files import open_file
from hil.errors import UsageError

# Longer lines are treated as damaged.
MAX_LINE = 32 << 20
_VERSIONS = 64
# Package with the compiler version for each runtime, among the packages that suites record.
_COMPILERS = {"iree": "iree-base-compiler", "onnxruntime": "onnxruntime", "executorch": "executorch"}


def read_suite(session_id: str, head: Mapping[str, Any]) -> SessionEntry:
    """Read a suite run without its cases, which are in a separate lines file."""
    suite, flow, runtime = (read_text(head.get(name)) for name in ("suite", "flow", "runtime"))
    told = list(read_mapping(head.get("versions")).items())[:_VERSIONS]
    versions = {read_text(key): read_text(value) for key, value in told}
    compiler = versions.get(_COMPILERS.get(runtime, ""), "")
    ids = head.get("ids")
    return SessionEntry(
        session_id,
        "suite",
        read_text(" · ".join(filter(None, (suite, flow)))) or session_id,
        **{
            **read_common_fields(head),
            "created": read_real(head.get("started")),
            "finished": head.get("finished") is not None and not head.get("interrupted"),
            "command": make_suite_command(head),
        },
        suite=suite,
        place=read_text(head.get("place")),
        flow=flow,
        boards=read_texts(head.get("boards")),
        runtimes=read_texts([runtime]),
        compilers=(f"{runtime} {compiler}",) if compiler else (),
        versions=versions,
        digests=read_digests(
            (name, read_mapping(one).get("digest")) for name, one in read_mapping(head.get("models")).items()
        ),
        planned=len(ids) if isinstance(ids, list) else 0,
        lines=LINES,
    )


def read_lines(path: Path, start: int, first_number: int) -> Iterator[tuple[CaseEntry | None, int]]:
    """Yield the cases of a suite's lines file from a byte offset, each with the offset after its line.

    The case is None if the line is unreadable. An incomplete last line is skipped: the suite may still be writing.
    """
    try:
        file = open_file(path)
    except (OSError, UsageError):
        return
    with file:
        file.seek(start)
        place, number = start, first_number
        while line := file.readline(MAX_LINE):
            entry = None
            if not line.endswith(b"\n"):
                length = _skip_line(file)
                if length is None:
                    return
                length += len(line)
            else:
                entry, length = _parse_case(line, number, place), len(line)
            place += length
            number += 1
            yield entry, place


def _skip_line(file: BinaryIO) -> int | None:
    """Return the length of the rest of an oversized line, or None if the line is incomplete."""
    length = 0
    while part := file.readline(MAX_LINE):
        length += len(part)
        if part.endswith(b"\n"):
            return length
    return None


def _parse_case(line: bytes, number: int, place: int) -> CaseEntry | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    return CaseEntry(
        read_text(record["id"]),
        number,
        op=read_text(record.get("op")),
        outcome=read_text(record.get("outcome")),
        ended=read_text(record.get("ended")),
        device_p50_ns=read_real(record.get("device_p50_ns")),
        device_p90_ns=read_real(record.get("device_p90_ns")),
        iterations=read_int(record.get("iterations")) or 0,
        cold=record.get("cold") is True,
        grade=read_grade(record),
        joules=read_joules(record),
        program_bytes=read_int(record.get("artifact_bytes")),
        program=parse_program_number(record.get("program")),
        started=read_real(record.get("started")),
        place=place,
        length=len(line),
        model=read_text(record.get("model")),
        flow=read_text(record.get("flow")),
        runtime=read_text(record.get("runtime")),
        board=read_text(record.get("board")),
        stage=read_text(record.get("stage")),
        message=read_text(record.get("message")),
        **read_times(read_mapping(record.get("timings"))),
        **read_statistics(record.get("outputs")),
    )
