"""Read suite runs: one record for the run, and a line for each completed case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hil.controller.web.readers.commands import command_of_suite
from hil.controller.web.readers.fields import common, digests, mapping, read_grade, statistics, times
from hil.controller.web.text.entries import CaseEntry, SessionEntry, program_number, real, text, texts, whole
from hil.controller.workloads.suites.store import LINES
from hil.core.bounded_json import parse_json
from hil.core.files import open_file
from hil.errors import UsageError

# Longer lines are treated as damaged.
MOST_LINE = 32 << 20
_VERSIONS = 64
# Package with the compiler version for each runtime, among the packages that suites record.
_COMPILERS = {"iree": "iree-base-compiler", "onnxruntime": "onnxruntime", "executorch": "executorch"}


def read_suite(session_id: str, head: Mapping[str, Any]) -> SessionEntry:
    """Read a suite run without its cases, which are in a separate lines file."""
    suite, flow, runtime = (text(head.get(name)) for name in ("suite", "flow", "runtime"))
    told = list(mapping(head.get("versions")).items())[:_VERSIONS]
    versions = {text(key): text(value) for key, value in told}
    compiler = versions.get(_COMPILERS.get(runtime, ""), "")
    ids = head.get("ids")
    return SessionEntry(
        session_id,
        "suite",
        text(" · ".join(filter(None, (suite, flow)))) or session_id,
        **{
            **common(head),
            "created": real(head.get("started")),
            "finished": head.get("finished") is not None and not head.get("interrupted"),
            "command": command_of_suite(head),
        },
        suite=suite,
        place=text(head.get("place")),
        flow=flow,
        boards=texts(head.get("boards")),
        runtimes=texts([runtime]),
        compilers=(f"{runtime} {compiler}",) if compiler else (),
        versions=versions,
        digests=digests((name, mapping(one).get("digest")) for name, one in mapping(head.get("models")).items()),
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
        while line := file.readline(MOST_LINE):
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
    while part := file.readline(MOST_LINE):
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
        text(record["id"]),
        number,
        op=text(record.get("op")),
        outcome=text(record.get("outcome")),
        ended=text(record.get("ended")),
        device_p50_ns=real(record.get("device_p50_ns")),
        device_p90_ns=real(record.get("device_p90_ns")),
        iterations=whole(record.get("iterations")) or 0,
        cold=record.get("cold") is True,
        grade=read_grade(record),
        program_bytes=whole(record.get("artifact_bytes")),
        program=program_number(record.get("program")),
        started=real(record.get("started")),
        place=place,
        length=len(line),
        model=text(record.get("model")),
        flow=text(record.get("flow")),
        runtime=text(record.get("runtime")),
        board=text(record.get("board")),
        stage=text(record.get("stage")),
        message=text(record.get("message")),
        **times(mapping(record.get("timings"))),
        **statistics(record.get("outputs")),
    )
