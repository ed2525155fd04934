"""Run a test of ExecuTorch's backend tester. check_executorch calls this in an isolated process."""

from __future__ import annotations

from typing import Any


def run(module: str, function: str, choice: int, number: int, flow: str) -> dict[str, Any]:
    """Lower, run and compare a model with the tester.

    Args:
        module, function, choice, number: fields of
            :class:`hil.controller.workloads.suites.cases.torch_cases.TorchTest`.
        flow: the tester's name of a flow.

    Returns:
        ``result`` (the name of a ``TestResult``), ``message``, ``delegated`` and ``undelegated`` (operator -> nodes;
        None if the test failed earlier), and ``outputs``: ``max``, ``mae`` and ``sqnr`` per output.
    """
    from executorch.backends.test.suite.flow import all_flows
    from executorch.backends.test.suite.reporting import begin_test_session, complete_test_session
    from executorch.backends.test.suite.runner import run_test

    from hil.controller.workloads.suites.cases.torch_cases import make_lowering

    chosen = all_flows()[flow]
    lowering = make_lowering(module, function, choice, number, chosen.quantize)
    begin_test_session(None, seed=0)
    try:
        summary = run_test(
            lowering.model,
            lowering.inputs,
            chosen,
            function,
            function,
            number,
            None,
            dynamic_shapes=lowering.dynamic_shapes,
            generate_random_test_inputs=lowering.random_inputs,
        )
    finally:
        complete_test_session()
    return {
        "result": summary.result.name,
        "message": "" if summary.error is None else str(summary.error),
        "delegated": _convert_counts(summary.delegated_op_counts),
        "undelegated": _convert_counts(summary.undelegated_op_counts),
        "outputs": [
            {"max": one.error_max, "mae": one.error_mae, "sqnr": one.sqnr} for one in summary.tensor_error_statistics
        ],
    }


def _convert_counts(found: Any) -> dict[str, int] | None:
    return None if found is None else {str(name): int(count) for name, count in sorted(found.items())}
