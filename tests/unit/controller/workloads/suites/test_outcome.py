"""What a record keeps of a case that has ended."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from hil.compare.verdict import compare
from hil.controller.models.flows import Flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.options import Options
from hil.controller.workloads.suites.outcome import record_of
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.store import CaseRecord, SuiteRun
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
        return record_of(spec, Task(case, board="b"), "s", FLOW, Request("s"), SuiteRun(tmp_path, {}))

    return record


def run_case(outputs: dict[str, list[float]], reference: dict[str, list[float]]) -> Case:
    """A case that a board answered in four iterations of 1, 2, 3 and 10 us."""
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
        ({"y": [1.0], "x": [5.0]}, "0-x 1-x"),  # by name, whatever their order
        ({"p": [1.0], "q": [7.0]}, "1-y 1-q"),  # by place, where names differ
    ],
)
def test_the_command_that_shows_the_worst_output_names_it_and_its_own_reference(recorded, tmp_path, reference, worst):
    outputs = {"x": [1.5], "y": [2.0]} if worst == "0-x 0-x" else {"x": [1.0], "y": [1.0]}
    record = recorded(run_case(outputs, reference))
    mine, theirs = (f"{name}.npy" for name in worst.split())
    words = shlex.split(record.diff)
    folder = tmp_path / "cases" / "c"
    assert words[:4] == ["hil", "compare", str(folder / "outputs" / mine), str(folder / "references" / theirs)]
    assert all(Path(word).is_file() for word in words[2:4])


def test_times_of_the_device_are_kept_with_what_tells_noise(recorded):
    record = recorded(run_case({"x": [1.0]}, {"x": [1.0]}))
    assert (record.outcome, record.iterations, record.content) == ("PASS", 4, "of c")
    assert (record.device_p50_ns, record.device_p90_ns) == (2500, 10_000)
    assert (record.diff, record.folder, record.program) == ("", "", "")


def test_of_a_tools_long_words_the_beginning_and_the_end_are_kept(recorded):
    error = CompileFailed("it failed", detail="first" + "x" * 100_000 + "last")
    record = recorded(Case("c", Path("m"), Options(), Path(), outcome=Outcome.COMPILE_ERROR, error=error))
    assert record.detail.startswith("first") and record.detail.endswith("last") and len(record.detail) < 9000


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("choose one with --function: a, b", "hil bundle create MODEL"),
        ("give what you expect: --expected out.npy", "NAME.expected.npz"),
        ("--input x=x.npy", "NAME.inputs.npz"),
        ("choose another --runtime", "another flow"),
        ("use --runtime-hw-type sim", "use --runtime-hw-type sim"),
        ("--dim N=1", "--dim N=1"),
    ],
)
def test_a_hint_names_no_option_that_a_suite_has_not(recorded, hint, told):
    error = CompileFailed("it cannot be", hint=hint)
    record = recorded(Case("c", Path("m"), Options(), Path(), outcome=Outcome.COMPILE_ERROR, error=error))
    assert told in record.hint and (told == hint or hint not in record.hint)
