"""Read runs and benches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.storage.runs import RECORD
from hil.controller.web.readers.commands import make_run_command
from hil.controller.web.readers.fields import (
    read_common_fields,
    read_digests,
    read_document,
    read_grade,
    read_joules,
    read_list,
    read_mapping,
    read_mappings,
    read_statistics,
    read_times,
)
from hil.controller.web.text.entries import CaseEntry, SessionEntry, read_int, read_real, read_text, read_texts
from hil.controller.web.text.names import escape_name
from hil.core.stack_config import MAX_PARTS

Found = tuple[SessionEntry, list[CaseEntry]]


def read_run(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read a run of models, of a bundle or of a trace."""
    found = read_mappings(document.get("cases"))
    cases = _read_run_cases(document)
    return _make_session(session_id, "run", folder, document, cases, found), cases


def read_bench(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read a bench. Each side is a case, completed with the values of the bench's run record."""
    try:
        run = read_document(folder / RECORD)
    except (OSError, ValueError):
        run = {}
    known = {case.name: case for case in _read_run_cases(run)}
    cases: list[CaseEntry] = []
    for number, (name, side) in enumerate(name_sides(document)):
        cases.append(_read_side_case(side, number, name, known.get(read_text(side.get("name")))))
    # While the first side compiles, the bench does not list sides yet.
    cases = cases or list(known.values())
    merged = {**run, **document}
    return _make_session(session_id, "bench", folder, merged, cases, read_mappings(run.get("cases"))), cases


def read_evaluation(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read an evaluation. Its only case has the outcome of the evaluation."""
    try:
        run = read_document(folder / RECORD)
    except (OSError, ValueError):
        run = {}
    merged, cases = {**run, **document}, _read_run_cases(run)
    return _make_session(session_id, "eval", folder, merged, cases, read_mappings(run.get("cases"))), cases


def name_sides(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return a bench's sides with unique case names.

    A name consists of the model and the prompt. If the name already exists, the label and a number are added.
    """
    found: dict[str, Mapping[str, Any]] = {}
    counts: Counter[str] = Counter()
    for side in read_mappings(document.get("sides")):
        model = read_text(PurePosixPath(read_text(side.get("model"))).stem) or read_text(side.get("name"))
        name = f"{model} {read_text(read_mapping(side.get('generation')).get('prompt'))}".strip()
        labelled = f"{name} {read_text(side.get('label'))}".strip()
        while name in found:
            counts[labelled] += 1
            name = labelled if counts[labelled] == 1 else f"{labelled} {counts[labelled]}"
        found[name] = side
    return list(found.items())


def _make_session(
    session_id: str,
    kind: str,
    folder: Path,
    document: Mapping[str, Any],
    cases: list[CaseEntry],
    records: list[Mapping[str, Any]],
) -> SessionEntry:
    models = [case.model for case in cases]
    return SessionEntry(
        session_id,
        kind,
        read_text(", ".join(dict.fromkeys(models))) or escape_name(folder.name),
        **{**read_common_fields(document), "command": make_run_command(document)},
        boards=read_texts([read_mapping(document.get("board")).get("name"), *(case.board for case in cases)]),
        runtimes=read_texts([case.runtime for case in cases]),
        compilers=read_texts([read_mapping(one.get("artifact")).get("compiler") for one in records]),
        models=read_texts(models),
        versions=_read_versions(document),
        stack=_read_stack(document),
        digests=read_digests((one.get("name"), read_mapping(one.get("model")).get("digest")) for one in records),
        planned=max(len(read_list(read_mapping(document.get("request")).get("models"))), len(cases)),
    )


def _read_versions(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the agent and runtimes that the board reported."""
    info = read_mapping(read_mapping(document.get("board")).get("info"))
    found = {"agent": read_text(info.get("agent_version"))}
    for one in read_mappings(info.get("runtimes"))[:32]:
        found[read_text(one.get("name"))] = read_text(one.get("version"))
    return {name: version for name, version in found.items() if version}


def _read_stack(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the versions of the parts of the board's stack; None for a record without a stack."""
    parts = read_mappings(read_mapping(read_mapping(document.get("board")).get("info")).get("stack"))[:MAX_PARTS]
    return {read_text(one.get("name")): read_text(one.get("version")) for one in parts} or None


def _read_run_cases(document: Mapping[str, Any]) -> list[CaseEntry]:
    board, created = read_text(read_mapping(document.get("board")).get("name")), read_real(document.get("created"))
    return [
        _read_run_case(one, number, board, created) for number, one in enumerate(read_mappings(document.get("cases")))
    ]


def _read_run_case(record: Mapping[str, Any], number: int, board: str, created: float | None) -> CaseEntry:
    device, artifact = read_mapping(record.get("device")), read_mapping(record.get("artifact"))
    # The first reference determines the verdict.
    verdict = next(iter(read_mappings(record.get("verdicts"))), {})
    iterations = read_int(device.get("iterations")) or 0
    return CaseEntry(
        read_text(record.get("name")),
        number,
        model=read_text(record.get("name")),
        runtime=read_text(artifact.get("runtime")),
        board=read_text(read_mapping(record.get("provenance")).get("board")) or board,
        outcome=read_text(record.get("outcome")),
        stage=read_text(record.get("stage")),
        message=read_text(record.get("reason")),
        device_p50_ns=read_real(device.get("p50_ns")),
        device_p90_ns=read_real(device.get("p90_ns")),
        iterations=iterations,
        cold=device.get("cold_ns") is not None and iterations == 1,
        grade=read_grade(record),
        joules=read_joules(record),
        program_bytes=read_int(artifact.get("bytes")),
        started=created,
        **read_times(read_mapping(record.get("timings"))),
        **read_statistics(verdict.get("outputs")),
    )


def _read_side_case(side: Mapping[str, Any], number: int, name: str, known: CaseEntry | None) -> CaseEntry:
    measured = read_mapping(side.get("times"))
    return replace(
        known or CaseEntry(name, number),
        name=name,
        number=number,
        model=read_text(PurePosixPath(read_text(side.get("model"))).stem) or read_text(side.get("name")),
        runtime=read_text(side.get("runtime")),
        board=read_text(side.get("board")),
        outcome=read_text(side.get("outcome")),
        message=read_text(side.get("reason")),
        device_p50_ns=read_real(measured.get("p50_ns")),
        device_p90_ns=read_real(measured.get("p90_ns")),
        iterations=read_int(measured.get("iterations")) or 0,
        cold=False,
        grade=read_grade(side),
        joules=read_joules(side),
        **read_times(read_mapping(side.get("timings"))),
    )
