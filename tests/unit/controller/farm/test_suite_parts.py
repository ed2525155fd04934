"""Test the split of a suite into jobs, and the merge of their results into a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS

from hil.controller.farm.client.results import EndedJob, merge
from hil.controller.farm.client.submitting import choose_parts, load_suite, split
from hil.controller.farm.job_files import request_of
from hil.controller.farm.messages import JobResult, JobSpec
from hil.controller.records.base import make_record
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.job import run_suite
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.files import digest_file
from hil.errors import UsageError


def cases(*counts: int) -> list[CaseSpec]:
    """Return a number of cases for each model."""
    return [
        CaseSpec(f"m{model}_{number}", f"m{model}", lambda folder: None)
        for model, count in enumerate(counts)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("counts", "parts", "sizes"),
    [
        ((), 4, []),
        ((1,), 4, [1]),
        ((1,) * 10, 4, [2, 2, 3, 3]),
        ((1,) * 3, 100, [1, 1, 1]),
        # A model stays in one part if it fits.
        ((4, 4, 4), 3, [4, 4, 4]),
        ((3, 3, 2), 2, [3, 5]),
        # A model that is larger than a part is divided.
        ((20, 1, 1), 4, [5, 5, 6, 6]),
        ((7,), 1, [7]),
    ],
)
def test_split_balances_part_sizes(counts, parts, sizes):
    found = split(cases(*counts), parts)
    assert sorted(map(len, found)) == sizes
    given = [case.id for part in found for case in part]
    assert sorted(given) == sorted(case.id for case in cases(*counts))


@pytest.mark.parametrize(
    ("cases", "boards", "parts"),
    [(1, 1, 1), (5, 6, 6), (26, 4, 4), (100, 4, 13), (1000, 4, 16), (1000, 0, 4), (10_000, 200, 800)],
)
def test_parts_for_limits_parts_by_cases_and_boards(cases, boards, parts):
    assert choose_parts(cases, boards) == parts


def test_split_preserves_model_groups_and_order():
    found = split(cases(4, 1, 4, 1, 1, 3, 1), 4)
    for model in ("m0", "m2", "m5"):
        assert sum(any(case.model == model for case in part) for part in found) == 1, model
    order = [case.id for case in cases(4, 1, 4, 1, 1, 3, 1)]
    for part in found:
        positions = [order.index(case.id) for case in part]
        assert positions == sorted(positions)
    assert [order.index(part[0].id) for part in found] == sorted(order.index(part[0].id) for part in found)


class Quiet:
    """Progress that shows nothing."""

    def begin(self, total: int, done: Any) -> None: ...
    def end(self, record: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def interrupt(self, command: str) -> None: ...


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create two digits models, inputs for one of them, an expected failure, and a flow file."""
    place = tmp_path / "nets"
    (place / "more").mkdir(parents=True)
    shutil.copy(DIGITS / "digits_cnn.onnx", place / "a.onnx")
    shutil.copy(DIGITS / "digits_cnn.onnx", place / "more" / "b.onnx")
    (place / "broken.onnx").write_bytes(b"no model")
    (place / "expected.toml").write_text('[[compile]]\ncases = "broken*"\noutcome = "IMPORT_ERROR"\nreason = "cut"\n')
    (tmp_path / "mine.toml").write_text('[mine]\nruntime = "onnxruntime"\n')
    monkeypatch.chdir(tmp_path)
    return place


def fetched(spec: JobSpec, files: dict[str, Path], to: Path) -> Path:
    """Create the job's directory on a host."""
    for at, digest in spec.files.items():
        (to / at).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files[digest], to / at)
        assert digest_file(to / at) == digest
    return to


def run_part(spec: JobSpec, files: dict[str, Path], place: Path) -> JobResult:
    """Run a part as a board's host does."""
    spec = make_record(json.loads(json.dumps(spec.to_json())), JobSpec)
    request = request_of(spec.options, fetched(spec, files, place / "files"))
    run = run_suite(request, out=place / "out", screen=Quiet())
    return JobResult(run.head.exit_code or 0, record=json.loads(json.dumps(run.to_document().to_json())))


@pytest.mark.ci
def test_merged_parts_equal_local_suite_run(folder, tmp_path):
    request = SuiteRequest("nets", "mine.toml:mine", layers=False)
    plan = load_suite(request, boards=3)
    files = plan.uploads
    # Three cases for three boards.
    assert len(plan.specs) == 3
    assert plan.title == "nets mine"
    assert [spec.title for spec in plan.specs] == [f"nets mine: {spec.options['cases'][0][1]}" for spec in plan.specs]
    ended = [EndedJob("1", spec, run_part(spec, files, tmp_path / f"host{n}")) for n, spec in enumerate(plan.specs)]
    merged = merge(ended, tmp_path / "merged")
    whole = run_suite(request, out=tmp_path / "whole", screen=Quiet())
    for name in ("suite", "flow", "runtime", "source", "ids", "suite_ids", "exit_code", "boards"):
        assert getattr(merged.head, name) == getattr(whole.head, name), name
    outcomes = [(one.id, one.outcome, one.repeat) for one in merged.read_records()]
    assert outcomes == [(one.id, one.outcome, one.repeat) for one in whole.read_records()]
    assert [one[1] for one in outcomes] == ["PASS", "XFAIL", "PASS"]
    assert str(tmp_path / "host0") not in (tmp_path / "merged" / "results.jsonl").read_text()
    for report in ("results.csv", "junit.xml", "summary.md", "report.html"):
        assert (tmp_path / "merged" / report).exists(), report


@pytest.mark.ci
def test_merge_marks_cases_of_lost_part_as_lost_board(folder, tmp_path):
    plan = load_suite(SuiteRequest("nets", "mine.toml:mine", layers=False), boards=4)
    good = run_part(plan.specs[0], plan.uploads, tmp_path / "host")
    lost = JobResult(4, "BOARD_LOST", "the host died", infrastructure=True)
    cancelled = JobResult(130, "", "cancelled by alice")
    merged = merge(
        [EndedJob("1", spec, how) for spec, how in zip(plan.specs, (good, lost, cancelled), strict=True)],
        tmp_path / "m",
    )
    records = merged.read_records()
    assert [(one.id, one.outcome) for one in records] == [("a_full_model", "PASS"), ("broken_full_model", "BOARD_LOST")]
    assert records[1].message == "the host died"
    assert records[1].model == "broken"
    # Cancelled cases are missing, and the run is marked as interrupted.
    assert merged.head.interrupted
    assert merged.head.exit_code == 130
    assert len(merged.head.ids) == 3
    again = merge([EndedJob("1", plan.specs[0], good), EndedJob("1", plan.specs[1], lost)], tmp_path / "n")
    assert again.head.exit_code == 4
    with pytest.raises(UsageError, match="already contains a suite run"):
        merge([EndedJob("1", plan.specs[0], good)], tmp_path / "m")


@pytest.mark.ci
def test_load_suite_plans_filtered_cases_and_includes_flow(folder, tmp_path):
    shutil.copy("mine.toml", "flows.toml")
    plan = load_suite(SuiteRequest("nets", "mine", filters=("a_full*",)), boards=3)
    (spec,) = plan.specs
    assert spec.options["flow"] == "flows/flows.toml:mine"
    assert spec.options["filters"] == ["=a_full_model"]
    assert load_suite(SuiteRequest("nets", "mine", filters=("zzz",)), boards=3).specs == ()
    built_in = load_suite(SuiteRequest("nets/a.onnx", "onnxruntime", layers=False), boards=3)
    assert "flow_is_file" not in built_in.specs[0].options
    assert built_in.specs[0].options["source"] == "suite/nets/a.onnx"
    assert sorted(built_in.specs[0].files) == ["suite/nets/a.onnx", "suite/nets/expected.toml"]


@pytest.mark.ci
def test_load_suite_includes_files_of_models(folder):
    made = {
        "zoo/model.onnx": (DIGITS / "digits_cnn.onnx").read_bytes(),
        "zoo/test_data_set_0/input_0.pb": b"x",
        "set/golden.json": b"{}",
        "set/program/main.vmfb": b"x",
        "net.vmfb": b"x",
        "x.npy": b"x",
        "flags/a.flagfile": b"--module=../net.vmfb\n--input=@../x.npy\n--expected_output=@../x.npy\n",
    }
    for name, data in made.items():
        file = folder.parent / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    plan = load_suite(SuiteRequest("mine", "iree", layers=False), boards=1)
    assert sorted(plan.specs[0].files) == sorted(f"suite/mine/{name}" for name in made)
    listed = [case[0] for spec in plan.specs for case in spec.options["cases"]]
    assert {"model_full_model", "model_test_data_set_0", "net_flags.a", "set_full_model"} <= set(listed)
    (folder.parent / "mine" / "flags" / "a.flagfile").write_text("--module=/net.vmfb\n--expected_output=@/x.npy\n")
    with pytest.raises(UsageError, match="absolute paths") as caught:
        load_suite(SuiteRequest("mine", "iree", layers=False), boards=1)
    assert "hil bundle import" in caught.value.hint
