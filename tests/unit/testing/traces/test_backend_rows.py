"""A test that compares backends has one row per backend in JUnit XML, and skipped backends are reported."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

pytest_plugins = "pytester"

TESTS = """
from types import SimpleNamespace

from hil.core.results import Outcome
from hil.controller.records.suite import CaseRecord
from hil.testing.pytest_plugin.backend_rows import add_rows


def result(backend, outcome, message=""):
    record = CaseRecord(
        id="Net/predict", model="Net", suite="traces", flow=backend, runtime="iree", outcome=outcome, ended=outcome,
        message=message, timings={"run_s": 1.5},
    )
    lines = lambda: [f"{backend}: {outcome}: {message}"]
    return SimpleNamespace(record=record, outcome=Outcome(outcome), backend_id=backend, lines=lines)


def test_net(request):
    one, other = result("iree_llvmcpu", "PASS"), result("board:arm", "FAIL", "1 of 4 values differs")
    add_rows(request.node, [one, other, result("iree_cuda", "SKIP", "no cuda device"), result("tflite", "XFAIL")])
    assert False, "1 of 4 backends failed"
"""


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), ("-n1",)], ids=["alone", "a worker of xdist"])
def test_junit_xml_has_a_row_per_backend(pytester: pytest.Pytester, words: tuple[str, ...]) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.runpytest("--junitxml=found.xml", "-p", "no:cacheprovider", *words)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["hil: SKIP: no cuda device (1 trace)"])
    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "found.xml").iter("testcase")}
    rows = {name: [child.tag for child in case] for name, case in cases.items()}
    assert rows == {
        "test_net": ["failure"],
        "test_net[predict-iree_llvmcpu]": [],
        "test_net[predict-board:arm]": ["failure"],
        "test_net[predict-iree_cuda]": ["skipped"],
        "test_net[predict-tflite]": ["skipped"],
    }
    assert "1 of 4 values differs" in (cases["test_net[predict-board:arm]"].find("failure").text or "")
    assert cases["test_net[predict-iree_llvmcpu]"].get("time") == "1.500"
