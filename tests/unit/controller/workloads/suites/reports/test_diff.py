"""Two runs side by side."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from support.suite_runs import case, comparison, large_run, suite_run

from hil.controller.records.measurements.conditions import MeasurementGrade
from hil.controller.workloads.suites.reports.diff import compare_runs, format_diff_markdown, print_diff, record_diff
from hil.errors import UsageError


def diff(tmp_path, before, after, **header):
    return compare_runs(suite_run(tmp_path / "a", before), suite_run(tmp_path / "b", after, **header))


def ids(moved):
    return [one.id for one in moved]


def test_diff_separates_broken_fixed_and_failing_cases(tmp_path):
    found = diff(
        tmp_path,
        [case("good"), case("breaks"), case("mends", "COMPILE_ERROR"), case("stays", "COMPILE_ERROR"), case("gone")],
        [case("good"), case("breaks", "FAIL"), case("mends"), case("stays", "FAIL"), case("new", "FAIL")],
    )
    assert ids(found.broke) == ["breaks"] and ids(found.fixed) == ["mends"] and ids(found.still_failing) == ["stays"]
    assert (found.still_failing[0].before, found.still_failing[0].after) == ("COMPILE_ERROR", "FAIL")
    assert ids(found.new) == ["new"] and ids(found.gone) == ["gone"]
    assert found.broke[0].repeat.endswith("--filter breaks") and found.broke[0].message.startswith("y: 41")
    assert found.is_worse


def test_diff_lists_new_failures_first_with_command(tmp_path):
    found = diff(tmp_path, [case("a")], [case("a"), case("b"), case("c", "FAIL")])
    assert ids(found.new) == ["c", "b"] and found.is_worse
    console = Console(file=io.StringIO(), width=120)
    print_diff(console, found)
    text = console.file.getvalue()
    assert "--filter c\n" in text and "--filter b" not in text


def test_diff_counts_expected_failure_as_broken(tmp_path):
    found = diff(tmp_path, [case("a"), case("b", "XFAIL")], [case("a", "XFAIL"), case("b", "XPASS")])
    assert ids(found.broke) == ["a"] and ids(found.fixed) == ["b"]


def test_diff_does_not_count_skipped_case_as_fixed(tmp_path):
    found = diff(tmp_path, [case("a", "FAIL")], [case("a", "SKIP")])
    assert not found.fixed and not found.broke


def test_diff_marks_unrun_cases_of_incomplete_run(tmp_path):
    found = diff(tmp_path, [case("a"), case("b"), case("c")], [case("a")], ids=["a", "b"])
    assert [(one.id, one.after) for one in found.gone] == [("b", "not run"), ("c", "absent")]
    assert any("1 of 2 cases not run" in note for note in found.notes)


def measured(id, *, p50=100e3, p90=110e3, iterations=10, sqnr_db=90.0, max_abs=1e-5, size=10_000, program=""):
    outputs = (comparison(sqnr_db=sqnr_db, max_abs=max_abs),)
    device = {"device_p50_ns": p50, "device_p90_ns": p90, "iterations": iterations}
    return case(id, **device, artifact_bytes=size, program=program, outputs=outputs)


@pytest.mark.parametrize(
    ("change", "what", "ratio", "worse"),
    [
        ({"p50": 150e3}, "device_p50_ns", 1.5, True),
        ({"p50": 50e3, "p90": 60e3}, "device_p50_ns", 0.5, False),
        ({"size": 20_000}, "artifact_bytes", 2.0, True),
        ({"max_abs": 1e-3}, "max_abs", 100.0, True),
        ({"max_abs": 0.0}, "max_abs", 0.0, False),
        ({"sqnr_db": 60.0}, "sqnr_db", None, True),
        ({"sqnr_db": "inf"}, "sqnr_db", None, False),
    ],
)
def test_diff_reports_changed_number_with_ratio(tmp_path, change, what, ratio, worse):
    found = diff(tmp_path, [measured("a")], [measured("a", **change)])
    (changed,) = found.changed
    assert (changed.id, changed.what, changed.worse) == ("a", what, worse)
    assert changed.ratio == (None if ratio is None else pytest.approx(ratio))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"p50": 115e3}),
        ({"p50": 2e3, "p90": 2e3}, {"p50": 9e3}),  # too short to compare
        ({"p90": 160e3}, {"p50": 150e3, "p90": 190e3}),  # within the earlier spread
        ({"p50": 150e3}, {"p90": 160e3}),
        ({}, {"sqnr_db": 90.5}),
        ({}, {"max_abs": 1.5e-5}),
        ({}, {"size": 10_100}),
        ({"sqnr_db": "inf"}, {"sqnr_db": "inf"}),
        ({"sqnr_db": None}, {"sqnr_db": 20.0}),
        ({"p50": None}, {}),
    ],
)
def test_diff_ignores_noise(tmp_path, before, after):
    assert diff(tmp_path, [measured("a", **before)], [measured("a", **after)]).changed == ()


def test_diff_lists_largest_regression_first(tmp_path):
    found = diff(
        tmp_path,
        [measured(name) for name in "abc"],
        [measured("a", p50=50e3, p90=51e3), measured("b", p50=200e3), measured("c", p50=900e3)],
    )
    assert ids(found.changed) == ["c", "b", "a"]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (10, 1), (4, 10)])
def test_diff_skips_times_of_few_iterations_with_note(tmp_path, before, after):
    found = diff(tmp_path, [measured("a", iterations=before)], [measured("a", p50=900e3, iterations=after)])
    assert found.changed == () and (found.device_ratio, found.device_cases, found.device_few) == (None, 0, 1)
    assert "device times of 1 case not compared: fewer than 5 iterations" in format_diff_markdown(found)


def test_diff_skips_times_with_grade_f(tmp_path):
    grade = MeasurementGrade(grade="F", reasons=["the board throttled"])
    found = diff(tmp_path, [measured("a")], [measured("a", p50=900e3).replace(grade=grade)])
    assert found.changed == () and found.device_few == 1
    assert diff(tmp_path, [measured("a")], [measured("a", p50=900e3)]).changed


def test_diff_reports_size_of_shared_program_once(tmp_path):
    alone = measured("alone", size=5_000, program="p")
    before = [alone, *(measured(name, program="g1") for name in "abc")]
    after = [alone, *(measured(name, program="g2", size=20_000) for name in "abc")]
    found = diff(tmp_path, before, after)
    (changed,) = found.changed
    assert (changed.id, changed.what, changed.ratio, changed.cases) == ("a", "artifact_bytes", 2.0, 3)
    console = Console(file=io.StringIO(), width=120)
    print_diff(console, found)
    assert "  a and 2 more in the same program  9.8 KiB -> 19.5 KiB (2.00x)" in console.file.getvalue()
    assert "| `a` and 2 more in the same program | 9.8 KiB" in format_diff_markdown(found)


def test_diff_ignores_size_of_regrouped_programs(tmp_path):
    before = [*(measured(name, program="g1") for name in "ab"), measured("c", program="own", size=3_000)]
    after = [measured("a", program="a", size=3_000), *(measured(name, program="g2", size=20_000) for name in "bc")]
    assert diff(tmp_path, before, after).changed == ()


def test_diff_averages_device_time_geometrically(tmp_path):
    found = diff(tmp_path, [measured("a"), measured("b")], [measured("a", p50=200e3), measured("b", p50=50e3)])
    assert found.device_ratio == pytest.approx(1.0) and found.device_cases == 2


def test_diff_notes_different_flow_board_and_version(tmp_path):
    versions = {"hil": "0.1.0", "iree-compile": "3.14.0", "onnxruntime": "1.31.1"}
    found = diff(tmp_path, [case("a")], [case("a")], flow="iree-O3", boards=["rpi5"], versions=versions)
    assert list(found.notes) == [
        "flow: iree before, iree-O3 after",
        "boards: sim before, rpi5 after",
        "iree-compile: 3.13.0 before, 3.14.0 after",
    ]


def test_diff_of_same_run_has_empty_lists(tmp_path):
    folder = suite_run(tmp_path / "a", large_run(300))
    found = compare_runs(folder, folder)
    assert not (found.broke or found.fixed or found.new or found.gone or found.changed or found.notes)
    assert found.still_failing and not found.is_worse and found.device_ratio == pytest.approx(1.0)


def test_diff_rejects_directory_without_run(tmp_path):
    with pytest.raises(UsageError, match="is not a suite run"):
        compare_runs(suite_run(tmp_path / "a", [case("a")]), tmp_path)


def test_diff_json_contains_every_change(tmp_path):
    found = diff(tmp_path, [case("a"), measured("b")], [case("a", "FAIL"), measured("b", sqnr_db="inf")])
    told = json.loads(json.dumps(record_diff(found).to_json(), allow_nan=False))
    assert told["counts"]["broke"] == 1 and told["broke"][0]["id"] == "a"
    assert {one["what"]: one["after"] for one in told["changed"]}["sqnr_db"] in (7.1, "inf")
    assert told["after"]["flow"] == "iree" and told["before"]["folder"].endswith("a")


def test_diff_terminal_and_markdown_match(tmp_path):
    before = [case(f"c{n}") for n in range(30)] + [measured("slow")]
    after = [case(f"c{n}", "FAIL", message="bad | [/red] <b>") for n in range(30)] + [measured("slow", p50=250e3)]
    found = diff(tmp_path, before, after, flow="iree-O3")
    console = Console(file=io.StringIO(), width=120)
    print_diff(console, found)
    text, page = console.file.getvalue(), format_diff_markdown(found)
    for told in ("flow: iree before, iree-O3 after", "30 broke, 0 fixed", "100 us -> 250 us (2.50x)"):
        assert told in text and told in page.replace("\\>", ">")
    assert text.count("hil suite run") == 20 and "and 10 more" in text
    assert "| `c29` | PASS | FAIL | bad \\| \\[/red\\] \\<b\\> |" in page
