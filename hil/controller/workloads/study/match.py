"""Training steps beside TensorFlow's: every output and every variable of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hil.compare.verdict import compare_output
from hil.controller.workloads.study.record import Row
from hil.core.results import Noise, Outcome
from hil.core.tensors import Array
from hil.errors import HilError, VacuousTolerance

Tensors = Mapping[str, Array]


class Differs(HilError):
    """A training step's values differ from TensorFlow's."""

    outcome = Outcome.FAIL.value


class CannotBeJudged(HilError):
    """All values agree with TensorFlow's, but for some of them wrong ones would agree as well."""

    outcome = Outcome.BLIND.value


def match_steps(
    row: Row,
    results: Sequence[Tensors],
    expected_of: Callable[[int], tuple[Tensors, Mapping[str, Noise]]],
    *,
    rtol: float,
    atol: float | None,
    allow_blind: Sequence[str] = (),
) -> None:
    """Compare every step, and put into the row how many agreed and the largest difference.

    Args:
        row: of the experiment and the compiler.
        results: each step's outputs and variables.
        expected_of: TensorFlow's, by the step's number from 0, and their noise by name.
        rtol, atol, allow_blind: as :func:`hil.compare.verdict.compare_output` takes them.

    Raises:
        Differs: one does not agree, or there is nothing to compare.
        CannotBeJudged: all agree, and one that is not allowed to be blind would agree with wrong values too.
    """
    if not results:
        raise Differs("there is no step to compare")
    unjudged: dict[str, str] = {}
    for step, outputs in enumerate(results):
        place = f"step {step + 1} of {len(results)}"
        expected, noise = expected_of(step)
        if outputs.keys() != expected.keys():
            others = ", ".join(sorted(outputs.keys() ^ expected.keys()))
            raise Differs(f"{place}: these are not in both the program and TensorFlow's training: {others}")
        if not expected:
            raise Differs(f"{place}: there is nothing to compare: neither outputs nor variables")
        for name, reference in expected.items():
            try:
                compared = compare_output(
                    name,
                    outputs[name],
                    reference,
                    rtol=rtol,
                    atol=atol,
                    noise=noise.get(name),
                    allow_blind=allow_blind,
                )
            except VacuousTolerance as error:
                unjudged.setdefault(name, f"{place}: {error.message}")
                continue
            if compared.max_abs is not None and compared.max_abs >= row.worst.get("max_abs", 0.0):
                ulp = {"max_abs": compared.max_abs, "max_ulp": compared.max_ulp}
                row.worst = {**ulp, "of": name, "step": step + 1}
            if compared.blind and not compared.passed:
                unjudged.setdefault(name, f"{place}: {name}: {compared.reason}")
            elif not compared.passed:
                raise Differs(f"{place}: {name}: {compared.reason}")
        row.steps = step + 1
    if unjudged:
        more = f" (and {len(unjudged) - 1} more tensors)" if len(unjudged) > 1 else ""
        raise CannotBeJudged(
            f"{next(iter(unjudged.values()))}{more}", hint="--allow-blind NAME takes such a tensor as it is"
        )
