"""JUnit files map outcomes to the counts of CI servers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from support.suite_runs import case, large_run, suite_run

from hil.controller.workloads.suites.reports.junit import format_junit
from hil.controller.workloads.suites.reports.results import load_run

KNOWN = {"outcome": "FAIL", "reason": "tanh is approximated", "issue": "https://example.com/17"}


def tree(folder, *records, **header):
    return ElementTree.fromstring(format_junit(load_run(suite_run(folder, list(records), **header))))


@pytest.mark.parametrize(
    ("outcome", "tag"),
    [
        ("PASS", None),
        ("FAIL", "failure"),
        ("XPASS", "failure"),
        ("COMPILE_ERROR", "error"),
        ("RUN_CRASH", "error"),
        ("TIMEOUT", "error"),
        ("BOARD_LOST", "error"),
        ("BOARD_UNFIT", "error"),
        ("SOMETHING_NEWER", "error"),
        ("XFAIL", "skipped"),
        ("SKIP", "skipped"),
    ],
)
def test_junit_maps_outcomes_to_failure_error_and_skipped(tmp_path, outcome, tag):
    root = tree(tmp_path, case("a", outcome))
    (found,) = root.iter("testcase")
    assert [one.tag for one in found if one.tag != "system-out"] == ([tag] if tag else [])
    counts = {name: int(root.find("testsuite").get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {
        "tests": 1,
        "failures": int(tag == "failure"),
        "errors": int(tag == "error"),
        "skipped": int(tag == "skipped"),
    }


def test_junit_elements_match_jenkins_schema(tmp_path):
    """Of junit-10.xsd in Jenkins' xunit plugin, which GitLab and pytest keep to as well."""
    allowed = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {"name", "time", "tests", "failures", "errors", "skipped", "timestamp"},
        "testcase": {"name", "time", "classname"},
        "failure": {"type", "message"},
        "error": {"type", "message"},
        "skipped": {"message"},
        "properties": set(),
        "property": {"name", "value"},
        "system-out": set(),
    }
    root = tree(tmp_path, *large_run(200), missing=("x",))
    assert {one.tag for one in root.iter()} == set(allowed)
    assert all(set(one.keys()) == allowed[one.tag] for one in root.iter())


def test_junit_expected_failure_has_reason_and_issue(tmp_path):
    (skipped,) = tree(tmp_path, case("a", "XFAIL", expectation=KNOWN)).iter("skipped")
    assert skipped.get("message") == "expected failure (FAIL): tanh is approximated https://example.com/17"


def test_junit_failure_contains_hint_detail_and_commands(tmp_path):
    record = case("a", "FAIL", hint="look at the log", detail="line 1\nline 2", confirmed="always wrong")
    (found,) = tree(tmp_path, record).iter("testcase")
    failure, out = found.find("failure"), found.find("system-out").text
    assert failure.get("type") == "FAIL"
    assert failure.get("message") == record.message
    for told in ("always wrong", "stage compare, board sim", "hint: look at the log", "line 1\nline 2"):
        assert told in failure.text
    assert record.repeat in out and record.diff in out


def test_junit_groups_cases_and_sums_times(tmp_path):
    record = case("a", model="mobile.net v2", timings={"compile_s": 1.5, "run_s": 0.25, "push_s": None})
    root = tree(tmp_path, record)
    (found,) = root.iter("testcase")
    assert found.get("classname") == "models.iree.mobile_net_v2"
    assert found.get("time") == root.find("testsuite").get("time") == "1.750"


def test_junit_lists_unrun_case_as_skipped(tmp_path):
    root = tree(tmp_path, case("a"), missing=("b",))
    assert [one.get("name") for one in root.iter("testcase")] == ["a", "b"]
    assert root.find("testsuite").get("skipped") == "1"
    assert "not run" in next(root.iter("skipped")).get("message")


def test_junit_removes_control_characters(tmp_path):
    words = "\x1b[31merror:\x1b[0m \x00\x08bad \ufffe]]> <tag> & \x1b]0;title\x07done \U0001f600"
    (found,) = tree(tmp_path, case("a", "COMPILE_ERROR", message=words, detail=words)).iter("error")
    assert found.get("message") == "error: bad ]]> <tag> & done \U0001f600"
    assert "error: bad ]]> <tag> & done" in found.text


def test_junit_lists_earlier_attempts(tmp_path):
    tried = {"why": "board lost", "board": "b1", "outcome": "BOARD_LOST", "message": "gone"}
    (found,) = tree(tmp_path, case("a", attempts=(tried,))).iter("testcase")
    assert "other attempt (board lost) on b1: BOARD_LOST gone" in found.find("system-out").text


def test_junit_shortens_long_detail(tmp_path):
    (found,) = tree(tmp_path, case("a", "COMPILE_ERROR", detail="begin" + "x" * 50_000 + "end")).iter("error")
    assert len(found.text) < 6000
    assert "begin" in found.text and found.text.endswith("end") and "characters omitted" in found.text


def test_junit_incomplete_run_has_resume_command(tmp_path):
    def told(*missing):
        root = tree(tmp_path / f"{len(missing)}", case("a"), missing=missing)
        return {one.get("name"): one.get("value") for one in root.iter("property")}

    assert told("b")["resume"] == "hil suite run --resume hil-suites/r"
    assert not {"resume", "command"} & told().keys()
