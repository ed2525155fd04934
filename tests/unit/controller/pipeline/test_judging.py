"""Later differing outputs follow the same rules as the first."""

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
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.repetition import Answer, Repetition
from hil.core.results import Outcome, RunResult

# judge(nodes, outputs, x, change, **options) returns the case of a board with the reference's outputs and then changed
# outputs.
JudgeTwo = Callable[..., Case]


@pytest.fixture
def judge_two(save_onnx: Callable[..., Path], cache: Cache, isolated: Isolated, tmp_path: Path) -> JudgeTwo:
    def call(
        nodes: list[Any], outputs: list[Any], x: Any, change: Callable[[Any], Any], arithmetic: str = "", **options: Any
    ) -> Case:
        path = save_onnx(nodes, [("x", TensorProto.FLOAT, x.shape)], outputs, opset=13)
        (tmp_path / "logs").mkdir(exist_ok=True)
        model, runner = import_model(path, isolated=isolated), Runner(RunContext(cache, isolated))
        case = runner.run_reference(Case("net", path, Options(**options), tmp_path, model, inputs={"x": x}))
        first = case.references[0].outputs
        repetition = Repetition((Answer(1, 0, first), Answer(1, 1, change(first))), differing=tuple(first))
        provenance = {"arithmetic": arithmetic} if arithmetic else {}
        result = RunResult("board", first, provenance=provenance, repetition=repetition)
        return runner.judge(replace(case, result=result))

    return call


ROWS = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
CANCELLING = (
    [
        helper.make_node("Constant", [], ["c"], value_float=1000.0),
        helper.make_node("Add", ["x", "c"], ["sum"]),
        helper.make_node("Sub", ["sum", "c"], ["y"]),
    ],
    [("y", TensorProto.FLOAT, (4, 1000))],
    ROWS,
)
SMALL = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
PRODUCT = [helper.make_node("MatMul", ["x", "x"], ["y"])], [("y", TensorProto.FLOAT, (64, 64))], SMALL


def rounded(outputs: Any) -> Any:
    return {"y": outputs["y"] + np.float32(2e-3) * np.sign(outputs["y"])}


@pytest.mark.parametrize(("error", "passes"), [(1e-4, True), (1.0, False)])
def test_later_answer_allows_reference_noise(judge_two: JudgeTwo, error: float, passes: bool) -> None:
    def change(outputs: Any) -> Any:
        return {"y": outputs["y"] + np.float32(error)}

    case = judge_two(*CANCELLING, change, allow_unstable=("y",))
    assert (case.outcome is Outcome.PASS) is passes, case.reason
    strict = judge_two(*CANCELLING, change)
    assert strict.outcome is Outcome.UNSTABLE and ("the worst answer passes" in strict.reason) is passes


@pytest.mark.parametrize("given", [{}, {"rtol": 1e-7, "atol": 1e-7, "replace_blind_tolerance": True}])
def test_later_answer_uses_board_arithmetic(judge_two: JudgeTwo, given: dict[str, Any]) -> None:
    case = judge_two(*PRODUCT, rounded, "float16", allow_unstable=("y",), **given)
    assert case.outcome is Outcome.PASS, case.reason
    assert judge_two(*PRODUCT, rounded, "", allow_unstable=("y",), **given).outcome is Outcome.UNSTABLE
    assert judge_two(*PRODUCT, lambda outputs: {"y": -outputs["y"]}, "float16").outcome is Outcome.UNSTABLE


def test_later_answer_reports_failed_judgement(judge_two: JudgeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    from hil.errors import ReferenceFailed

    def refuse(*_: Any, **__: Any) -> None:
        raise ReferenceFailed("no kernel", stage="refer")

    monkeypatch.setattr("hil.controller.pipeline.verdicts.in_arithmetic.measure_control", refuse)
    case = judge_two(*PRODUCT, rounded, "float16")
    assert case.outcome is Outcome.UNSTABLE and case.reason.endswith("; hil cannot judge these outputs: no kernel")
    allowed = judge_two(*PRODUCT, rounded, "float16", allow_unstable=("y",))
    assert allowed.outcome is Outcome.REFERENCE_ERROR and allowed.reason == "no kernel"


def test_later_answer_must_match_plain_model(judge_two: JudgeTwo) -> None:
    plain = {"y": SMALL @ SMALL}
    options: dict[str, Any] = {"atol": 0.1, "rtol": 0.0, "allow_unstable": ("y",), "plain_expected": plain}
    near = judge_two(*PRODUCT, rounded, **options)
    far = judge_two(*PRODUCT, rounded, **options, min_sqnr_db=110.0)
    assert near.outcome is Outcome.PASS, near.reason
    assert far.outcome is Outcome.UNSTABLE and "minimum 110 dB" in far.reason
