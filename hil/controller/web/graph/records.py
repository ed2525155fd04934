"""Read data about a model's nodes in a common format, from runs, suites and bisections."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import RECORD
from hil.controller.web.files.kept import list_bases, own
from hil.controller.web.graph.models import NamedModel
from hil.controller.web.index.sessions import SELECT_CASES, IndexedSession, find_case
from hil.controller.web.readers import BISECT
from hil.controller.web.readers.analyses import read_model_digest
from hil.controller.web.readers.fields import MAX_BYTES, read_mapping, read_mappings
from hil.controller.web.session.records import profile_names
from hil.controller.workloads.suites.cases.model_scan import scan_models
from hil.controller.workloads.suites.request import BUILT_IN
from hil.controller.workloads.suites.store import HEAD
from hil.core.bounded_json import parse_json
from hil.core.files import open_file, read_file
from hil.core.json_values import read_string
from hil.core.text import replace_surrogates
from hil.errors import HilError, UsageError

# Maximum cases to read for a model in a suite. MAX_BYTES limits their records.
_MAX_CASES = 5000
# Maximum files to search in a suite's source directory.
_MAX_FILES = 20_000
_IMPORTED = "imported.mlir"


@dataclass(frozen=True)
class GraphRecord:
    """Model in a session."""

    session: IndexedSession
    case: str  # the whole model's case; "" if missing
    model: str
    named: NamedModel
    document: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()  # layer records in a suite
    group: str = "node"
    runtime: str = ""
    built_in: str = ""  # built-in suite that contains the model
    outputs: Any = ()  # the whole model's compared outputs
    placement: Any = ()
    profiles: Sequence[str] = ()
    imported: Path | None = None  # imported program's path, if stored
    ways: Sequence[str] = ()
    first_layer: str = ""  # a bisection's first wrong layer, isolated or else in the whole model


def read_graph_record(
    database: sqlite3.Connection, session: IndexedSession, case: str, roots: Sequence[Path], model: str = ""
) -> GraphRecord:
    """Read a session's record about a model.

    The model is selected by ``case`` or by the name ``model``. By default, the session's first model is used.

    Raises:
        UsageError: the session has no model, or the record is unreadable.
    """
    row = find_case(database, session, case) if case else _find_first_case(database, session, model)
    if session.kind == "bisect":
        return _read_bisect(session, roots)
    if row is None:
        raise UsageError(f"graph unavailable: {session.title} has no case{f' for model {model}' if model else ''}")
    if session.kind == "suite":
        return _read_suite(database, session, str(row["model"]), roots)
    if session.kind in ("run", "bench", "eval"):
        return _read_run(session, str(row["model"]), roots)
    raise UsageError(
        f"graph unavailable for a {session.kind}", hint="graphs are available for runs, suites and bisections"
    )


def _find_first_case(database: sqlite3.Connection, session: IndexedSession, model: str) -> sqlite3.Row | None:
    stem = model.removesuffix(".onnx")
    wanted = "and model in (select key from words where word in (?, ?))" if model else ""
    values = (session.key, stem, f"{stem}.onnx") if model else (session.key,)
    row: sqlite3.Row | None = database.execute(
        f"{SELECT_CASES} where session = ? {wanted} order by number limit 1", values
    ).fetchone()
    return row


def _read_run(session: IndexedSession, name: str, roots: Sequence[Path]) -> GraphRecord:
    document = _read_document(Path(session.folder) / RECORD)
    request = read_mapping(document.get("request"))
    record = next((one for one in read_mappings(document.get("cases")) if one.get("name") == name), {})
    model = read_mapping(record.get("model"))
    verdict = next(iter(read_mappings(record.get("verdicts"))), {})
    return GraphRecord(
        session,
        name,
        name,
        NamedModel(
            read_string(record.get("path")),
            read_string(model.get("digest")),
            _parse_dims(request),
            read_string(request.get("function")),
        ),
        runtime=read_string(read_mapping(record.get("artifact")).get("runtime")),
        outputs=verdict.get("outputs"),
        placement=read_mapping(record.get("provenance")).get("placement"),
        profiles=profile_names(Path(session.folder), record).get("run", ()),
        imported=_find_imported(read_string(request.get("debug_ir")), name, session, roots),
    )


def _read_bisect(session: IndexedSession, roots: Sequence[Path]) -> GraphRecord:
    document = _read_document(Path(session.folder) / BISECT)
    path = read_string(document.get("model"))
    layers = read_mappings(document.get("layers"))
    return GraphRecord(
        session,
        "",
        Path(path).name,
        NamedModel(path, read_model_digest(document)),
        document=document,
        runtime=read_string(document.get("runtime")),
        outputs=read_mapping(document.get("whole")).get("outputs"),
        first_layer=read_string(document.get("first_isolated")) or read_string(document.get("first_cumulative")),
        ways=[way for way in ("isolated", "cumulative") if any(read_mapping(one.get(way)) for one in layers)],
    )


def _read_suite(
    database: sqlite3.Connection, session: IndexedSession, model: str, roots: Sequence[Path]
) -> GraphRecord:
    folder = Path(session.folder)
    head = _read_document(folder / HEAD)
    request = read_mapping(head.get("request"))
    rows = database.execute(
        f"{SELECT_CASES} where session = ? and model = (select key from words where word = ?) order by number limit ?",
        (session.key, model, _MAX_CASES),
    ).fetchall()
    records = _read_lines(folder / session.lines, rows)
    whole = next((one for one in records if not one.get("layer")), {})
    name = read_string(whole.get("id"))
    settings = read_mapping(request.get("settings"))
    return GraphRecord(
        session,
        name,
        model,
        NamedModel(*_find_suite_model(head, model, folder, roots), dims=_parse_dims(request)),
        runtime=read_string(head.get("runtime")),
        built_in=_find_built_in_suite(head),
        cases=[one for one in records if one.get("layer")],
        group=read_string(request.get("group")) or "node",
        outputs=whole.get("outputs"),
        placement=whole.get("placement"),
        profiles=[str(folder / profile)]
        if (profile := read_string(read_mapping(whole.get("directories") or whole.get("left")).get("run profile")))
        else (),
        imported=_find_imported(read_string(settings.get("debug_ir")), name, session, roots),
    )


def _find_built_in_suite(head: Mapping[str, Any]) -> str:
    """Return the built-in suite's name for a run, or "" for user models. Records of built-in suites have no path."""
    name = read_string(head.get("suite"))
    return name if head.get("place") == "" and name in BUILT_IN.values() else ""


def _find_suite_model(head: Mapping[str, Any], model: str, folder: Path, roots: Sequence[Path]) -> tuple[str, str]:
    """Return a suite model's path and digest. The digest is missing in old records.

    The path is empty for a built-in suite, and if the suite's source is not served.
    """
    source, file = read_string(head.get("source")), read_mapping(read_mapping(head.get("models")).get(model))
    digest = read_string(file.get("digest"))
    if not source or _find_built_in_suite(head) or "\0" in source:
        return "", digest
    path = read_string(file.get("path"))
    there = path and "\0" not in path and any((start / path).is_file() for start in list_bases(folder, roots))
    return path if digest and there else _find_in_source(source, model, folder, roots), digest


def _find_in_source(source: str, model: str, folder: Path, roots: Sequence[Path]) -> str:
    """Return the file with the model's name in a suite's source."""
    for start in list_bases(folder, roots):
        place = start / source
        try:
            if not (any(own(root, place) for root in roots) and place.exists()):
                continue
            if (direct := place / f"{model}.onnx").is_file():
                return str(direct.absolute())
            found = {one.name: one.path for one in scan_models(place).models} if _is_small(place) else {}
        except (HilError, OSError, ValueError):
            continue
        if model in found:
            return str(found[model].absolute())
    return source


def _is_small(place: Path) -> bool:
    """Return True if a directory tree is small enough to search during a request."""
    left = _MAX_FILES
    for _, folders, files in os.walk(place):
        left -= len(folders) + len(files)
        if left < 0:
            return False
    return True


def _find_imported(folder: str, name: str, session: IndexedSession, roots: Sequence[Path]) -> Path | None:
    """Return the program that ``--debug-ir`` stored, if it is in a served directory."""
    if not folder or "\0" in folder:
        return None
    for start in list_bases(Path(session.folder), roots):
        for path in (start / folder / name / _IMPORTED, start / folder / _IMPORTED):
            if path.is_file() and any(own(root, path) for root in roots):
                return path
    return None


def _read_lines(path: Path, rows: Sequence[sqlite3.Row]) -> list[Mapping[str, Any]]:
    """Read records from a suite's lines file. Skip unreadable lines, and stop after MAX_BYTES."""
    found: list[Mapping[str, Any]] = []
    left = MAX_BYTES
    try:
        with open_file(path) as file:
            for row in rows:
                left -= row["length"]
                if left < 0:
                    break
                file.seek(row["place"])
                try:
                    record = _parse_record(file.read(row["length"]))
                except ValueError:
                    continue
                if isinstance(record, dict) and record.get("id") == row["name"]:
                    found.append(record)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from error
    return found


def _read_document(path: Path) -> Mapping[str, Any]:
    try:
        found = _parse_record(read_file(path, MAX_BYTES))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path.name} cannot be read: {error}") from error
    return found


def _parse_record(data: bytes) -> Any:
    """Parse JSON. Replace lone surrogates, which a page cannot encode, with question marks."""
    found = parse_json(data)
    return _replace_all_surrogates(found) if b"\\ud" in data.lower() else found


def _replace_all_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_replace_all_surrogates(key): _replace_all_surrogates(one) for key, one in value.items()}
    return [_replace_all_surrogates(one) for one in value] if isinstance(value, list) else value


def _parse_dims(request: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    dims = read_mapping(request.get("dims"))
    return tuple(sorted((name, size) for name, size in dims.items() if isinstance(size, int) and 0 <= size < 1 << 31))
