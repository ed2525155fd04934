"""Read bisections and studies. Their rows are cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.web.readers.fields import common, digests, mapping, mappings, statistics
from hil.controller.web.text.entries import CaseEntry, SessionEntry, real, text, texts, whole
from hil.controller.web.text.names import said

Found = tuple[SessionEntry, list[CaseEntry]]
# Keys of the findings about the whole model: without changes, and with intermediate values exposed as outputs.
WHOLES = ("whole", "exposed")
_QUIET = ("", "PASS", "SKIP")


def findings(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the name and operator of every layer and of the whole model, with the decisive finding.

    The decisive finding is the finding for the isolated layer. If the isolated layer passed, the finding within the
    whole model decides.
    """
    for layer in mappings(document.get("layers")):
        alone, within = mapping(layer.get("isolated")), mapping(layer.get("cumulative"))
        yield layer, within if within and text(alone.get("outcome")) in _QUIET else alone
    for name in WHOLES:
        if found := mapping(document.get(name)):
            yield {"name": name, "op": "model"}, found


def model_digest(document: Mapping[str, Any]) -> str:
    """Return the digest of a bisection's model, or "" for records of old versions."""
    return text(document.get("model_digest"))


def read_bisect(session_id: str, document: Mapping[str, Any]) -> Found:
    """Read a bisection: a case per layer, and a case for every run of the whole model."""
    board, runtime, flow = (text(document.get(name)) for name in ("board", "runtime", "flow"))
    file = PurePosixPath(text(document.get("model"))).name
    model = file.removesuffix(".onnx")  # the model's name in runs and suites
    cases = [
        CaseEntry(
            text(layer.get("name")),
            number,
            model=model,
            op=text(layer.get("op")),
            flow=flow,
            runtime=runtime,
            board=board,
            outcome=text(found.get("outcome")),
            stage=text(found.get("stage")),
            message=text(found.get("reason")),
            **statistics(found.get("outputs")),
        )
        for number, (layer, found) in enumerate(findings(document))
    ]
    session = SessionEntry(
        session_id,
        "bisect",
        file or session_id,
        **common(document),
        flow=flow,
        boards=texts([board]),
        runtimes=texts([runtime]),
        models=texts([model]),
        digests=digests([(model, model_digest(document))]),
        planned=len(cases),
    )
    return session, cases


def row_toolchain(row: Mapping[str, Any]) -> str:
    """Return the toolchain of a row of a study. The key was ``way`` before version 0.1."""
    return text(row.get("toolchain") or row.get("way"))


def row_name(row: Mapping[str, Any]) -> str:
    """Return the case name for a row of a study."""
    return text(f"{text(row.get('experiment'))} {row_toolchain(row)}".strip())


def read_study(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """Read a study: a case for every experiment and compiler."""
    rows = mappings(document.get("rows"))
    board = text(mapping(document.get("board")).get("name"))
    cases = []
    for number, row in enumerate(rows):
        worst = mapping(row.get("worst"))
        seconds = {text(one.get("name")): real(one.get("seconds")) for one in mappings(row.get("stages"))}
        spent = [value for value in seconds.values() if value is not None]
        cases.append(
            CaseEntry(
                row_name(row),
                number,
                model=text(row.get("experiment")),
                flow=row_toolchain(row),
                board=board,
                outcome=text(row.get("outcome")),
                stage=text(row.get("failed_stage")),
                message=text(row.get("message")),
                host_s=sum(spent) if spent else None,
                compile_s=seconds.get("compile"),
                program_bytes=whole(row.get("bytes")),
                max_abs=real(worst.get("max_abs")),
                max_ulp=real(worst.get("max_ulp")),
            )
        )
    session = SessionEntry(
        session_id,
        "study",
        said(folder.name) or session_id,
        **common(document),
        boards=texts([board]),
        compilers=texts([row.get("compiler") for row in rows]),
        models=texts([case.model for case in cases]),
        planned=len(cases),
    )
    return session, cases
