"""Records of finished cases."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.sources import iter_trees

from hil.compare.verdict import compare
from hil.controller.models.flows.flow import Flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.outcome import record_of
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task
from hil.core.results import Outcome, RunResult
from hil.errors import CompileFailed

FLOW = Flow("onnxruntime", "onnxruntime")


def make(folder: Path) -> CaseData:
    raise AssertionError("a case that has ended is not made")


@pytest.fixture
def recorded(tmp_path):
    def record(case: Case) -> CaseRecord:
        spec = CaseSpec("c", "m", make, content="of c")
        return record_of(spec, Task(case, board="b"), "s", FLOW, SuiteRequest("s"), SuiteDirectory(tmp_path))

    return record


def test_repeat_selects_runtime_that_replaced_flow(tmp_path):
    case = replace(run_case({"y": [1.0]}, {"y": [1.0]}), folder=tmp_path)
    spec = CaseSpec("c", "m", make, flow=Flow("tflite", "tflite"))
    request = SuiteRequest("s", is_default_flow=True)
    record = record_of(spec, Task(case, board="b"), "s", Flow("iree", "iree"), request, SuiteDirectory(tmp_path))
    assert (record.flow, record.runtime) == ("tflite", "tflite")
    assert record.repeat == "hil suite run s --flow iree --filter =c --runtime tflite"


def run_case(outputs: dict[str, list[float]], reference: dict[str, list[float]]) -> Case:
    """Return a case with board outputs from four iterations of 1, 2, 3 and 10 us."""
    mine = RunResult("b", {name: np.float32(value) for name, value in outputs.items()})
    mine = RunResult(mine.source, mine.outputs, tuple((0, end) for end in (3000, 1000, 10_000, 2000)))
    theirs = RunResult("r", {name: np.float32(value) for name, value in reference.items()})
    verdict = compare(mine, theirs)
    return Case(
        "c", Path("m"), Options(), Path(), result=mine, references=[theirs], verdicts=[verdict], outcome=verdict.outcome
    )


@pytest.mark.parametrize(
    ("reference", "worst"),
    [
        ({"x": [1.0], "y": [2.0]}, "0-x 0-x"),
        ({"y": [1.0], "x": [5.0]}, "0-x 1-x"),  # by name, in any order
        ({"p": [1.0], "q": [7.0]}, "1-y 1-q"),  # by position if names differ
    ],
)
def test_diff_command_names_worst_output_and_reference(recorded, tmp_path, reference, worst):
    outputs = {"x": [1.5], "y": [2.0]} if worst == "0-x 0-x" else {"x": [1.0], "y": [1.0]}
    record = recorded(run_case(outputs, reference))
    mine, theirs = (f"{name}.npy" for name in worst.split())
    words = shlex.split(record.diff)
    folder = tmp_path / "cases" / "c"
    assert words[:4] == ["hil", "compare", str(folder / "outputs" / mine), str(folder / "references" / theirs)]
    assert all(Path(word).is_file() for word in words[2:4])


def test_record_preserves_device_times(recorded):
    record = recorded(run_case({"x": [1.0]}, {"x": [1.0]}))
    assert (record.outcome, record.iterations, record.content) == ("PASS", 4, "of c")
    assert (record.device_p50_ns, record.device_p90_ns) == (2500, 10_000)
    assert (record.diff, record.folder, record.program) == ("", "", "")


def test_record_shortens_long_detail(recorded):
    error = CompileFailed("it failed", detail="first" + "x" * 100_000 + "last")
    record = recorded(Case("c", Path("m"), Options(), Path(), outcome=Outcome.COMPILE_ERROR, error=error))
    assert record.detail.startswith("first") and record.detail.endswith("last") and len(record.detail) < 9000


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--function", "hil bundle create MODEL"),
        ("--expected", "NAME.expected.npz"),
        ("--input", "NAME.inputs.npz"),
        ("--dim", "set --dim N=1"),
        ("", "set --dim N=1"),
    ],
)
def test_record_hint_uses_suite_options(recorded, option, hint):
    error = CompileFailed("it cannot be", hint="set --dim N=1", option=option)
    record = recorded(Case("c", Path("m"), Options(), Path(), outcome=Outcome.COMPILE_ERROR, error=error))
    assert hint in record.hint


def test_hint_with_unavailable_option_names_it_in_a_field():
    """Suites replace such hints by the field. Commands and bundles have these options themselves."""
    option = re.compile(r"--(function|expected|input|runtime)\b(?!-)")
    found = []
    for name, tree in iter_trees(option.pattern):
        if name.startswith(("controller/cli/", "controller/workloads/bundles/")):
            continue
        for node in ast.walk(tree):
            given = {one.arg: one.value for one in getattr(node, "keywords", ())}
            hint = ast.unparse(given["hint"]) if "hint" in given else ""
            if option.search(re.sub(r"hil (board|compile) .*", "", hint)) and "option" not in given:
                found.append(f"{name}:{node.lineno}")
    assert not found
