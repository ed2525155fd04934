"""What compilers tell of their work: columns where there is something to tell, the share over a run, a case's words."""

from __future__ import annotations

import csv
import io

import pytest
from support.suite_runs import case, comparison, suite_run

from hil.controller.workloads.suites.reports.delegation import COLUMNS, Delegation, summary_words
from hil.controller.workloads.suites.reports.load import load_run
from hil.controller.workloads.suites.reports.markdown import summary_markdown
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.tables import cases_csv

NOTES = {
    "quantise_s": 0.25,
    "lower_s": 1.5,
    "program_bytes": 4096,
    "delegation": {"delegated": {"aten.mul.Tensor": 2, "aten.add.Tensor": 1}, "undelegated": {"aten.sin.default": 1}},
}


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
    assert {failed[name] for name in COLUMNS} == {""}


def test_a_run_of_which_no_compiler_told_has_no_such_columns(tmp_path):
    (row,) = rows(tmp_path, case("a"))
    assert not set(COLUMNS) & set(row)


def test_the_share_of_a_run_is_counted_over_nodes_and_programs(tmp_path):
    plain = case(
        "b", notes={"delegation": {"delegated": {}, "undelegated": {"aten.sin.default": 4, "aten.cos.default": 1}}}
    )
    words = "delegated: 3 of 9 nodes, in 1 of 2 programs; left most: aten.sin.default 5, aten.cos.default 1"
    run = run_of(tmp_path, case("a", notes=NOTES), plain, case("c"))
    assert summary_words(run.records) == words
    assert words.replace("_", "\\_") in summary_markdown(run)
    assert words in report_html(run)


def test_a_case_tells_in_words_how_it_is_shared_out():
    assert Delegation.of(case("a", notes=NOTES)).words == "3 of 4 nodes; left: aten.sin.default 1"
    assert Delegation.of(case("a", notes={"delegation": {"delegated": {"x": 1}}})).words == "1 of 1 node"


@pytest.mark.parametrize("told", [{}, {"delegation": None}, {"delegation": "all"}, {"delegation": [1]}])
def test_other_compilers_tell_of_no_delegation(told):
    assert Delegation.of(case("a", notes=told)) is None
    assert summary_words([case("a", notes=told)]) == ""
