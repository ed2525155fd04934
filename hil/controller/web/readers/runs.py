"""Read runs and benches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.storage.runs import RECORD
from hil.controller.web.readers.commands import command_of_run
from hil.controller.web.readers.fields import (
    common,
    digests,
    listed,
    mapping,
    mappings,
    read_document,
    read_grade,
    statistics,
    times,
)
from hil.controller.web.text.entries import CaseEntry, SessionEntry, real, text, texts, whole
from hil.controller.web.text.names import said

Found = tuple[SessionEntry, list[CaseEntry]]


def read_run(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read a run of models, of a bundle or of a trace."""
    found = mappings(document.get("cases"))
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
    for number, (name, side) in enumerate(named_sides(document)):
        cases.append(_read_side_case(side, number, name, known.get(text(side.get("name")))))
    # While the first side compiles, the bench does not list sides yet.
    cases = cases or list(known.values())
    merged = {**run, **document}
    return _make_session(session_id, "bench", folder, merged, cases, mappings(run.get("cases"))), cases


def read_evaluation(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read an evaluation. Its only case has the outcome of the evaluation."""
    try:
        run = read_document(folder / RECORD)
    except (OSError, ValueError):
        run = {}
    merged, cases = {**run, **document}, _read_run_cases(run)
    return _make_session(session_id, "eval", folder, merged, cases, mappings(run.get("cases"))), cases


def named_sides(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return a bench's sides with unique case names.

    A name consists of the model and the prompt. If the name already exists, the label and a number are added.
    """
    found: dict[str, Mapping[str, Any]] = {}
    counts: Counter[str] = Counter()
    for side in mappings(document.get("sides")):
        model = text(PurePosixPath(text(side.get("model"))).stem) or text(side.get("name"))
        name = f"{model} {text(mapping(side.get('generation')).get('prompt'))}".strip()
        labelled = f"{name} {text(side.get('label'))}".strip()
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
        text(", ".join(dict.fromkeys(models))) or said(folder.name),
        **{**common(document), "command": command_of_run(document)},
        boards=texts([mapping(document.get("board")).get("name"), *(case.board for case in cases)]),
        runtimes=texts([case.runtime for case in cases]),
        compilers=texts([mapping(one.get("artifact")).get("compiler") for one in records]),
        models=texts(models),
        versions=_read_versions(document),
        digests=digests((one.get("name"), mapping(one.get("model")).get("digest")) for one in records),
        planned=max(len(listed(mapping(document.get("request")).get("models"))), len(cases)),
    )


def _read_versions(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the agent and runtimes that the board reported."""
    info = mapping(mapping(document.get("board")).get("info"))
    found = {"agent": text(info.get("agent_version"))}
    for one in mappings(info.get("runtimes"))[:32]:
        found[text(one.get("name"))] = text(one.get("version"))
    return {name: version for name, version in found.items() if version}


def _read_run_cases(document: Mapping[str, Any]) -> list[CaseEntry]:
    board, created = text(mapping(document.get("board")).get("name")), real(document.get("created"))
    return [_read_run_case(one, number, board, created) for number, one in enumerate(mappings(document.get("cases")))]


def _read_run_case(record: Mapping[str, Any], number: int, board: str, created: float | None) -> CaseEntry:
    device, artifact = mapping(record.get("device")), mapping(record.get("artifact"))
    # The first reference determines the verdict.
    verdict = next(iter(mappings(record.get("verdicts"))), {})
    iterations = whole(device.get("iterations")) or 0
    return CaseEntry(
        text(record.get("name")),
        number,
        model=text(record.get("name")),
        runtime=text(artifact.get("runtime")),
        board=text(mapping(record.get("provenance")).get("board")) or board,
        outcome=text(record.get("outcome")),
        stage=text(record.get("stage")),
        message=text(record.get("reason")),
        device_p50_ns=real(device.get("p50_ns")),
        device_p90_ns=real(device.get("p90_ns")),
        iterations=iterations,
        cold=device.get("cold_ns") is not None and iterations == 1,
        grade=read_grade(record),
        program_bytes=whole(artifact.get("bytes")),
        started=created,
        **times(mapping(record.get("timings"))),
        **statistics(verdict.get("outputs")),
    )


def _read_side_case(side: Mapping[str, Any], number: int, name: str, known: CaseEntry | None) -> CaseEntry:
    measured = mapping(side.get("times"))
    return replace(
        known or CaseEntry(name, number),
        name=name,
        number=number,
        model=text(PurePosixPath(text(side.get("model"))).stem) or text(side.get("name")),
        runtime=text(side.get("runtime")),
        board=text(side.get("board")),
        outcome=text(side.get("outcome")),
        message=text(side.get("reason")),
        device_p50_ns=real(measured.get("p50_ns")),
        device_p90_ns=real(measured.get("p90_ns")),
        iterations=whole(measured.get("iterations")) or 0,
        cold=False,
        grade=read_grade(side),
        **times(mapping(side.get("timings"))),
    )
