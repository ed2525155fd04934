"""With default settings, every workload rejects negated, doubled, zeroed or permuted outputs at any scale, and accepts
the right output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.commands import Ended
from support.models import save_model
from support.plugin_runs import Project
from support.slow import slow_except

import hil as library
from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.controller.records.study import StudyRow
from hil.controller.workloads.study.run import CannotBeJudged, Differs, match_steps
from hil.controller.workloads.traces.comparing import compare_traces, judge_trace
from hil.core.results import Artifact, Outcome, Relation
from hil.core.tensors import Array, TensorSpec
from hil.testing import ModuleCall, Trace

POWERS = (-12, -10, -3, 0, 6, 12)
VECTOR = TensorSpec("x", "float32", (16,))
# The right output is off by one unit of rounding in places, as on a different machine.
ANSWERS: dict[str, Callable[[Array], Array]] = {
    "right": lambda y: np.where(np.arange(y.size) % 3, y, np.nextafter(y, np.float32(np.inf))),
    "negated": lambda y: -y,
    "doubled": lambda y: 2 * y,
    "zeroed": lambda y: 0 * y,
    "permuted": lambda y: np.roll(y, 5),
}


def given(scale: float) -> Array:
    return (np.random.default_rng(7).standard_normal(16) * scale).astype(np.float32)


CASES = {
    f"{what}-e{power}": (given(10.0**power), answer(2 * given(10.0**power)))
    for power in POWERS
    for what, answer in ANSWERS.items()
}
RIGHT = {name for name in CASES if name.startswith("right")}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """y = x + x for ONNX Runtime, with one case for each expected output."""
    folder = tmp_path_factory.mktemp("bundle")
    value = (TensorProto.FLOAT, [16])
    model = save_model(
        folder / "twice.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [("x", *value)], [("y", *value)]
    )
    output = TensorSpec("y", "float32", (16,))
    program = Artifact("onnxruntime", "twice.onnx", {"twice.onnx": model}, {}, "test", "none", (), (VECTOR,), (output,))
    cases = [MethodTestCase([x], [y], name=name) for name, (x, y) in CASES.items()]
    Bundle.create(program, [MethodTestSuite("test", cases)]).save(folder / "twice.hilb")
    return folder / "twice.hilb"


def passed(outcomes: dict[str, str]) -> set[str]:
    """Return the names of the passing cases. Assert that every case is present."""
    found = {name for name in CASES for told in outcomes if told.endswith(name)}
    assert found == set(CASES) and len(outcomes) == len(CASES), sorted(set(CASES) - found)
    return {name for name in CASES for told, outcome in outcomes.items() if told.endswith(name) and outcome == "PASS"}


def test_run_rejects_wrong_outputs(bundle, simulator, environment, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", environment["HIL_CACHE_DIR"])
    found = {}
    with library.connect(simulator) as board:
        for name, (x, y) in CASES.items():
            model = bundle.parent / "twice.onnx"
            case = library.run(model, board, {"x": x}, expected={"y": y}, runtime="onnxruntime")
            found[name] = case.outcome.value
            if name not in RIGHT:
                assert case.outcome in (Outcome.FAIL, Outcome.BLIND)
    assert passed(found) == RIGHT


def test_bundle_run_rejects_wrong_outputs(hil: Callable[..., Ended], bundle, simulator):
    ended = hil("bundle", "run", bundle, "--board", simulator, "--json")
    assert ended.code == 1
    assert passed({case["name"]: case["outcome"] for case in ended.document["cases"]}) == RIGHT


def test_agent_verify_rejects_wrong_outputs(bundle):
    command = [sys.executable, "-m", "hil.agent", "verify", str(bundle), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert passed({case["case"]: case["outcome"] for case in json.loads(done.stdout)["cases"]}) == RIGHT


def test_suite_rejects_wrong_outputs(hil, bundle, simulator, tmp_path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "twice.hilb").symlink_to(bundle)
    ended = hil("suite", "run", tmp_path / "nets", "--flow", "onnxruntime", "--board", simulator, "--json")
    assert ended.code == 1
    assert passed({case["id"]: case["outcome"] for case in ended.document["cases"]}) == RIGHT


def test_pytest_plugin_rejects_wrong_outputs(bundle, tmp_path, environment):
    project = Project(tmp_path / "project", environment).set_up(bundle)
    tested = project.test("--hil-flow=onnxruntime", "--runtime-hw-type=sim")
    ended = {name.removesuffix("-sim"): "PASS" if word == "passed" else word for name, word in tested.outcomes.items()}
    assert passed(ended) == RIGHT


def test_compare_traces_rejects_wrong_outputs():
    found = {}
    for name, (x, y) in CASES.items():
        traces = [
            Trace("M", backend, "t", calls=[ModuleCall("f", (x,), (answer,))])
            for backend, answer in (("tf", 2 * x), ("b", y))
        ]
        found[name] = judge_trace(compare_traces(*traces))[0].value
    assert passed(found) == RIGHT


def test_study_rejects_wrong_outputs():
    found = {}
    for name, (x, y) in CASES.items():
        known = {"experiment": "e", "title": "", "reported": "", "toolchain": "iree"}
        row = StudyRow(**known, relation=Relation.INDEPENDENT, stages=[])
        try:
            match_steps(row, [{"loss": y}], lambda step, x=x: ({"loss": 2 * x}, {}), rtol=1e-4, atol=None)
            found[name] = "PASS"
        except (Differs, CannotBeJudged) as error:
            found[name] = error.outcome
    assert passed(found) == RIGHT


WEIGHTS = np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32)


def layered(path: Path, weights: Array) -> Path:
    """Save a model of two layers. The outputs of the second scale with its weights."""
    first = numpy_helper.from_array(np.abs(WEIGHTS.T), "first")
    second = numpy_helper.from_array(weights.astype(np.float32), "second")
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], "fc1"),
        helper.make_node("MatMul", ["h", "second"], ["y"], "fc2"),
    ]
    values = [("x", TensorProto.FLOAT, [4, 6])], [("y", TensorProto.FLOAT, [4, 6])]
    return save_model(path, nodes, *values, [first, second])


@pytest.mark.parametrize(
    ("what", "scale"),
    slow_except([("right", 1e-10), ("negated", 1e-12), ("doubled", 1e12), ("zeroed", 1e-10), ("permuted", 1e-10)], 1),
)
def test_bisect_finds_wrong_layer_at_any_scale(hil, simulator, tmp_path, what, scale):
    weights = WEIGHTS * np.float32(scale)
    wrong = {"right": weights, "permuted": weights[:, ::-1].copy()}.get(what)
    if wrong is None:
        wrong = ANSWERS[what](weights)
    model, other = layered(tmp_path / "m.onnx", weights), layered(tmp_path / "other.onnx", wrong)
    onnx.checker.check_model(str(other))
    how = ["--board", simulator, "--runtime", "onnxruntime", "--json"]
    ended = hil("bisect", model, "--artifact-model", other, *how)
    assert ended.document["first_isolated"] == (None if what == "right" else "MatMul_fc2"), ended.out
    assert ended.code == (0 if what == "right" else 1)
