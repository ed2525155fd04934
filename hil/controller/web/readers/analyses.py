"""Bisections and studies: their rows are cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.web.entries import CaseEntry, SessionEntry, real, text, texts, whole
from hil.controller.web.names import said
from hil.controller.web.readers.fields import common, digests, mapping, mappings, statistics

Found = tuple[SessionEntry, list[CaseEntry]]
# The findings of a bisection that are of the model as a whole: as it is, and with its intermediates as outputs.
WHOLES = ("whole", "exposed")
_QUIET = ("", "PASS", "SKIP")


def findings(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """What a bisection has of each layer and of the whole: name and operator, and the finding that decides.

    That is the layer's own; or, where that is all right, the one within the whole model.
    """
    for layer in mappings(document.get("layers")):
        alone, within = mapping(layer.get("isolated")), mapping(layer.get("cumulative"))
        yield layer, within if within and text(alone.get("outcome")) in _QUIET else alone
    for name in WHOLES:
        if found := mapping(document.get(name)):
            yield {"name": name, "op": "model"}, found


def model_digest(document: Mapping[str, Any]) -> str:
    """The digest of a bisection's model; "" where its record is from before it had one."""
    return text(document.get("model_digest"))


def read_bisect(session_id: str, document: Mapping[str, Any]) -> Found:
    """A bisection: a case a layer, and one for each way in which the whole model ran."""
    board, runtime, flow = (text(document.get(name)) for name in ("board", "runtime", "flow"))
    file = PurePosixPath(text(document.get("model"))).name
    model = file.removesuffix(".onnx")  # as runs and suites call it
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


def row_name(row: Mapping[str, Any]) -> str:
    """What the case of a study's row is called."""
    return text(f"{text(row.get('experiment'))} {text(row.get('way'))}".strip())


def read_study(session_id: str, folder: Path, document: Mapping[str, Any]) -> Found:
    """A study: a case for each experiment and compiler."""
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
                flow=text(row.get("way")),
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
