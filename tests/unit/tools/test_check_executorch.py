"""Comparing the outcomes of ExecuTorch's tester and hil."""

from __future__ import annotations

import pytest
from support.suite_runs import case, suite_run

from hil.errors import UsageError
from tools.check_executorch import (
    CRASHED,
    DIFFERENT,
    NOT_RUN,
    OUTCOMES,
    SAME,
    STRICTER,
    compare_outcomes,
    make_stock_name,
    read_records,
)

SHARED = {"delegation": {"delegated": {"aten.add.Tensor": 2}, "undelegated": {"aten.sin.default": 1}}}


def stock(result, message="", delegated=None, undelegated=None):
    return {"result": result, "message": message, "delegated": delegated, "undelegated": undelegated, "outputs": []}


@pytest.mark.parametrize(
    ("outcome", "result", "kind"),
    [
        ("PASS", "SUCCESS", SAME),
        ("FAIL", "OUTPUT_MISMATCH_FAIL", SAME),
        ("COMPILE_ERROR", "LOWER_FAIL", SAME),
        ("IMPORT_ERROR", "QUANTIZE_FAIL", SAME),
        ("LOAD_ERROR", "PTE_RUN_FAIL", SAME),
        ("RUN_CRASH", CRASHED, SAME),
        ("IMPORT_ERROR", "SKIPPED", SAME),
        ("FAIL", "SUCCESS", STRICTER),
        ("LOAD_ERROR", "SKIPPED", NOT_RUN),
        ("FAIL", "SUCCESS_UNDELEGATED", NOT_RUN),
        ("PASS", "OUTPUT_MISMATCH_FAIL", DIFFERENT),
        ("PASS", "PTE_RUN_FAIL", DIFFERENT),
        ("COMPILE_ERROR", "SUCCESS", DIFFERENT),
        ("PASS", CRASHED, DIFFERENT),
    ],
)
def test_compare_outcomes_classifies_tester_results(outcome, result, kind):
    assert compare_outcomes(case("a", outcome), stock(result)).kind == kind


@pytest.mark.parametrize(
    ("delegated", "undelegated", "kind"),
    [
        ({"aten::add.Tensor": 2}, {"aten::sin": 1}, SAME),
        ({"aten::add.Tensor": 3}, {}, DIFFERENT),
        ({"aten::add.Tensor": 1, "aten::mul.Tensor": 1}, {"aten::sin": 1}, DIFFERENT),
        ({"aten::add.Tensor": 2}, {"aten::cos": 1}, DIFFERENT),
        (None, None, SAME),
    ],
)
def test_compare_outcomes_requires_equal_delegation(delegated, undelegated, kind):
    found = compare_outcomes(case("a", notes=SHARED), stock("SUCCESS", "", delegated, undelegated))
    assert found.kind == kind
    assert ("add" in found.hil) == (kind == DIFFERENT)


def test_records_of_requires_matching_suite_and_flow(tmp_path):
    run = suite_run(tmp_path / "run", [case("add_a"), case("sub_a")], suite="operators", flow="xnnpack")
    assert [record.id for record in read_records(run, "operators", "xnnpack", ("add*",))] == ["add_a"]
    with pytest.raises(UsageError, match="expected a run of models with xnnpack, got operators with xnnpack"):
        read_records(run, "models", "xnnpack", ())


@pytest.mark.parametrize("outcome", ["IMPORT_ERROR", "COMPILE_ERROR"])
@pytest.mark.parametrize("result", ["SKIPPED", "SUCCESS_UNDELEGATED"])
def test_compare_outcomes_requires_lowering_of_skipped_cases(outcome, result):
    assert compare_outcomes(case("a", outcome), stock(result, "", {}, {"aten::sin": 1})).kind == DIFFERENT


def test_compare_outcomes_uses_actual_end_of_expected_failure():
    assert compare_outcomes(case("a", "XFAIL", ended="FAIL"), stock("OUTPUT_MISMATCH_FAIL")).kind == SAME


def test_compare_outcomes_includes_message_of_hil():
    found = compare_outcomes(case("a", "LOAD_ERROR", message="no such operator"), stock("SUCCESS", ""))
    assert (found.hil, found.tester) == ("LOAD_ERROR: no such operator", "SUCCESS")


def test_outcomes_cover_every_tester_result():
    suite = pytest.importorskip("executorch.backends.test.suite.reporting")
    assert set(OUTCOMES) == {one.name for one in suite.TestResult} | {CRASHED}


@pytest.mark.parametrize(
    ("flow", "name"),
    [
        ("xnnpack", "xnnpack"),
        ("executorch-portable", "portable"),
        ("xnnpack-static-int8-per-channel", "xnnpack_static_int8_per_channel"),
    ],
)
def test_stock_name_converts_flow_name(flow, name):
    assert make_stock_name(flow) == name
