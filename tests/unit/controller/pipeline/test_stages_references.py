"""What a case ends in where a reference of it cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hil.controller.models.importers import import_model
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.options import Options
from hil.controller.pipeline.runner import Runner
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Outcome, RunResult

FLOAT = [("x", TensorProto.FLOAT, (2,))], [("y", TensorProto.FLOAT, (2,))]


@pytest.fixture
def ended(save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path) -> Callable[..., Case]:
    """ended(y, **options) is the case of y = -x, whose plain model no reference can run; the board answered y."""
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


def test_the_models_own_verdict_stands_where_the_plain_models_reference_fails(ended: Callable[..., Case]) -> None:
    right, wrong = ended([-1, -2]), ended([1, 2])
    assert (right.outcome, wrong.outcome) == (Outcome.PASS, Outcome.FAIL)
    for case in (right, wrong):
        assert "of the plain model could not answer" in case.reason and "Frobnicate" in case.reason
        assert len(case.verdicts) == 1 and list(case.unanswered) == ["of the plain model"]


def test_a_nearness_that_was_asked_for_and_cannot_be_told_is_no_pass(ended: Callable[..., Case]) -> None:
    right, wrong = ended([-1, -2], min_sqnr_db=20.0), ended([1, 2], min_sqnr_db=20.0)
    assert (right.outcome, right.stage) == (Outcome.REFERENCE_ERROR, "refer")
    assert "how near the answer is to the plain model's" in right.reason and bool(right.verdicts[0])
    assert wrong.outcome is Outcome.FAIL


def test_a_wrong_output_hides_no_noise_of_another(
    save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path
) -> None:
    """Whoever looks at each output by itself, as a bisection does, must not blame the one that is only noise."""
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
