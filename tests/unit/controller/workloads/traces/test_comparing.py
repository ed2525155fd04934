"""Two traces are compared call by call and output by output, to the last."""

from __future__ import annotations

import numpy as np
import pytest

from hil.compare.criteria import parse_accept
from hil.controller.workloads.traces.comparing import Judging, compare_traces, judge_trace
from hil.core.results import Outcome
from hil.errors import UsageError
from hil.testing import ModuleCall, Trace


def traced(backend: str, *calls: ModuleCall) -> Trace:
    return Trace("Model", backend, "trace", calls=list(calls))


def call(*outputs: object, method: str = "predict", rtol: float | None = None, atol: float | None = None) -> ModuleCall:
    return ModuleCall(method, (), outputs, rtol, atol)


ONES = np.ones(4, np.float32)


def test_equal_traces_pass():
    one = traced("tf", call({"a": ONES, "b": [ONES, None, 3]}), call())
    assert all(compare_traces(one, one)) and judge_trace(compare_traces(one, one)) == (Outcome.PASS, "")


def test_compare_reports_every_wrong_output():
    wrong = ONES.copy()
    wrong[2] = 1.5
    reference = traced("tf", call(ONES, {"x": ONES}), call(ONES), call(ONES))
    target = traced("board", call(ONES, {"x": wrong}), call(ONES), call(-wrong))
    first, second, third = compare_traces(reference, target)
    assert not first and second and not third
    assert [(output.name, output.passed) for output in first.outputs] == [("0", True), ("1.x", False)]
    assert judge_trace([first, second, third])[1] == (
        "call 0 (predict): output 1.x: 1 of 4 values out of tolerance (rtol 1.3e-06, atol 1e-05), worst at [2]: 1.5, "
        "the reference has 1 (and 1 more of 3 calls)"
    )
    told = first.lines()
    assert told[0] == "call 0 (predict): WRONG" and "max abs 0.5" in told[-1]
    assert len(first.lines(failed_only=True)) == 3


def test_blind_call_gives_blind_unless_other_call_fails():
    near = np.array([1, 1 + 2e-6, 1 - 2e-6], np.float32)
    blind, wrong = call(near[::-1].copy()), call(2 * near)
    reference = traced("tf", call(near), call(near))
    found = compare_traces(reference, traced("board", blind, blind))
    assert judge_trace(found)[0] is Outcome.BLIND and not any(found) and ": BLIND" in found[0].lines()[0]
    found = compare_traces(reference, traced("board", blind, wrong))
    assert judge_trace(found)[0] is Outcome.FAIL and judge_trace(found)[1].startswith("call 1 (predict)")


def asked(given: object, *answers: np.ndarray, **more: float) -> ModuleCall:
    return ModuleCall("predict", (given,), answers, more.get("rtol"), more.get("atol"))


def test_compare_reports_different_inputs():
    reference = traced("tf", asked(ONES, ONES))
    [other] = compare_traces(reference, traced("board", asked(2 * ONES, 2 * ONES)))
    assert not other and other.reason == "inputs differ from tf: 0"
    [wrong] = compare_traces(reference, traced("board", asked(ONES, 2 * ONES)))
    assert not wrong and not wrong.reason


@pytest.mark.parametrize("given", [2 * ONES, {"a": ONES}, ONES.astype(np.float64), ONES[:2], 3])
@pytest.mark.parametrize("answers", [(ONES,), ()])
def test_different_inputs_fail_call_with_equal_outputs(given, answers):
    [other] = compare_traces(traced("tf", asked(ONES, *answers)), traced("board", asked(given, *answers)))
    assert not other and other.reason.startswith("inputs differ from tf")


def test_compare_includes_python_values_of_inputs():
    [other] = compare_traces(traced("tf", asked([ONES, 3], ONES)), traced("board", asked([ONES, 4], ONES)))
    assert not other


def test_inputs_within_call_tolerance_are_equal():
    near = ONES * np.float32(1.01)
    for rtol, same in ((0.02, True), (1e-3, False)):
        reference = traced("tf", asked(ONES, ONES, rtol=rtol))
        assert bool(compare_traces(reference, traced("board", asked(near, ONES)))[0]) is same


def test_returned_inputs_are_judged_in_earlier_call():
    near = ONES * np.float32(1.01)
    first = traced("tf", asked(ONES, ONES, rtol=0.02), asked(ONES, 2 * ONES))
    assert all(compare_traces(first, traced("board", asked(ONES, near), asked(near, 2 * ONES))))
    # A value that no call returned counts as different input.
    assert not compare_traces(first, traced("board", asked(ONES, ONES), asked(near, 2 * ONES)))[1]


def test_compare_uses_tolerance_of_call():
    near = ONES * np.float32(1.01)
    for reference, passes in ((call(ONES), False), (call(ONES, rtol=0.02), True), (call(ONES, atol=0.005), False)):
        [found] = compare_traces(traced("tf", reference), traced("board", call(near)))
        assert bool(found) is passes
    with pytest.raises(UsageError, match="flipped signs would agree"):
        compare_traces(traced("tf", call(ONES, atol=5.0)), traced("board", call(near)))


def test_criteria_judge_outputs_of_calls():
    reference, near = (traced(name, call(ONES * scale)) for name, scale in (("tf", 1), ("board", 1.01)))
    for text, passes in (("rmse<=0.1", True), ("rmse<=0.001", False), ("other: rmse<=0.1", False)):
        [found] = compare_traces(reference, near, Judging(accept=parse_accept([text])))
        assert bool(found) is passes


@pytest.mark.parametrize(
    ("reference", "target", "said"),
    [
        (call(ONES), call(ONES, method="other"), "call 0 (other): tf called predict instead"),
        (call(ONES), call(ONES, ONES), "returned 0, 1, tf returned 0"),
        (call({"a": ONES}), call({"b": ONES}), "returned 0.b, tf returned 0.a"),
        (call(ONES, 3), call(ONES, 4), "returned 0, 1, tf returned 0, 1"),
        (call(ONES), call(ONES[:2]), "output 0: shape 2, the reference has 4"),
        (call(ONES), call(ONES.astype(np.float64)), "dtype float64, the reference has float32"),
    ],
)
def test_calls_of_other_kind_fail(reference, target, said):
    assert said in judge_trace(compare_traces(traced("tf", reference), traced("board", target)))[1]


def test_missing_call_fails():
    one, two = traced("tf", call(ONES)), traced("board", call(ONES), call(ONES))
    assert "call missing on tf" in judge_trace(compare_traces(one, two))[1]
    assert "call missing on tf" in judge_trace(compare_traces(traced("tf"), one))[1]
    assert "call missing on board" in judge_trace(compare_traces(two, traced("board", call(ONES))))[1]
