from __future__ import annotations

import csv
import io
import json

import pytest
from support.suite_runs import case, comparison, suite_run

from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import Delegation, Totals, delegation_text, load_run
from hil.controller.workloads.suites.reports.summary import summary_markdown
from hil.controller.workloads.suites.reports.tables import COMPILER_COLUMNS, cases_csv
from hil.errors import UsageError

REPORTS = {"results.csv", "outputs.csv", "junit.xml", "summary.md", "report.html"}

NOTES = {
    "quantise_s": 0.25,
    "lower_s": 1.5,
    "program_bytes": 4096,
    "delegation": {"delegated": {"aten.mul.Tensor": 2, "aten.add.Tensor": 1}, "undelegated": {"aten.sin.default": 1}},
}


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


@pytest.mark.parametrize(("names", "text"), [("a", "1 case draws"), ("ab", "2 cases draw")])
def test_remarks_count_cases_with_random_numbers(names, text, tmp_path):
    run = load_run(suite_run(tmp_path, [case(name, random=("RandomNormal",)) for name in names]))
    assert f"{text} random numbers: a" in Totals(run).remarks


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


def run_of(folder, *records):
    return load_run(suite_run(folder, list(records)))


def rows(folder, *records):
    return list(csv.DictReader(io.StringIO(cases_csv(run_of(folder, *records)))))


def test_a_row_carries_what_the_testers_own_reports_carry(tmp_path):
    outputs = (comparison(name="y", max_abs=0.5, mean_abs=0.125, sqnr_db=31.5), comparison(name="z", sqnr_db="inf"))
    (row,) = rows(tmp_path, case("add_dtype-float32", notes=NOTES, params={"dtype": "float32"}, outputs=outputs))
    assert row["params"] == '{"dtype": "float32"}'
    assert (row["delegated"], row["delegated_nodes"], row["undelegated_nodes"]) == ("yes", "3", "1")
    assert row["delegated_ops"] == '{"aten.add.Tensor": 1, "aten.mul.Tensor": 2}'
    assert row["undelegated_ops"] == '{"aten.sin.default": 1}'
    assert (row["quantise_s"], row["lower_s"], row["program_bytes"]) == ("0.25", "1.5", "4096")
    assert (row["output_0_max_abs"], row["output_0_mean_abs"], row["output_0_sqnr_db"]) == ("0.5", "0.125", "31.5")
    assert row["output_1_sqnr_db"] == "inf"


def test_a_program_of_which_nothing_was_delegated_says_no(tmp_path):
    (row,) = rows(tmp_path, case("a", notes={"delegation": {"delegated": {}, "undelegated": {"aten.sin.default": 2}}}))
    assert (row["delegated"], row["delegated_nodes"], row["undelegated_nodes"]) == ("no", "0", "2")


def test_a_case_that_never_was_compiled_has_empty_cells_there(tmp_path):
    _, failed = rows(tmp_path, case("a", notes=NOTES), case("b", "COMPILE_ERROR", notes={}))
    assert {failed[column.name] for column in COMPILER_COLUMNS} == {""}


def test_a_run_of_which_no_compiler_told_has_no_such_columns(tmp_path):
    (row,) = rows(tmp_path, case("a"))
    assert not {column.name for column in COMPILER_COLUMNS} & set(row)


def test_the_share_of_a_run_is_counted_over_nodes_and_programs(tmp_path):
    plain = case(
        "b", notes={"delegation": {"delegated": {}, "undelegated": {"aten.sin.default": 4, "aten.cos.default": 1}}}
    )
    words = "delegated: 3 of 9 nodes, in 1 of 2 programs; left most: aten.sin.default 5, aten.cos.default 1"
    run = run_of(tmp_path, case("a", notes=NOTES), plain, case("c"))
    assert delegation_text(run.records) == words
    assert words.replace("_", "\\_") in summary_markdown(run)
    assert words in report_html(run)


def test_a_case_tells_in_words_how_it_is_shared_out():
    assert Delegation.of(case("a", notes=NOTES)).text == "3 of 4 nodes; left: aten.sin.default 1"
    assert Delegation.of(case("a", notes={"delegation": {"delegated": {"x": 1}}})).text == "1 of 1 node"


@pytest.mark.parametrize("told", [{}, {"delegation": None}, {"delegation": "all"}, {"delegation": [1]}])
def test_other_compilers_tell_of_no_delegation(told):
    assert Delegation.of(case("a", notes=told)) is None
    assert delegation_text([case("a", notes=told)]) == ""
