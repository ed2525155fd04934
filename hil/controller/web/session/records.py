"""Read the whole record of a case for a page, in the same format for all kinds of sessions."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.pipeline.records.energy_text import describe_energy
from hil.controller.pipeline.records.evidence import list_case_evidence, list_evidence
from hil.controller.records.base import make_record
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.run import make_run_case
from hil.controller.records.suite import make_case_record
from hil.controller.storage.runs import RECORD
from hil.controller.web.files.kept import KeptFile, list_kept_files, list_logs
from hil.controller.web.files.kept import own as own
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.readers import BENCH, BISECT, STUDY, TRACE
from hil.controller.web.readers.analyses import iter_findings, make_row_name, read_row_toolchain
from hil.controller.web.readers.commands import make_run_command
from hil.controller.web.readers.fields import (
    MAX_BYTES,
    read_document,
    read_grade,
    read_list,
    read_mapping,
    read_mappings,
)
from hil.controller.web.readers.runs import name_sides
from hil.controller.web.readers.traces import CALL, map_output_names, read_compared_calls, read_comparison
from hil.controller.web.session.generation import GenerationView, view_generation
from hil.controller.web.session.provenance import (
    Facts,
    list_layer_facts,
    list_line_facts,
    list_row_facts,
    list_run_facts,
)
from hil.controller.web.text.entries import read_int, read_real, read_text, read_texts
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.suites.store import HEAD
from hil.controller.workloads.traces.trace import call_name
from hil.core.bounded_json import parse_json
from hil.core.files import open_file
from hil.errors import UsageError

R = TypeVar("R")
# Maximum characters of a record to show as JSON.
_SHOWN_CHARS = 200_000
# Maximum outputs, attempts and similar entries of a case.
_ROWS = 500


@dataclass(frozen=True)
class TensorFile:
    """Stored tensor of a case."""

    kind: str  # inputs, outputs, references; further references: references-1, ..., plain_references
    name: str
    path: Path
    dtype: str = ""  # hil's dtype, because .npy does not support all of them; "" uses the file's dtype


# Maximum references to look for.
_REFERENCES = 10
# Directory with reference outputs of the original model, before the flow changes the model.
PLAIN_REFERENCES = "plain_references"


@dataclass(frozen=True)
class OtherComparison:
    """Comparison with a reference that does not determine the verdict."""

    against: str
    outcome: str
    outputs: Sequence[Mapping[str, Any]] = ()
    reason: str = ""


@dataclass(frozen=True)
class CaseDetail:
    """Complete stored data of a case."""

    record: Mapping[str, Any]
    outputs: Sequence[Mapping[str, Any]] = ()  # comparison of each output with the decisive reference
    against: str = ""
    hint: str = ""
    detail: str = ""
    timings: Mapping[str, float | None] = field(default_factory=dict)
    repeat: str = ""  # command that repeats the case
    diff: str = ""  # command that shows the difference
    tensors: Sequence[TensorFile] = ()
    logs: Sequence[Path] = ()
    # Kind of profile (run, compile) -> recorded directories, for `profiles.named_profiles`.
    profiles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    facts: Facts = ()  # provenance as names and values
    others: Sequence[OtherComparison] = ()  # other references, including failed ones
    disagreement: str = ""  # description of a disagreement between references
    evidence: Facts = ()  # basis of the verdict
    generation: GenerationView | None = None  # generation of a case with --generate
    attempts: Sequence[Mapping[str, str]] = ()  # earlier attempts and confirmation runs
    confirmed: str = ""
    expectation: Mapping[str, str] = field(default_factory=dict)
    kept: Sequence[KeptFile] = ()  # other files of the case

    @property
    def grade(self) -> str:
        """Grade of the times with its reasons; "" for A or without a grade."""
        grade = read_grade(self.record)
        reasons = read_texts(read_mapping(self.record.get("grade")).get("reasons"))
        return f"{grade}: {'; '.join(reasons)}" if grade and reasons else ""

    @property
    def energy(self) -> Facts:
        """The energy of the case, or why it was refused; empty if it was not measured."""
        try:
            return describe_energy(make_record(self.record["energy"], EnergyMeasurement))
        except (KeyError, UsageError):
            return ()

    @property
    def short_record(self) -> Mapping[str, Any] | None:
        """The record, or None if it exceeds :data:`_SHOWN_CHARS` characters as JSON."""
        try:
            return self.record if len(json.dumps(self.record)) <= _SHOWN_CHARS else None
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """The record as JSON, cut to :data:`_SHOWN_CHARS`."""
        try:
            found = json.dumps(self.record, indent=1, ensure_ascii=False)
        except (ValueError, RecursionError):
            return "the nesting of the record exceeds the limit for pages"
        return found if len(found) <= _SHOWN_CHARS else f"{found[:_SHOWN_CHARS]}\n... {len(found)} characters in total"


def read_detail(session: IndexedSession, case: sqlite3.Row) -> CaseDetail:
    """Read a case's record. Raises UsageError if the record is missing or unreadable."""
    folder, name = Path(session.folder), str(case["name"])
    if session.lines:
        return _read_line_detail(folder, _read_line(folder / session.lines, case["place"], case["length"], name))
    if session.kind == "bisect":
        return _read_layer_detail(folder, _read_record(folder / BISECT), name)
    if session.kind == "study":
        return _read_row_detail(folder, _read_record(folder / STUDY), name)
    if session.kind == "trace":
        return _read_call_detail(folder, case["number"], session)
    if session.kind == "bench" and (folder / BENCH).exists():
        return _read_side_detail(folder, _read_record(folder / BENCH), name)
    return _read_run_detail(folder, _read_record(folder / RECORD), name)


def _read_line(path: Path, place: int, length: int, name: str) -> Mapping[str, Any]:
    if length > MAX_BYTES:
        raise UsageError(f"the record of {name} exceeds the size limit for pages: {length} bytes")
    try:
        with open_file(path) as file:
            file.seek(place)
            record = parse_json(file.read(length))
        if read_text(record["id"]) != name:
            raise ValueError("the file has changed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the record of {name} cannot be read: {error}", hint="reload the page") from error
    return dict(record)


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        return read_document(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.name} cannot be read: {error}") from error


def _read_line_detail(folder: Path, record: Mapping[str, Any]) -> CaseDetail:
    named = read_text(record.get("folder"))
    place = folder / named if named and own(folder, folder / named) else None
    outputs = _parse_outputs(record.get("outputs"))
    try:
        head = read_document(folder / HEAD)
    except (OSError, ValueError):
        head = {}
    stored = read_mapping(record.get("directories") or record.get("left"))  # the key before version 0.1 was ``left``
    directories = {read_text(what): read_text(where) for what, where in stored.items() if read_text(where)}
    profiles = [what for what in directories if what.endswith(" profile")]
    others = [_parse_other_verdict(one) for one in read_mappings(record.get("other_references"))]
    plain = _parse_outputs(record.get("plain_outputs"))
    if plain:
        against = f"{read_text(record.get('plain_against'))}, the model before the flow's recipe"
        others.append(OtherComparison(against, "", plain))
    return CaseDetail(
        record,
        outputs=outputs,
        against=read_text(record.get("against")),
        hint=str(record.get("hint") or ""),
        detail=str(record.get("detail") or ""),
        timings=_parse_seconds(record.get("timings")),
        repeat=str(record.get("repeat") or ""),
        diff=str(record.get("diff") or ""),
        tensors=_find_tensors(place, outputs),
        logs=list_logs(folder, place) if place else (),
        profiles={what.removesuffix(" profile"): [str(folder / directories[what])] for what in profiles},
        facts=list_line_facts(record, head),
        others=others,
        disagreement=read_text(record.get("disagreement")),
        evidence=_find_evidence(record, make_case_record, list_evidence),
        generation=view_generation(record.get("generation")),
        attempts=[_parse_texts(one) for one in read_mappings(record.get("attempts"))[:_ROWS]],
        confirmed=read_text(record.get("confirmed")),
        expectation=_parse_texts(read_mapping(record.get("expectation"))),
        kept=list_kept_files(folder, place, directories),
    )


def _read_run_detail(folder: Path, document: Mapping[str, Any], name: str) -> CaseDetail:
    cases = read_mappings(document.get("cases"))
    record = next((one for one in cases if read_text(one.get("name")) == name), {})
    verdicts, references = read_mappings(record.get("verdicts")), read_mappings(record.get("references"))
    verdict, reference = next(iter(verdicts), {}), next(iter(references), {})
    error = read_mapping(record.get("error"))
    named = {"inputs": record.get("inputs"), "outputs": record.get("outputs"), "references": reference.get("outputs")}
    named |= {f"references-{number}": one.get("outputs") for number, one in enumerate(references[1:], 1)}
    place = folder / name if own(folder, folder / name) else None
    profiles = read_mappings(record.get("profiles"))
    log = "\n".join(read_text(line) for line in read_list(record.get("worker_log"))[:200])
    return CaseDetail(
        record,
        outputs=_parse_outputs(verdict.get("outputs")),
        against=read_text(reference.get("source")) or read_text(verdict.get("against")),
        hint=str(error.get("hint") or ""),
        detail=str(error.get("detail") or "") or log,
        timings=_parse_seconds(record.get("timings")),
        repeat=make_run_command(document, record),
        tensors=[
            TensorFile(kind, read_text(one.get("name")), folder / str(one.get("file")), read_text(one.get("dtype")))
            for kind, entries in named.items()
            for one in read_mappings(entries)
            if own(folder, folder / str(one.get("file")))
        ],
        logs=list_logs(folder, place) if place else (),
        profiles=profile_names(folder, record),
        facts=list_run_facts(record, document),
        others=[
            *map(_parse_other_verdict, verdicts[1:]),
            *(
                OtherComparison(
                    read_text(one.get("reference")), read_text(one.get("outcome")), reason=read_text(one.get("reason"))
                )
                for one in read_mappings(record.get("unanswered"))
            ),
        ],
        disagreement=read_text(record.get("disagreement")),
        evidence=_find_evidence(record, make_run_case, list_case_evidence),
        generation=view_generation(record.get("generation")),
        kept=list_kept_files(
            folder, place, {f"{read_text(one.get('kind'))} profile": read_text(one.get("folder")) for one in profiles}
        ),
    )


def _read_side_detail(folder: Path, document: Mapping[str, Any], name: str) -> CaseDetail:
    """Return the detail for a bench's side, completed with the case from the bench's run record."""
    try:
        run = read_document(folder / RECORD)
    except (OSError, ValueError):
        run = {}
    if (side := dict(name_sides(document)).get(name)) is None:
        return _read_run_detail(folder, run, name)
    case = next((one for one in read_mappings(run.get("cases")) if one.get("name") == side.get("name")), {})
    found = _read_run_detail(folder, run, read_text(case.get("name")))
    known = {**vars(found), "record": side, "timings": _parse_seconds(side.get("timings"))}
    known["repeat"] = make_run_command({**run, **document})
    known["facts"] = list_run_facts({**case, "placement": side.get("placement")}, run) or found.facts
    known["hint"] = read_text(side.get("hint"))
    return CaseDetail(**known)


def _read_layer_detail(folder: Path, document: Mapping[str, Any], name: str) -> CaseDetail:
    found = ((layer, finding) for layer, finding in iter_findings(document) if read_text(layer.get("name")) == name)
    record, finding = next(found, ({}, {}))
    outputs = _parse_outputs(finding.get("outputs"))
    place = folder / name if own(folder, folder / name) else None
    unjudged = [f"{read_text(key)}: {read_text(why)}" for key, why in read_mapping(finding.get("unjudged")).items()]
    return CaseDetail(
        finding if "isolated" not in record else record,
        outputs=outputs,
        against=read_text(document.get("against")),
        hint=read_text(finding.get("hint")),
        detail="\n".join(unjudged),
        repeat=read_text(document.get("command")),
        tensors=_find_tensors(place, outputs),
        logs=list_logs(folder, place) if place else (),
        facts=list_layer_facts(record, document, finding),
        kept=list_kept_files(folder, place, {}),
    )


def _read_row_detail(folder: Path, document: Mapping[str, Any], name: str) -> CaseDetail:
    row = next((one for one in read_mappings(document.get("rows")) if make_row_name(one) == name), {})
    place = folder / read_text(row.get("experiment")) / read_row_toolchain(row)
    stages = _parse_seconds(
        {read_text(one.get("name")): one.get("seconds") for one in read_mappings(row.get("stages"))}
    )
    return CaseDetail(
        row,
        detail=str(row.get("detail") or ""),
        against="training in TensorFlow",
        timings=stages,
        repeat=read_text(document.get("command")),
        logs=list_logs(folder, place),
        facts=list_row_facts(row, document),
        kept=list_kept_files(folder, place, {}),
    )


def _read_call_detail(trace: Path, number: int, session: IndexedSession) -> CaseDetail:
    folder = trace / call_name(number)
    record = _read_record(folder / CALL)
    compared = read_compared_calls(read_comparison(trace, _read_record(trace / TRACE)))
    verdict = read_mapping(compared.get(number, {}).get("verdict"))
    program, names = read_mapping(record.get("program")), map_output_names(record)
    kinds = {"input": "inputs", "output": "outputs", "variable": "outputs"}
    known = {"Backend": ", ".join(session.boards), "Method": read_text(record.get("method"))}
    known |= {"Program": read_text(program.get("model")), "Runtime": read_text(program.get("runtime"))}
    return CaseDetail(
        record,
        outputs=_parse_outputs(verdict.get("outputs")),
        against=read_text(verdict.get("against")),
        repeat=session.command,
        tensors=[
            TensorFile(kinds[path.stem.partition("_")[0]], names.get(path.name) or escape_name(path.stem), path)
            for path in sorted(folder.glob("*.npy"), key=_make_tensor_sort_key)
            if path.stem.partition("_")[0] in kinds and own(folder, path)
        ],
        facts=[(name, value) for name, value in known.items() if value],
    )


def _find_evidence(record: Any, make: Callable[[Any], R], find: Callable[[R], Facts]) -> Facts:
    """Return the basis of the verdict; none for an invalid record."""
    try:
        return find(make(record))
    except UsageError:
        return ()


def _parse_other_verdict(verdict: Mapping[str, Any]) -> OtherComparison:
    return OtherComparison(
        read_text(verdict.get("against")),
        read_text(verdict.get("outcome")),
        _parse_outputs(verdict.get("outputs")),
        read_text(verdict.get("reason")),
    )


def _parse_outputs(values: Any) -> list[Mapping[str, Any]]:
    """Normalize comparisons of outputs for pages, because a record may have missing or invalid values."""
    return [
        {
            **one,
            **{key: read_text(one.get(key)) for key in ("name", "dtype", "reason")},
            **{key: read_int(one.get(key)) for key in ("mismatches", "elements")},
            **{key: one.get(key) for key in ("max_abs", "max_rel", "max_ulp", "cosine", "sqnr_db")},
            "shape": [read_text(size) for size in read_list(one.get("shape"))[:64]],
            "passed": one.get("passed") is True,
            "criteria": [_format_criterion(criterion) for criterion in read_mappings(one.get("criteria"))[:_ROWS]],
        }
        for one in read_mappings(values)[:_ROWS]
    ]


def _format_criterion(values: Mapping[str, Any]) -> str:
    met = "met" if values.get("passed") is True else "not met"
    shown = met if values.get("value") is None else f"{read_text(values['value'])}, {met}"
    return f"{read_text(values.get('criterion'))}: {shown}"


def _parse_seconds(values: Any) -> dict[str, float | None]:
    return {read_text(stage): read_real(value) for stage, value in list(read_mapping(values).items())[:_ROWS]}


def _parse_texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {read_text(key): read_text(value) for key, value in list(values.items())[:_ROWS]}


def _find_tensors(folder: Path | None, outputs: Sequence[Mapping[str, Any]]) -> list[TensorFile]:
    """Return the tensors of a case: files ``0-NAME.npy`` in inputs/, outputs/, references/ and similar directories."""
    if folder is None:
        return []
    dtypes = {read_text(one.get("name")): read_text(one.get("dtype")) for one in outputs}
    found = []
    further = (f"references-{number}" for number in range(1, _REFERENCES))
    for kind in ("inputs", "outputs", "references", "reference-0", *further, PLAIN_REFERENCES):
        for path in sorted(_glob_files(folder / kind, "*.npy"), key=_make_tensor_sort_key):
            name = escape_name(path.stem.partition("-")[2])
            if own(folder, path):
                dtype = "" if kind == "inputs" else dtypes.get(name, "")
                found.append(TensorFile("references" if kind == "reference-0" else kind, name, path, dtype))
    return found


def _glob_files(folder: Path, pattern: str) -> list[Path]:
    """Return matching files, up to a limit. A missing or invalid directory has none."""
    try:
        return list(itertools.islice(folder.glob(pattern), _ROWS))
    except (OSError, ValueError):
        return []


def _make_tensor_sort_key(path: Path) -> tuple[int, str]:
    first = path.name.partition("-")[0]
    return (int(first) if first.isdecimal() and len(first) < 10 else 1 << 30, path.name)


def profile_names(folder: Path, record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the profile directories of a case in a run's record, by kind.

    For run profiles, the first entry is the link in the case's directory.
    """
    found: dict[str, list[str]] = {}
    for one in read_mappings(record.get("profiles")):
        kind, named = one.get("kind"), one.get("folder")
        if isinstance(kind, str) and isinstance(named, str) and named:
            link = [str(folder / read_text(record.get("name")) / "profile")] if kind == "run" else []
            found[kind] = [*link, named]
    return found
