from __future__ import annotations

import csv
import io
import json

import pytest
from support.suite_runs import case, comparison, suite_run

from hil.controller.records.measurements.energy import EnergyMeasurement, UnitEnergy
from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import Delegation, Totals, format_delegation, load_run
from hil.controller.workloads.suites.reports.summary import format_summary_markdown
from hil.controller.workloads.suites.reports.tables import COMPILER_COLUMNS, format_cases_csv
from hil.errors import UsageError

REPORTS = {"results.csv", "outputs.csv", "junit.xml", "summary.md", "report.html"}

NOTES = {
    "quantise_s": 0.25,
    "lower_s": 1.5,
    "program_bytes": 4096,
    "delegation": {"delegated": {"aten.mul.Tensor": 2, "aten.add.Tensor": 1}, "undelegated": {"aten.sin.default": 1}},
}


def test_records_follow_suite_order(tmp_path):
    suite_run(tmp_path, [case("c"), case("a"), case("b")], ids=["a", "b", "c", "d"])
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a", "b", "c"]
    assert run.missing == ("d",)


def test_record_round_trips(tmp_path):
    written = case("a", "XFAIL", expectation={"outcome": "FAIL", "reason": "known", "issue": ""})
    (read,) = load_run(suite_run(tmp_path, [written])).records
    assert json.loads(json.dumps(read.to_json())) == json.loads(json.dumps(written.to_json()))


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_truncated_last_line_counts_as_unrun_case(tmp_path, cut):
    suite_run(tmp_path, [case("a"), case("b")])
    lines = tmp_path / "results.jsonl"
    lines.write_bytes(lines.read_bytes()[:-cut])
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a"]
    assert run.missing == ("b",)
    assert run.notes == ["1 of 2 cases not run: the run is unfinished or was aborted"]


def test_damaged_line_adds_note_and_preserves_others(tmp_path):
    suite_run(tmp_path, [case("a"), case("b")])
    lines = tmp_path / "results.jsonl"
    lines.write_bytes(b'{"id": "a", \xff\n[1]\n{"outcome": "PASS"}\n' + lines.read_bytes())
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a", "b"]
    assert run.notes == ["3 unreadable lines in results.jsonl"]


@pytest.mark.parametrize(("names", "text"), [("a", "1 case draws"), ("ab", "2 cases draw")])
def test_remarks_count_cases_with_random_numbers(names, text, tmp_path):
    run = load_run(suite_run(tmp_path, [case(name, random=("RandomNormal",)) for name in names]))
    assert f"{text} random numbers: a" in Totals(run).remarks


def test_remarks_list_measured_and_refused_energies(tmp_path):
    energies = [EnergyMeasurement(meter="file", per_inference=UnitEnergy(joules=one, interval=None)) for one in (2, 1)]
    energies.append(EnergyMeasurement(meter="file", refused="idle drift", reason="from 2 to 3 W"))
    run = load_run(
        suite_run(tmp_path, [case(name, energy=one.to_json()) for name, one in zip("abc", energies, strict=True)])
    )
    remarks = Totals(run).remarks
    assert "energy of 2 cases: 1 J to 2 J an inference" in remarks
    assert "energy of 1 case refused: c: idle drift: from 2 to 3 W" in remarks


def test_later_record_of_case_wins(tmp_path):
    (record,) = load_run(suite_run(tmp_path, [case("a", "FAIL"), case("a", "PASS")], ids=["a"])).records
    assert record.outcome == "PASS"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"suite": "s", "flow": "f", "ids": 3}', "\xff"])
def test_load_run_rejects_directory_without_run(tmp_path, text):
    with pytest.raises(UsageError, match=r"is not a suite run: suite\.json not found"):
        load_run(tmp_path)
    suite_run(tmp_path, [])
    (tmp_path / "suite.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="cannot read"):
        load_run(tmp_path)


def test_write_reports_writes_every_report(tmp_path):
    suite_run(tmp_path, [case("a"), case("b", "FAIL"), case("c", "RUN_CRASH")])
    before = {path.name for path in tmp_path.iterdir()}
    write_reports(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - before == REPORTS


def test_write_reports_accepts_run_without_cases(tmp_path):
    write_reports(suite_run(tmp_path, [], missing=("a", "b"), finished=None, exit_code=None))
    assert all((tmp_path / name).stat().st_size for name in REPORTS)


def test_write_reports_accepts_unencodable_text(tmp_path):
    write_reports(suite_run(tmp_path, [case("a", "RUN_ERROR", message="no file caf\udce9", detail="\udce9\x00")]))
    assert all((tmp_path / name).read_text(encoding="utf-8") for name in REPORTS)


def test_write_reports_writes_same_bytes(tmp_path):
    suite_run(tmp_path, [case("a"), case("b", "FAIL")])
    found = []
    for _ in range(2):
        write_reports(tmp_path)
        found.append({name: (tmp_path / name).read_bytes() for name in REPORTS})
    assert found[0] == found[1]


def test_write_reports_rejects_unwritable_directory(tmp_path):
    suite_run(tmp_path, [case("a")])
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(UsageError, match="cannot write to"):
        write_reports(tmp_path)


def run_of(folder, *records):
    return load_run(suite_run(folder, list(records)))


def rows(folder, *records):
    return list(csv.DictReader(io.StringIO(format_cases_csv(run_of(folder, *records)))))


def test_csv_row_contains_delegation_and_output_columns(tmp_path):
    outputs = (comparison(name="y", max_abs=0.5, mean_abs=0.125, sqnr_db=31.5), comparison(name="z", sqnr_db="inf"))
    (row,) = rows(tmp_path, case("add_dtype-float32", notes=NOTES, params={"dtype": "float32"}, outputs=outputs))
    assert row["params"] == '{"dtype": "float32"}'
    assert (row["delegated"], row["delegated_nodes"], row["undelegated_nodes"]) == ("yes", "3", "1")
    assert row["delegated_ops"] == '{"aten.add.Tensor": 1, "aten.mul.Tensor": 2}'
    assert row["undelegated_ops"] == '{"aten.sin.default": 1}'
    assert (row["quantise_s"], row["lower_s"], row["program_bytes"]) == ("0.25", "1.5", "4096")
    assert (row["output_0_max_abs"], row["output_0_mean_abs"], row["output_0_sqnr_db"]) == ("0.5", "0.125", "31.5")
    assert row["output_1_sqnr_db"] == "inf"


def test_csv_row_reports_missing_delegation(tmp_path):
    (row,) = rows(tmp_path, case("a", notes={"delegation": {"delegated": {}, "undelegated": {"aten.sin.default": 2}}}))
    assert (row["delegated"], row["delegated_nodes"], row["undelegated_nodes"]) == ("no", "0", "2")


def test_uncompiled_case_has_empty_compiler_cells(tmp_path):
    _, failed = rows(tmp_path, case("a", notes=NOTES), case("b", "COMPILE_ERROR", notes={}))
    assert {failed[column.name] for column in COMPILER_COLUMNS} == {""}


def test_csv_omits_empty_compiler_columns(tmp_path):
    (row,) = rows(tmp_path, case("a"))
    assert not {column.name for column in COMPILER_COLUMNS} & set(row)


def test_delegation_text_sums_nodes_and_programs(tmp_path):
    plain = case(
        "b", notes={"delegation": {"delegated": {}, "undelegated": {"aten.sin.default": 4, "aten.cos.default": 1}}}
    )
    words = "delegated: 3 of 9 nodes, in 1 of 2 programs; not delegated: aten.sin.default 5, aten.cos.default 1"
    run = run_of(tmp_path, case("a", notes=NOTES), plain, case("c"))
    assert format_delegation(run.records) == words
    assert words.replace("_", "\\_") in format_summary_markdown(run)
    assert words in report_html(run)


def test_delegation_text_describes_case():
    assert Delegation.of(case("a", notes=NOTES)).text == "3 of 4 nodes; not delegated: aten.sin.default 1"
    assert Delegation.of(case("a", notes={"delegation": {"delegated": {"x": 1}}})).text == "1 of 1 node"


@pytest.mark.parametrize("told", [{}, {"delegation": None}, {"delegation": "all"}, {"delegation": [1]}])
def test_delegation_ignores_other_compiler_notes(told):
    assert Delegation.of(case("a", notes=told)) is None
    assert format_delegation([case("a", notes=told)]) == ""
