"""Failure classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_boards import fake_case

from hil.controller.workloads.reduce.failure import Failure, measure_slowness, normalise, require_failure
from hil.core.results import Outcome, RunResult, Stage
from hil.errors import RunFailed, UsageError


@pytest.mark.parametrize(
    ("message", "other"),
    [
        (
            "iree-compile rejected the model: failed to legalize operation 'torch.operator' (onnx.Foo) at 'node_7'",
            "iree-compile rejected the model: failed to legalize operation 'torch.operator' (onnx.Foo) at 'foo'; more",
        ),
        (
            "iree-compile died of SIGFPE, in Convert on func.func @main of the phase input",
            "iree-compile died of SIGFPE, in Convert on func.func @main$async_3 of the phase input",
        ),
        ("cannot use 'features.0.weight'", "cannot use 'features.weight'"),
        ("'linalg.generic' op uses value 'a.b'", "'linalg.generic' op uses value 'c'"),
        ("cannot tile tensor<4x8xf32> in /tmp/x/1.mlir", "cannot tile tensor<?x2xf16> in /tmp/other/2.mlir"),
    ],
)
def test_normalise_ignores_names_types_and_numbers(message, other):
    assert normalise(message) == normalise(other)


@pytest.mark.parametrize(
    ("message", "other"),
    [
        ("iree-compile died of SIGFPE", "iree-compile died of SIGSEGV"),
        ("iree-compile died with exit code 248", "iree-compile died with exit code 134"),
        ("failed to legalize (onnx.Foo)", "failed to legalize (onnx.Bar)"),
        ("failed to legalize operation 'torch.aten.foo'", "failed to legalize operation 'torch.aten.bar'"),
        ("'linalg.generic' op is invalid", "'linalg.pack' op is invalid"),
        ('see current operation: "torch.foo"(%0)', 'see current operation: "torch.bar"(%0)'),
    ],
)
def test_normalise_keeps_signals_codes_and_operators(message, other):
    assert normalise(message) != normalise(other)


def test_wrong_values_that_are_much_closer_are_another_failure():
    whole = Failure("FAIL", "compare", "values", 12.0)
    assert whole.is_same(Failure("FAIL", "compare", "values", -20.0))
    assert whole.is_same(Failure("FAIL", "compare", "values", 41.0))
    assert not whole.is_same(Failure("FAIL", "compare", "values", 120.0))
    assert not whole.is_same(Failure("FAIL", "compare", "nonfinite", 12.0))


def test_failures_of_other_stages_and_outcomes_differ():
    whole = Failure("TIMEOUT", "run", "run exceeded the limit of N s and was stopped")
    assert not whole.is_same(Failure("TIMEOUT", "load", whole.kind))
    assert not whole.is_same(Failure("RUN_CRASH", "run", whole.kind))


@pytest.mark.parametrize(("time_ns", "same"), [(500.0, True), (499.0, False), (2000.0, True), (None, False)])
def test_slow_part_takes_share_of_time(time_ns, same):
    whole = Failure("PASS", "run", "slow", time_ns=1000.0)
    assert whole.is_same(Failure("PASS", "run", "slow", time_ns=time_ns), 0.5) is same


def test_slowness_is_shortest_iteration():
    case = fake_case("a")
    assert measure_slowness(case) is None  # not run
    times = ((0, 30), (40, 60), (70, 170))
    ran = replace(case, result=RunResult("a", {}, times), outcome=Outcome.SKIP)
    assert measure_slowness(ran) == Failure("PASS", "run", "slow", time_ns=20.0)
    failed = ran.with_error(RunFailed("no"), Stage.RUN)
    assert measure_slowness(failed) is None
    with pytest.raises(UsageError, match="cannot reduce a: RUN_ERROR no"):
        require_failure(failed, is_slow=True)
