"""Failure classes."""

from __future__ import annotations

import pytest

from hil.controller.workloads.reduce.failure import Failure, normalise


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
