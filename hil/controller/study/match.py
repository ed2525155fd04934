"""Training steps beside TensorFlow's: every output and every variable of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hil.compare.verdict import compare_output
from hil.controller.study.record import Row
from hil.errors import HilError
from hil.results import OutputComparison
from hil.tensors import Array

Tensors = Mapping[str, Array]


class Differs(HilError):
    """A training step's values differ from TensorFlow's."""

    outcome = "FAIL"


def match_steps(
    row: Row, results: Sequence[Tensors], expected_of: Callable[[int], Tensors], *, rtol: float, atol: float
) -> None:
    """Compare every step, and put into the row how many agreed and the largest difference.

    Args:
        row: of the experiment and the compiler.
        results: each step's outputs and variables.
        expected_of: TensorFlow's, by the step's number from 0.
        rtol, atol: as :class:`hil.controller.study.plan.Asked` has them.

    Raises:
        Differs: one does not agree, or there is nothing to compare.
    """
    if not results:
        raise Differs("there is no step to compare")
    for step, outputs in enumerate(results):
        place = f"step {step + 1} of {len(results)}"
        expected = expected_of(step)
        if outputs.keys() != expected.keys():
            others = ", ".join(sorted(outputs.keys() ^ expected.keys()))
            raise Differs(f"{place}: these are not in both the program and TensorFlow's training: {others}")
        if not expected:
            raise Differs(f"{place}: there is nothing to compare: neither outputs nor variables")
        for name, reference in expected.items():
            compared = _compare(name, outputs[name], reference, rtol, atol)
            if compared.max_abs is not None and compared.max_abs >= row.worst.get("max_abs", 0.0):
                ulp = {"max_abs": compared.max_abs, "max_ulp": compared.max_ulp}
                row.worst = {**ulp, "of": name, "step": step + 1}
            if not compared.passed:
                raise Differs(f"{place}: {name}: {compared.reason}")
        row.steps = step + 1


def _compare(name: str, actual: Array, reference: Array, rtol: float, atol: float) -> OutputComparison:
    """What a tensor's values may differ by depends on how large they are: some optimizers keep squares."""
    largest = 0.0
    if reference.dtype.kind == "f":
        largest = float(np.abs(reference[np.isfinite(reference)]).max(initial=0.0))
    return compare_output(name, actual, reference, rtol=rtol, atol=atol * min(largest or 1.0, 1.0))
