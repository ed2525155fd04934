"""A run's folder is read whatever state the run was left in."""

from __future__ import annotations

import json

import pytest
from support.suite_runs import case, suite_run

from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.reports.load import load_run
from hil.errors import UsageError

REPORTS = {"results.csv", "outputs.csv", "junit.xml", "summary.md", "report.html"}


def test_records_come_in_the_suites_order_however_they_ended(tmp_path):
    suite_run(tmp_path, [case("c"), case("a"), case("b")], ids=["a", "b", "c", "d"])
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a", "b", "c"]
    assert run.missing == ("d",)


def test_a_record_is_what_was_written(tmp_path):
    written = case("a", "XFAIL", expectation={"outcome": "FAIL", "reason": "known", "issue": ""})
    (read,) = load_run(suite_run(tmp_path, [written])).records
    assert json.loads(json.dumps(read.to_json())) == json.loads(json.dumps(written.to_json()))


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_half_a_line_at_the_end_is_left_out_and_its_case_counts_as_not_run(tmp_path, cut):
    suite_run(tmp_path, [case("a"), case("b")])
    lines = tmp_path / "results.jsonl"
    lines.write_bytes(lines.read_bytes()[:-cut])
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a"]
    assert run.missing == ("b",)
    assert run.notes == ["1 of 2 cases was not run: the run is not over, or was cut off."]


def test_a_damaged_line_in_the_middle_is_told_and_hides_no_other(tmp_path):
    suite_run(tmp_path, [case("a"), case("b")])
    lines = tmp_path / "results.jsonl"
    lines.write_bytes(b'{"id": "a", \xff\n[1]\n{"outcome": "PASS"}\n' + lines.read_bytes())
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a", "b"]
    assert run.notes == ["3 lines of results.jsonl cannot be read."]


def test_of_two_records_of_a_case_the_later_counts(tmp_path):
    (record,) = load_run(suite_run(tmp_path, [case("a", "FAIL"), case("a", "PASS")], ids=["a"])).records
    assert record.outcome == "PASS"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"suite": "s", "flow": "f", "ids": 3}', "\xff"])
def test_a_folder_without_a_run_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match=r"holds no suite run: it has no suite\.json"):
        load_run(tmp_path)
    suite_run(tmp_path, [])
    (tmp_path / "suite.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="cannot be read"):
        load_run(tmp_path)


def test_all_reports_are_written_and_nothing_else_is_left(tmp_path):
    suite_run(tmp_path, [case("a"), case("b", "FAIL"), case("c", "RUN_CRASH")])
    before = {path.name for path in tmp_path.iterdir()}
    write_reports(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - before == REPORTS


def test_reports_of_a_run_with_no_case_are_written(tmp_path):
    write_reports(suite_run(tmp_path, [], missing=("a", "b"), finished=None, exit_code=None))
    assert all((tmp_path / name).stat().st_size for name in REPORTS)


def test_what_cannot_be_encoded_does_not_cost_the_reports(tmp_path):
    write_reports(suite_run(tmp_path, [case("a", "RUN_ERROR", message="no file caf\udce9", detail="\udce9\x00")]))
    assert all((tmp_path / name).read_text(encoding="utf-8") for name in REPORTS)


def test_writing_again_gives_the_same_bytes(tmp_path):
    suite_run(tmp_path, [case("a"), case("b", "FAIL")])
    found = []
    for _ in range(2):
        write_reports(tmp_path)
        found.append({name: (tmp_path / name).read_bytes() for name in REPORTS})
    assert found[0] == found[1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    suite_run(tmp_path, [case("a")])
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        write_reports(tmp_path)
