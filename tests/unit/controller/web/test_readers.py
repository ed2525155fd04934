"""Test the index readers for each kind of session, including damaged records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.run_records import run_case

from hil.controller.pipeline.settings.options import Job
from hil.controller.records.run import RunBoard
from hil.controller.storage.runs import RunStore
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.readers import RECORDS, read_lines, read_session
from hil.controller.web.text.entries import CaseEntry, SessionEntry
from hil.controller.workloads.matrix.job import Matrix
from hil.controller.workloads.matrix.targets import MatrixTarget
from hil.controller.workloads.traces.trace import ModuleCall, Trace
from hil.core.text import convert_to_json

PASSED = {"name": "cnn", "outcome": "PASS", "artifact": {"runtime": "iree", "compiler": "iree 3.1", "bytes": 7}}


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path.parent


def read(folder: Path, record: str) -> tuple[SessionEntry, list[CaseEntry]]:
    found = read_session(folder, record, "id")
    assert found is not None
    return found


def test_run_reader_returns_origin_and_command(tmp_path: Path) -> None:
    job = Job((Path("a b.onnx"),), "pi", seed=3, dims={"N": 2}, input_range=(-1.0, 0.5), labels=("x",), recompute=True)
    run = RunStore(tmp_path).create("a", convert_to_json(vars(job)))
    info = {"runtimes": [{"name": "iree", "version": "3"}]}
    run.record.board = RunBoard(name="pi", hw_type="rpi", info=info)
    program = {**run_case().to_json()["artifact"], **PASSED["artifact"]}
    run.record.cases = [run_case(artifact=program, provenance=None)]
    run.save()
    session, (case,) = read(run.folder, "run.json")
    assert session.labels == ("x",) and not session.finished
    assert session.command == "hil run 'a b.onnx' --board pi --seed 3 --input-range=-1:0.5 --dim N=2"
    assert (session.boards, session.compilers, session.versions) == (("pi",), ("iree 3.1",), {"iree": "3"})
    assert (case.board, case.outcome, case.program_bytes, case.started) == ("pi", "PASS", 7, session.created)


def test_bench_reader_returns_sides_as_cases(tmp_path: Path) -> None:
    verdict = {"outcome": "PASS", "outputs": [{"name": "y", "passed": True, "max_abs": 0.5, "mismatch_share": 0}]}
    write(tmp_path / "run.json", {"cases": [{**PASSED, "verdicts": [verdict]}], "command": "hil bench cnn.onnx"})
    side = {"name": "cnn", "outcome": "PASS", "runtime": "iree", "board": "pi", "times": {"p50_ns": 5, "iterations": 9}}
    write(tmp_path / "bench.json", {"created": 5, "sides": [{**side, "label": "A"}, {**side, "label": "B"}]})
    session, cases = read(tmp_path, "bench.json")
    assert [case.name for case in cases] == ["cnn", "cnn B"]
    assert {(case.model, case.device_p50_ns, case.iterations, case.max_abs) for case in cases} == {("cnn", 5, 9, 0.5)}
    assert (session.command, session.compilers, session.boards) == ("hil bench cnn.onnx", ("iree 3.1",), ("pi",))


def test_bench_reader_names_sides_after_prompts(tmp_path: Path) -> None:
    sides = [{"model": "dec.onnx", "label": label, "generation": {"prompt": one}} for label in "AB" for one in "xyz"]
    sides += [{"model": "dec.onnx", "label": "B", "generation": None}] * 3
    write(tmp_path / "bench.json", {"created": 5, "sides": sides})
    _, cases = read(tmp_path, "bench.json")
    names = ["dec x", "dec y", "dec z", "dec x B", "dec y B", "dec z B", "dec", "dec B", "dec B 2"]
    assert [case.name for case in cases] == names


def test_bisect_reader_combines_outcomes_and_adds_whole_model(
    tmp_path: Path,
) -> None:
    right, wrong = {"outcome": "PASS"}, {"outcome": "FAIL", "reason": "far"}
    layers = [
        {"name": "a", "op": "Conv", "isolated": right, "cumulative": right},
        {"name": "b", "op": "Relu", "isolated": right, "cumulative": wrong},
        {"name": "c", "op": "Gemm", "isolated": wrong, "cumulative": None},
    ]
    path = tmp_path / "bisect.json"
    session, cases = read(
        write(path, {"model": "x/m.onnx", "layers": layers, "whole": wrong, "exposed": None}), path.name
    )
    assert [(case.name, case.outcome) for case in cases] == [
        ("a", "PASS"),
        ("b", "FAIL"),
        ("c", "FAIL"),
        ("whole", "FAIL"),
    ]
    # An older record without a time uses the time of its file.
    assert (session.title, session.created) == ("m.onnx", path.stat().st_mtime)


def test_study_reader_returns_rows_as_cases(tmp_path: Path) -> None:
    stages = [{"name": "compile", "outcome": "pass", "seconds": 2}, {"name": "run", "outcome": "fail", "seconds": 0.5}]
    rows = [
        {
            "experiment": "fc",
            "toolchain": "iree",
            "outcome": "RUN_ERROR",
            "failed_stage": "run",
            "message": "m",
            "stages": stages,
        },
        {"experiment": "fc", "way": "tfcompile", "outcome": None, "worst": {"max_abs": "nan", "max_ulp": 4}},
    ]
    write(tmp_path / "study.json", {"board": {"name": "pi"}, "finished": False, "rows": rows})
    session, cases = read(tmp_path, "study.json")
    assert [(case.name, case.flow, case.outcome, case.host_s, case.compile_s) for case in cases] == [
        ("fc iree", "iree", "RUN_ERROR", 2.5, 2.0),
        ("fc tfcompile", "tfcompile", "", None, None),
    ]
    assert (session.models, session.boards, session.finished, session.planned) == (("fc",), ("pi",), False, 2)


def test_trace_reader_returns_calls_and_skips_other_traces(tmp_path: Path) -> None:
    call = ModuleCall("predict", (np.float32([1]),), (np.float32([2]),))
    folder = Trace("Module", "tf", "trace", calls=[call, call]).save(tmp_path / "t")
    session, cases = read(folder, "trace.json")
    assert (session.kind, session.title) == ("trace", "Module.trace")
    assert session.created is not None and session.created > 1e9
    assert [case.name for case in cases] == ["call_0_predict", "call_1_predict"]
    shutil.rmtree(folder / "call_1")
    assert [case.outcome for case in read(folder, "trace.json")[1]] == ["", "LOAD_ERROR"]
    outputs = [{"name": "0", "max_abs": 0.5, "sqnr_db": "nan"}]
    calls = [{"call": 0, "outcome": "FAIL", "reason": "", "verdict": {"reason": "far", "outputs": outputs}}]
    write(folder / "comparison.json", {"trace_created": session.created, "outcome": "FAIL", "calls": [*calls, 1, {}]})
    assert session.command == ""  # the trace does not record a program
    program = {"model": "../model.mlir", "function": "", "runtime": "iree", "captured": [], "assigned": []}
    write(folder / "call_0" / "call.json", {"method": "predict", "program": program})
    session, (compared, _) = read(folder, "trace.json")
    assert session.command == f"hil trace run {folder}"
    assert (session.outcome, compared.outcome, compared.message, compared.max_abs) == ("FAIL", "FAIL", "far", 0.5)
    for other in ({"calls": calls}, {"calls": calls, "trace_created": 5}, "{"):
        write(folder / "comparison.json", other)
        assert [case.outcome for case in read(folder, "trace.json")[1]] == ["", "LOAD_ERROR"]
    assert read_session(write(tmp_path / "c" / "trace.json", {"traceEvents": []}), "trace.json", "id") is None


def test_matrix_reader_combines_target_outcomes(tmp_path: Path) -> None:
    targets = [MatrixTarget("sim", {}), MatrixTarget("sim-f16", {})]
    matrix = Matrix.create(tmp_path / "m", "run", "cnn", {"labels": ["x"]}, targets, "hil run --resume m")
    session, cases = read(matrix.folder, "matrix.json")
    assert (session.title, session.labels, session.finished, cases) == ("cnn on sim, sim-f16", ("x",), False, [])
    matrix.save(finished=True, outcome="FAIL")
    assert read(matrix.folder, "matrix.json")[0].outcome == "FAIL"
    # A combined report has no outcome; the records of its targets do.
    write(tmp_path / "n" / "matrix.json", {"title": "n", "targets": [{"name": "a"}, {"name": "../m"}, {"name": "b"}]})
    write(tmp_path / "n" / "a" / "suite.json", {"exit_code": 0})
    write(tmp_path / "n" / "b" / "run.json", {"exit_code": 3})
    session, _ = read(tmp_path / "n", "matrix.json")
    assert (session.title, session.outcome, session.exit_code) == ("n on a, b", "RUN_ERROR", 3)


def test_suite_reader_returns_command_for_whole_suite(tmp_path: Path) -> None:
    request = {"source": "@models", "filters": ["*cnn*"], "layers": False, "settings": {"seed": 3, "labels": ["x"]}}
    head = {"suite": "models", "flow": "iree", "request": request, "command": "hil suite run --resume a"}
    session, _ = read(write(tmp_path / "suite.json", head), "suite.json")
    assert session.command == "hil suite run @models --flow iree --filter '*cnn*' --no-layers --seed 3"
    write(tmp_path / "suite.json", {**head, "command": "pytest --hil-out x", "request": {}})
    assert read(tmp_path, "suite.json")[0].command == "pytest --hil-out x"


def test_read_lines_starts_at_offset_and_skips_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.web.readers.suites.MAX_LINE", 64)
    path = tmp_path / "results.jsonl"
    lines = [b'{"id": "a"}\n', b"nonsense\n", b'{"id": "' + b"x" * 200 + b'"}\n', b'{"id": "b"}\n', b'{"id": "c"']
    path.write_bytes(b"".join(lines))
    found = list(read_lines(path, 0, 0))
    assert [case and case.name for case, _ in found] == ["a", None, None, "b"]
    place = found[-1][1]
    assert path.read_bytes()[place:] == lines[-1]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert [(case and case.name, case and case.place) for case, _ in read_lines(path, place, 4)] == [("c", place)]
    assert list(read_lines(tmp_path, 0, 0)) == []


HOSTILE = st.sampled_from(
    ["", "\n", "<b>x</b>", "\u202eexe", "\x00\x1b[31m", "\ud800", "x" * 5000, "NaN", "-inf", "../../etc", "é" * 300]
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**400) | st.floats() | HOSTILE | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3), max_leaves=6
)
NAMES = st.sampled_from(
    "schema id created started finished interrupted origin labels branch commit request settings models "
    "command board name info runtimes version cases outcome exit_code suite flow runtime boards versions ids "
    "sides label times p50_ns iterations timings compile_s layers isolated cumulative outputs max_abs "
    "mismatch_share passed sqnr_db whole rows experiment way stages worst seconds module_name backend calls "
    "error targets title verdicts artifact compiler bytes device cold_ns provenance path references stage "
    "reason".split()
)
DOCUMENTS = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=6),
    lambda inner: st.dictionaries(NAMES, inner | st.lists(inner, max_size=3), max_size=8),
    max_leaves=12,
)


@pytest.mark.ci
@pytest.mark.parametrize("record", RECORDS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=DOCUMENTS)
def test_readers_accept_any_document(record: str, document: Any, tmp_path: Path) -> None:
    write(tmp_path / "s" / record, document)
    write(tmp_path / "s" / "results.jsonl", json.dumps(document | {"id": "\ud800\n"}) + "\n[1]\n")
    found = read_session(tmp_path / "s", record, "id")
    if found is None:
        return
    session, cases = found
    lines = [case for case, _ in read_lines(tmp_path / "s" / "results.jsonl", 0, 0) if case is not None]
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        writer.write(0, tmp_path, session, [*cases, *lines], stamp="")


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "NaN", '"x"', "[" * 100_000, '{"a":' * 100_000, "\x00", '{"created": 1e999, "cases": {}}'],
)
def test_unreadable_record_becomes_damaged_session(record: str, text: str, tmp_path: Path) -> None:
    found = read_session(write(tmp_path / "s" / record, text), record, "id")
    if found is not None:
        assert found[0].kind == RECORDS[record] or (found[0].kind == "damaged" and found[0].error)


def test_readers_reject_oversized_and_special_files(tmp_path: Path) -> None:
    import os

    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(1 << 30)
    assert "allowed" in read(tmp_path, "run.json")[0].error
    os.mkfifo(tmp_path / "suite.json")
    assert "a named pipe" in read(tmp_path, "suite.json")[0].error
