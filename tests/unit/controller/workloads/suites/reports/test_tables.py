"""CSV: everything of a case in a row, everything of an output in another file."""

from __future__ import annotations

import csv
import io

import pytest
from support.generations import stored_generation
from support.suite_runs import case, comparison, suite_run

from hil.controller.records.base import make_record
from hil.controller.records.outputs import StoredComparison
from hil.controller.workloads.suites.reports.results import find_worst, load_run
from hil.controller.workloads.suites.reports.tables import format_cases_csv, format_outputs_csv


def rows(make, folder, *records):
    return list(csv.DictReader(io.StringIO(make(load_run(suite_run(folder, list(records)))))))


def test_cases_csv_row_describes_case(tmp_path):
    (row,) = rows(
        format_cases_csv,
        tmp_path,
        case(
            "m_layer_Conv_c1",
            "FAIL",
            model="m",
            layer="c1",
            op="Conv+Relu",
            timings={"import_s": 0.25, "compile_s": 1.5, "push_s": None},
            device_p50_ns=1_500_000.0,
            device_p90_ns=2_000_000.0,
            cached=True,
            confirmed="flaky",
            attempts=({"why": "confirm", "board": "sim", "outcome": "PASS", "message": ""},),
            plain_outputs=(comparison(sqnr_db=31.25),),
        ),
    )
    assert row["id"] == "m_layer_Conv_c1"
    assert (row["model"], row["layer"], row["op"], row["flow"]) == ("m", "c1", "Conv+Relu", "iree")
    assert (row["outcome"], row["stage"]) == ("FAIL", "compare")
    assert (row["import_s"], row["compile_s"], row["push_s"]) == ("0.25", "1.5", "")
    assert (row["device_p50_ms"], row["device_p90_ms"], row["iterations"]) == ("1.5", "2.0", "10")
    assert (row["artifact_bytes"], row["cached"]) == ("18400", "yes")
    assert (row["worst_output"], row["max_abs"], row["sqnr_db"], row["mismatches"]) == ("y", "0.37", "7.1", "41")
    assert (row["plain_sqnr_db"], row["confirmed"], row["attempts"]) == ("31.25", "flaky", "1")
    assert row["message"].startswith("y: 41 of 1024")


def test_uncompared_case_has_empty_cells(tmp_path):
    (row,) = rows(format_cases_csv, tmp_path, case("a", "COMPILE_ERROR", cached=None))
    assert {
        row[name]
        for name in ("worst_output", "max_abs", "sqnr_db", "plain_sqnr_db", "device_p50_ms", "iterations", "cached")
    } == {""}


def test_cases_csv_has_generation_columns_only_with_prompts(tmp_path):
    plain, prompt = rows(
        format_cases_csv, tmp_path / "both", case("a"), case("b", generation=stored_generation().to_json())
    )
    assert (prompt["worst_kl"], prompt["ttft_ms"], prompt["tpot_p50_ms"]) == ("1e-09", "2.0", "0.5")
    assert (prompt["decode_tokens_per_s"], prompt["top1"], prompt["steps"]) == ("1600.0", "1.0", "2")
    assert "logits: worst KL 1e-09 at position 2, bound 1e-06" in prompt["evidence"]
    assert plain["worst_kl"] == plain["ttft_ms"] == ""
    assert "worst_kl" not in rows(format_cases_csv, tmp_path / "plain", case("a"))[0]


def test_outputs_csv_has_row_per_output_and_reference(tmp_path):
    found = rows(
        format_outputs_csv,
        tmp_path,
        case(
            "a",
            outputs=(comparison(name="y"), comparison(name="z", sqnr_db="inf")),
            plain_outputs=(comparison(name="y", sqnr_db=30.0),),
            plain_against="onnxruntime, float",
        ),
    )
    assert [(row["id"], row["beside"], row["name"], row["sqnr_db"]) for row in found] == [
        ("a", "own", "y", "92.5"),
        ("a", "own", "z", "inf"),
        ("a", "plain", "y", "30.0"),
    ]
    assert (found[0]["shape"], found[0]["rtol"], found[2]["against"]) == ("1 16 64", "0.001", "onnxruntime, float")


def test_outputs_csv_has_criteria_cell(tmp_path):
    criteria = [
        {"criterion": "top1>=0.99", "value": 1.0, "bound": 0.99, "passed": True, "reason": ""},
        {"criterion": "python:j.py:f", "value": None, "bound": None, "passed": False, "reason": "moved"},
    ]
    found = rows(format_outputs_csv, tmp_path, case("a", outputs=(comparison(criteria=criteria), comparison())))
    assert [row["criteria"] for row in found] == ["top1>=0.99: 1, met; python:j.py:f: not met (moved)", ""]


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "-2+3", "\t=1"])
def test_csv_escapes_formula_in_name(tmp_path, name):
    (row,) = rows(format_cases_csv, tmp_path, case("a", model=name))
    assert row["model"] == f"'{name}"


def test_csv_escapes_formula_in_values(tmp_path):
    (row,) = rows(format_outputs_csv, tmp_path, case("a", outputs=(comparison(worst_values=["=1+1", -2.5]),)))
    assert row["worst_values"] == "'=1+1 -2.5"


@pytest.mark.parametrize("message", ['he said "no", twice', "two\nlines", "a;b,c"])
def test_csv_quotes_special_characters(tmp_path, message):
    (row,) = rows(format_cases_csv, tmp_path, case("a", "RUN_ERROR", message=message))
    assert row["message"] == message


def test_csv_preserves_negative_and_infinite_numbers(tmp_path):
    first, second = rows(
        format_cases_csv,
        tmp_path,
        case("a", outputs=(comparison(sqnr_db=-3.5),)),
        case("b", outputs=(comparison(sqnr_db="-inf"),)),
    )
    assert (first["sqnr_db"], second["sqnr_db"]) == ("-3.5", "-inf")


@pytest.mark.parametrize(
    ("outputs", "place"),
    [
        ([], None),
        ([comparison(sqnr_db=90), comparison(sqnr_db=40), comparison(sqnr_db="inf")], 1),
        ([comparison(sqnr_db=10), comparison(passed=False, sqnr_db=60)], 1),
        ([comparison(passed=False, sqnr_db=6), comparison(passed=False, mismatch_share=None, sqnr_db=None)], 1),
        ([comparison(sqnr_db=None), comparison(sqnr_db=80)], 1),
    ],
)
def test_worst_prefers_failed_then_lowest_sqnr(outputs, place):
    assert find_worst([make_record(one, StoredComparison) for one in outputs]) == place
