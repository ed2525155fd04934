"""Read bisections and studies. Their rows are cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.web.readers.fields import (
    read_common_fields,
    read_digests,
    read_mapping,
    read_mappings,
    read_statistics,
)
from hil.controller.web.text.entries import CaseEntry, SessionEntry, read_int, read_real, read_text, read_texts
from hil.controller.web.text.names import escape_name

Found = tuple[SessionEntry, list[CaseEntry]]
# Keys of the findings about the whole model: without changes, and with intermediate values exposed as outputs.
WHOLES = ("whole", "exposed")
_QUIET = ("", "PASS", "SKIP")


def iter_findings(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the name and operator of every layer and of the whole model, with the decisive finding.

    The decisive finding is the finding for the isolated layer. If the isolated layer passed, the finding within the
    whole model decides.
    """
    for layer in read_mappings(document.get("layers")):
        alone, within = read_mapping(layer.get("isolated")), read_mapping(layer.get("cumulative"))
        yield layer, within if within and read_text(alone.get("outcome")) in _QUIET else alone
    for name in WHOLES:
        if found := read_mapping(document.get(name)):
            yield {"name": name, "op": "model"}, found


def read_model_digest(document: Mapping[str, Any]) -> str:
    """Return the digest of a bisection's model, or "" for records of old versions."""
    return read_text(document.get("model_digest"))


def read_bisect(session_id: str, document: Mapping[str, Any]) -> Found:
    """Read a bisection: a case per layer, and a case for every run of the whole model."""
    board, runtime, flow = (read_text(document.get(name)) for name in ("board", "runtime", "flow"))
    file = PurePosixPath(read_text(document.get("model"))).name
    model = file.removesuffix(".onnx")  # the model's name in runs and suites
    cases = [
        CaseEntry(
            read_text(layer.get("name")),
            number,
            model=model,
            op=read_text(layer.get("op")),
            flow=flow,
            runtime=runtime,
            board=board,
            outcome=read_text(found.get("outcome")),
            stage=read_text(found.get("stage")),
            message=read_text(found.get("reason")),
            **read_statistics(found.get("outputs")),
        )
        for number, (layer, found) in enumerate(iter_findings(document))
    ]
    session = SessionEntry(
        session_id,
        "bisect",
        file or session_id,
        **read_common_fields(document),
        flow=flow,
        boards=read_texts([board]),
        runtimes=read_texts([runtime]),
        models=read_texts([model]),
        digests=read_digests([(model, read_model_digest(document))]),
        planned=len(cases),
    )
    return session, cases


def read_row_toolchain(row: Mapping[str, Any]) -> str:
    """Return the toolchain of a row of a study. The key was ``way`` before version 0.1."""
    return read_text(row.get("toolchain") or row.get("way"))


def make_row_name(row: Mapping[str, Any]) -> str:
    """Return the case name for a row of a study."""
    return read_text(f"{read_text(row.get('experiment'))} {read_row_toolchain(row)}".strip())


def read_study(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read a study: a case for every experiment and compiler."""
    rows = read_mappings(document.get("rows"))
    board = read_text(read_mapping(document.get("board")).get("name"))
    cases = []
    for number, row in enumerate(rows):
        worst = read_mapping(row.get("worst"))
        seconds = {
            read_text(one.get("name")): read_real(one.get("seconds")) for one in read_mappings(row.get("stages"))
        }
        spent = [value for value in seconds.values() if value is not None]
        cases.append(
            CaseEntry(
                make_row_name(row),
                number,
                model=read_text(row.get("experiment")),
                flow=read_row_toolchain(row),
                board=board,
                outcome=read_text(row.get("outcome")),
                stage=read_text(row.get("failed_stage")),
                message=read_text(row.get("message")),
                host_s=sum(spent) if spent else None,
                compile_s=seconds.get("compile"),
                program_bytes=read_int(row.get("bytes")),
                max_abs=read_real(worst.get("max_abs")),
                max_ulp=read_real(worst.get("max_ulp")),
            )
        )
    session = SessionEntry(
        session_id,
        "study",
        escape_name(folder.name) or session_id,
        **read_common_fields(document),
        boards=read_texts([board]),
        compilers=read_texts([row.get("compiler") for row in rows]),
        models=read_texts([case.model for case in cases]),
        planned=len(cases),
    )
    return session, cases
