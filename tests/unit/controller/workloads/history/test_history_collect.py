"""Entries of stored runs, benches, suite runs and matrices."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.run_records import bench_record, run_case, run_record
from support.suite_runs import case, comparison, suite_run

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.controller.models.description import digest_of_files
from hil.controller.records.outputs import Origin
from hil.controller.records.study import StudyBoard, StudyRecord, StudyRow, StudySettings
from hil.controller.storage.cache import Cache
from hil.controller.workloads.history.case_programs import CaseProgramFinder
from hil.controller.workloads.history.collect import Collector
from hil.controller.workloads.history.source_state import SourceOptions, shorten_model
from hil.core.digest import digest_of
from hil.core.results import Artifact, Outcome, Relation
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

PROGRAM = b"program"
DIGEST = digest_of(PROGRAM)
ARTIFACT = {
    **{"runtime": "iree", "compiler": "iree 3.13.0", "flags": ["--target=host"], "function": "f", "main": "main.vmfb"},
    **{"digests": {"main.vmfb": DIGEST}, "bytes": len(PROGRAM), "cached": False, "notes": {}},
}


@pytest.fixture
def collector(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Collector(SourceOptions(), CaseProgramFinder(Cache(tmp_path / "cache")))


def write_run(folder: Path, *cases, **values) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run_record(*cases, id=folder.name, **values).to_json()))
    return folder


def test_run_gives_entry_with_samples_board_and_error(collector, tmp_path):
    origin = {"labels": ["nightly"], "branch": "main", "commit": "1a2b"}
    device = {"iterations": 3, "cold_ns": 90, "p50_ns": 15.0, "samples_ns": [90, 10, 20]}
    provenance = {
        "board": "rpi5",
        "machine": {"kernel": "6.12", "cpu_features": ["a"], "cores": 4},
        "readings": [
            {"name": "cpu0 frequency", "value": 1800.0, "unit": "MHz"},
            {"name": "cpu0 governor", "text": "x"},
        ],
        "runtime_version": "3.13.0",
        "finished_at": 7.0,
        "notes": ["throttled"],
    }
    grade = {"grade": "F", "reasons": ["throttled"]}
    one = run_case(name="m", path="m.onnx", device=device, provenance=provenance, artifact=ARTIFACT, grade=grade)
    request = {"function": "f", "compile_flags": ["-O3"], "dims": {"N": 4}}
    collector.collect(write_run(tmp_path / "r1", one, origin=origin, request=request))
    (entry,) = collector.found.entries
    key = {"kind": "run", "model": "m.onnx", "case": "m", "function": "f", "board": "rpi5", "runtime": "iree"}
    assert entry.key.to_json() == {**key, "flow": "", "flags": ["-O3", "--dim N=4"]}
    assert (entry.run, entry.created, entry.samples_ns, entry.p50_ns, entry.cold_ns) == (
        "r1",
        7.0,
        [10.0, 20.0],
        15.0,
        90,
    )
    assert (entry.source.commit, entry.source.branch, entry.source.dirty) == ("1a2b", "main", None)
    assert entry.source.labels == ["nightly"]
    assert entry.board.stack == {"kernel": "6.12", "cores": "4", "cpu0 governor": "x"}
    assert entry.board.readings == {"cpu0 frequency": 1800.0}
    assert entry.board.notes == ["throttled"]
    assert entry.grade is not None and entry.grade.to_json() == grade
    assert entry.tools.flags == ["--target=host"]
    assert entry.program == DIGEST
    assert entry.error is not None


def test_failed_case_gives_entry_with_requested_values(collector, tmp_path):
    error = {"kind": "CompileFailed", "hint": "", "board": "", "detail": ""}
    none = dict.fromkeys(("artifact", "device", "provenance"))
    one = run_case(name="m", outcome=Outcome.COMPILE_ERROR, reason="bad", error=error, verdicts=[], **none)
    collector.collect(write_run(tmp_path / "r1", one, board=None, request={"board": "rpi5"}))
    (entry,) = collector.found.entries
    assert (entry.outcome, entry.reason, entry.error, entry.p50_ns) == ("COMPILE_ERROR", "bad", None, None)
    assert (entry.key.board, entry.key.runtime) == ("rpi5", "")


def test_unfinished_case_is_skipped(collector, tmp_path):
    collector.collect(write_run(tmp_path / "r1", run_case(name="m", outcome=None)))
    assert collector.found.entries == []
    assert collector.found.skipped == ["r1: m has not ended"]


def test_bench_gives_entry_without_side_of_earlier_program(collector, tmp_path):
    bench = bench_record()
    (side,) = bench.sides
    bench.sides = [side.replace(name="A-m", from_run="old"), side.replace(name="B-m")]
    folder = write_run(tmp_path / "b", run_case(name="A-m"), run_case(name="B-m", artifact=ARTIFACT))
    (folder / "bench.json").write_text(json.dumps(bench.replace(concurrency=2).to_json()))
    (folder / "B-m" / "program").mkdir(parents=True)
    (folder / "B-m" / "program" / "main.vmfb").write_bytes(PROGRAM)
    collector.collect(folder)
    (entry,) = collector.found.entries
    assert (entry.key.kind, entry.key.flags, entry.case) == ("bench", ("--concurrency 2",), "B-m")
    assert (entry.p50_ns, entry.iterations) == (23812.5, 39686)
    assert collector.found.skipped == ["b: A-m is from old"]
    assert collector.found.programs[DIGEST].folder == folder / "B-m" / "program"


def test_suite_gives_entries_with_cached_programs(collector, tmp_path):
    cache = Cache(tmp_path / "cache")
    cache.put(Cache.key("artifact", a=1), {}, lambda folder: (folder / "main.vmfb").write_bytes(PROGRAM))
    info = {"sim": {"machine": {"kernel": "6"}, "runtimes": [{"name": "iree", "version": "3.13.0"}]}}
    times = {"device_p50_ns": 5.0, "samples_ns": [4, 5, 6], "iterations": 3}
    flags = {"flags": ["-a"], "compiler": "iree 3", "program": DIGEST, "artifact_bytes": len(PROGRAM)}
    records = [case("one", board="sim", outputs=(comparison(),), **times, **flags), case("two", "FAIL", board="sim")]
    collector.collect(suite_run(tmp_path / "s", records, board_info=info))
    one, two = collector.found.entries
    assert (one.key.kind, one.key.flow, one.samples_ns) == ("suite", "iree", [4.0, 5.0, 6.0])
    assert (one.tools.runtime, one.board.stack, one.tools.flags) == ("3.13.0", {"kernel": "6"}, ["-a"])
    assert two.outcome == "FAIL"
    assert collector.found.programs[DIGEST].record.main == "main.vmfb"


def test_matrix_gives_entries_of_all_targets(collector, tmp_path):
    targets = [{"name": "a"}, {"name": "../b"}, {"name": "missing"}]
    write_run(tmp_path / "m" / "a", run_case(name="x"))
    (tmp_path / "m" / "matrix.json").write_text(json.dumps({"schema": 1, "id": "m", "title": "t", "targets": targets}))
    collector.collect(tmp_path / "m")
    assert [entry.case for entry in collector.found.entries] == ["x"]


def test_collect_rejects_directory_without_record(collector, tmp_path):
    with pytest.raises(UsageError, match=r"has no run\.json"):
        collector.collect(tmp_path)


def test_given_commit_overrides_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = Origin(labels=[], branch="main", commit="1a2b")
    state = SourceOptions(commit="ffff").state_of(origin)
    assert (state.commit, state.branch, state.dirty) == ("ffff", "main", None)
    assert SourceOptions(branch="x").state_of(origin).branch == "x"


def test_current_commit_reports_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("1")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-qb", "topic"), ("add", "a"), (*identity, "commit", "-qm", "a")):
        subprocess.run(["git", *words], check=True)
    state = SourceOptions().state_of(None)
    assert (len(state.commit), state.branch, state.dirty) == (40, "topic", False)
    (tmp_path / "a").write_text("2")
    assert SourceOptions().state_of(Origin(labels=[], branch="", commit=state.commit)).dirty is True
    other = SourceOptions().state_of(Origin(labels=[], branch="", commit="ffff"))
    assert (other.branch, other.dirty) == ("", None)


def test_model_paths_are_relative_to_repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert shorten_model("m.onnx") == shorten_model(str(tmp_path / "sub/m.onnx")) == "sub/m.onnx"
    assert shorten_model("../m.onnx") == "m.onnx"
    assert shorten_model("/elsewhere/m.onnx") == "m.onnx"


def test_entries_name_absolute_folder_of_run(collector, tmp_path):
    write_run(tmp_path / "r1", run_case(name="m"))
    suite_run(tmp_path / "s", [case("one", board="sim")])
    for name in ("r1", "s"):
        collector.collect(Path(name))
    assert [entry.folder for entry in collector.found.entries] == [str(tmp_path / "r1"), str(tmp_path / "s")]


def test_cold_time_is_neither_median_nor_sample(collector, tmp_path):
    device = {"iterations": 1, "cold_ns": 90, "p50_ns": 90.0, "samples_ns": [90]}
    collector.collect(write_run(tmp_path / "r1", run_case(name="m", device=device)))
    cold = case("one", board="sim", device_p50_ns=90.0, samples_ns=[90], iterations=1, cold=True)
    collector.collect(suite_run(tmp_path / "s", [cold]))
    for entry in collector.found.entries:
        assert (entry.cold_ns, entry.p50_ns, entry.clock, entry.samples_ns) == (90, None, None, [])


def test_program_of_bundle_is_found_while_bundle_is_unchanged(collector, tmp_path):
    file = tmp_path / "made" / "main.bin"
    file.parent.mkdir()
    file.write_bytes(PROGRAM)
    spec = TensorSpec("x", "float32", (2,))
    program = Artifact("onnxruntime", "main.bin", {"main.bin": file}, {}, "f", "none", (), (spec,), (spec,))
    x = np.ones(2, np.float32)
    suites, signatures = [MethodTestSuite("f", [MethodTestCase([x], [x])])], {"f": Signature((spec,), (spec,))}
    Bundle.create(program, suites, signatures=signatures).save(tmp_path / "b.hilb")
    model = {"format": "hilb", "digest": DIGEST, "function": "f", "inputs": [], "outputs": []}
    stored = {**ARTIFACT, "main": "main.bin", "digests": {"main.bin": DIGEST}}
    one = run_case(name="m", path=str(tmp_path / "b.hilb"), artifact=stored, model=model)
    collector.collect(write_run(tmp_path / "r1", one))
    (source,) = collector.found.programs.values()
    assert (source.folder / "main.bin").read_bytes() == PROGRAM
    (tmp_path / "b.hilb").write_bytes(b"another bundle")
    later = Collector(SourceOptions(), CaseProgramFinder(Cache(tmp_path / "other")))
    later.collect(tmp_path / "r1")
    assert later.found.programs == {} and later.found.entries[0].program == DIGEST


@pytest.mark.parametrize("digest", [DIGEST, digest_of_files({"m.onnx": DIGEST})])
def test_model_that_is_its_program_is_found_next_to_suite(collector, tmp_path, digest):
    (tmp_path / "m.onnx").write_bytes(PROGRAM)
    head = {"models": {"m": {"path": str(tmp_path / "m.onnx"), "digest": digest}}}
    collector.collect(suite_run(tmp_path / "s", [case("m_full_model", model="m", program=DIGEST)], **head))
    (source,) = collector.found.programs.values()
    assert (source.record.main, source.folder) == ("m.onnx", tmp_path)


def test_pytest_runs_in_one_directory_have_different_ids(collector, tmp_path):
    for number in range(2):
        place = tmp_path / str(number) / "out"
        collector.collect(suite_run(place, [case("one")], command="pytest --hil-out out", started=1e9 + number))
    assert [entry.run for entry in collector.found.entries] == ["out-1000000000", "out-1000000001"]


def test_ended_rows_of_study_give_entries_without_times(collector, tmp_path):
    settings = StudySettings(steps=2, seed=0, rtol=1e-4, atol=None, no_fallback=False, allow_blind=[])
    known = {"title": "", "reported": "", "relation": Relation.INDEPENDENT, "stages": []}
    rows = [
        StudyRow(experiment="fc", toolchain="iree", outcome=Outcome.FAIL, message="step 2 differs", **known),
        StudyRow(experiment="fc", toolchain="tfcompile", **known),
    ]
    study = StudyRecord(
        schema=1,
        folder="",
        created=5.0,
        asked=settings,
        board=StudyBoard(name="pi"),
        finished=False,
        rows=rows,
        exit_code=1,
    )
    (tmp_path / "study.json").write_text(json.dumps(study.to_json()))
    collector.collect(tmp_path)
    (entry,) = collector.found.entries
    assert (entry.key.kind, entry.key.model, entry.key.runtime, entry.key.board) == ("study", "fc", "iree", "pi")
    assert (entry.run, entry.case, entry.outcome) == (f"{tmp_path.name}-5", "fc iree", "FAIL")
    assert (entry.p50_ns, entry.reason) == (None, "step 2 differs")
