"""Outcomes of cases whose reference fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hil.controller.backends.references import table
from hil.controller.models.importers import import_model
from hil.controller.pipeline import stages
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.verdicts.independence import find_unasked_reference
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Artifact, Outcome, RunResult
from hil.errors import ImportFailed, ReferenceFailed, ReferenceTooSlow

FLOAT = [("x", TensorProto.FLOAT, (2,))], [("y", TensorProto.FLOAT, (2,))]


@pytest.fixture
def ended(save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path) -> Callable[..., Case]:
    """Return ended(y, **options): the case of y = -x with board output y, whose plain model no reference can run."""
    model = save_onnx([helper.make_node("Neg", ["x"], ["y"])], *FLOAT)
    nobodys = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.acme")
    plain = save_onnx([nobodys], *FLOAT, name="plain.onnx", domains=("com.acme",))
    context = RunContext(cache, isolated)

    def call(y: list[float], **options: Any) -> Case:
        (tmp_path / "logs").mkdir(exist_ok=True)
        case = Case(
            "net",
            model,
            Options(plain_model=plain, **options),
            tmp_path,
            import_model(model, isolated=isolated),
            inputs={"x": np.array([1, 2], np.float32)},
            result=RunResult("board", {"y": np.array(y, np.float32)}),
        )
        return Runner(context).judge(case)

    return call


@pytest.mark.ci
def test_model_verdict_remains_if_plain_reference_fails(ended: Callable[..., Case]) -> None:
    right, wrong = ended([-1, -2]), ended([1, 2])
    assert (right.outcome, wrong.outcome) == (Outcome.PASS, Outcome.FAIL)
    for case in (right, wrong):
        assert "reference of the model before the recipe failed" in case.reason and "Frobnicate" in case.reason
        assert len(case.verdicts) == 1 and list(case.unanswered) == ["of the model before the recipe"]


def test_unanswered_nearness_raises_reference_error(ended: Callable[..., Case]) -> None:
    right, wrong = ended([-1, -2], min_sqnr_db=20.0), ended([1, 2], min_sqnr_db=20.0)
    assert (right.outcome, right.stage) == (Outcome.REFERENCE_ERROR, "refer")
    assert "cannot compare the outputs with the model before the recipe" in right.reason and bool(right.verdicts[0])
    assert wrong.outcome is Outcome.FAIL


def test_wrong_output_does_not_hide_noise_of_other_output(
    save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path
) -> None:
    """A bisection reads each output separately and must not blame an output that is only noise."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["rest"]),
        helper.make_node("ReduceSum", ["rest"], ["zero"], keepdims=0),
        helper.make_node("Neg", ["x"], ["y"]),
    ]
    outputs = [("zero", TensorProto.FLOAT, ()), ("y", TensorProto.FLOAT, (4, 1000))]
    path = save_onnx(nodes, [("x", TensorProto.FLOAT, (4, 1000))], outputs, opset=13)
    (tmp_path / "logs").mkdir()
    x = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    case = Case("net", path, Options(), tmp_path, import_model(path, isolated=isolated), inputs={"x": x})
    runner = Runner(RunContext(cache, isolated))
    case = runner.run_reference(case)
    near = case.references[0].outputs["zero"] + np.float32(1e-5)
    case = runner.judge(replace(case, result=RunResult("board", {"zero": near, "y": x})))
    assert case.outcome is Outcome.FAIL and case.reason.startswith("output y: ") and "more output" not in case.reason
    assert [(one.passed, one.blind) for one in case.verdicts[0].outputs] == [(False, True), (False, False)]
    assert set(case.references[0].noise) == {"zero", "y"}


@pytest.fixture
def judged(save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path) -> Callable[..., Case]:
    """judged(y, **options) is the case of y = -x on IREE, of which the board answered y."""
    path = save_onnx([helper.make_node("Neg", ["x"], ["y"])], *FLOAT)

    def call(y: list[float], **options: Any) -> Case:
        (tmp_path / "logs").mkdir(exist_ok=True)
        inputs = {"x": np.array([1, 2], np.float32)}
        result = RunResult("board", {"y": np.array(y, np.float32)})
        model = import_model(path, isolated=isolated)
        case = Case("net", path, Options(**options), tmp_path, model, inputs=inputs, result=result)
        return Runner(RunContext(cache, isolated)).judge(case)

    return call


@pytest.mark.ci
def test_self_check_alone_never_passes(judged: Callable[..., Case]) -> None:
    right, wrong = (judged(y, references=("iree-llvm-cpu",)) for y in ([-1, -2], [1, 2]))
    assert (right.outcome, wrong.outcome) == (Outcome.REFERENCE_ERROR, Outcome.FAIL)
    assert "(self-check)" in right.reason and "not run: onnxruntime, onnx-reference" in right.reason
    assert right.error is not None and right.error.hint == "--reference onnxruntime"
    assert [one.relation.value for one in right.verdicts] == ["self-check"]
    both = judged([-1, -2], references=("iree-llvm-cpu", "onnxruntime"))
    assert both.outcome is Outcome.PASS, both.reason


def test_require_independent_rejects_same_library(judged: Callable[..., Case]) -> None:
    options: dict[str, Any] = {"runtime": "onnxruntime", "references": ("onnxruntime",)}
    assert judged([-1, -2], **options).outcome is Outcome.PASS
    strict = judged([-1, -2], **options, require_independent=True)
    assert strict.outcome is Outcome.REFERENCE_ERROR and "(same library)" in strict.reason
    assert strict.error is not None and strict.error.hint == "--reference onnx-reference"
    assert judged([1, 2], **options, require_independent=True).outcome is Outcome.FAIL
    # If the evaluator fails, suggest another reference for this format.
    refused = replace(strict, unanswered={"onnx-reference": ReferenceFailed("no kernel")})
    assert find_unasked_reference(refused, "onnxruntime") == "iree-llvm-cpu"
    assert judged([-1, -2], runtime="onnxruntime", require_independent=True).outcome is Outcome.PASS
    assert judged([-1, -2], expected={"y": np.array([-1, -2], np.float32)}, require_independent=True)


def test_slow_evaluator_falls_back_to_same_library(
    judged: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(*_: Any, **__: Any) -> None:
        raise ReferenceTooSlow("requires more than 2 s of CPU time")

    slow = replace(table.QUICK_EVALUATOR, compute=compute)
    monkeypatch.setattr("hil.controller.backends.references.QUICK_EVALUATOR", slow)
    case = judged([-1, -2], runtime="onnxruntime")
    assert case.outcome is Outcome.PASS and case.verdicts[0].relation.value == "same library"
    assert "onnx-reference failed: requires more than 2 s" in case.reason
    strict = judged([-1, -2], runtime="onnxruntime", require_independent=True)
    assert strict.outcome is Outcome.REFERENCE_ERROR
    assert strict.error is not None and strict.error.hint == "--reference onnx-reference"


def test_report_starts_with_failed_independent_reference(
    save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path
) -> None:
    """The evaluator does not support ONNX Runtime's operators; ONNX Runtime does."""
    node = helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")
    path = save_onnx([node], *FLOAT, domains=("com.microsoft",))
    (tmp_path / "logs").mkdir()
    inputs = {"x": np.array([1, 2], np.float32)}
    options = Options(runtime="onnxruntime")
    case = Case("net", path, options, tmp_path, import_model(path, isolated=isolated), inputs=inputs)
    runner = Runner(RunContext(cache, isolated))
    answer = runner.run_reference(case).references[0]
    right = runner.judge(replace(case, result=RunResult("board", answer.outputs)))
    assert right.outcome is Outcome.PASS and right.reason.startswith("reference onnx-reference failed")
    wrong = runner.judge(replace(case, result=RunResult("board", {"y": np.zeros(2, np.float32)})))
    assert wrong.outcome is Outcome.FAIL and wrong.reason.startswith("reference onnx-reference failed")


@pytest.mark.parametrize(("compiler", "checks"), [("iree 3.13.0", True), ("none", False)])
def test_changed_rewrite_raises_import_error(
    save_onnx: Callable[..., Path],
    cache: Cache,
    isolated: Isolated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    checks: bool,
) -> None:
    def change(model: object, inputs: object, **_: object) -> None:
        raise ImportFailed("the converter changed output y", stage="import")

    monkeypatch.setattr(stages, "check_rewrites", change)
    path = save_onnx([helper.make_node("Neg", ["x"], ["y"])], *FLOAT)
    (tmp_path / "logs").mkdir()
    model, x = import_model(path, isolated=isolated), np.array([1, 2], np.float32)
    artifact = Artifact("iree", "main", {}, {}, "net", compiler)
    case = Case("net", path, Options(), tmp_path, model, artifact, inputs={"x": x}, result=RunResult("board", {"y": x}))
    ended = Runner(RunContext(cache, isolated)).judge(case)
    if checks:
        assert (ended.outcome, ended.stage) == (Outcome.IMPORT_ERROR, "import")
        assert ended.reason == "the converter changed output y"
    else:
        assert ended.outcome is Outcome.FAIL
