"""What a program's run says of the layers in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hil.compare.verdict import compare_output, outcome_of
from hil.controller.analysis.bisect.result import Finding
from hil.controller.analysis.layers import Layer
from hil.controller.pipeline.case import Case
from hil.core.results import BOARD_OUTCOMES, Outcome, OutputComparison
from hil.errors import UsageError

_BY_CHANCE = "random numbers go into it, so no two runs agree"

# Of all tensors, or tensor name -> its own; None, or a tensor that has none, is the dtype's default.
Atol = float | Mapping[str, float] | None


def finding_of(case: Case, rtol: float | None, atol: Atol, by_chance: Collection[str] = ()) -> Finding:
    """What a case came to, its outputs judged one by one.

    A tolerance that suits a model's outputs may be as large as all that an inner tensor holds: there it cannot fail,
    and the tensor is not judged. Nor is one that differs in every run.

    Args:
        case: ended, compared within the dtypes' default tolerances.
        rtol, atol: the tolerance that is meant.
        by_chance: names of tensors that random numbers go into.
    """
    outcome = case.outcome or Outcome.SKIP
    if case.error is not None or case.result is None or not case.references:
        error = case.error
        return Finding(outcome, case.reason, case.stage if error else "", error.hint if error else "")
    (verdict,) = case.verdicts
    is_judged_already = rtol is None and atol is None and not by_chance
    if is_judged_already or not verdict.outputs:
        return Finding(outcome, case.reason, outputs=verdict.outputs)
    judged: list[OutputComparison] = []
    unjudged: dict[str, str] = {}
    given, wanted = case.result.outputs, case.references[0].outputs
    if given.keys() != wanted.keys():  # the program knows no names: they come in the model's order
        given = dict(zip(wanted, given.values(), strict=True))
    for name, reference in wanted.items():
        if name in by_chance:
            unjudged[name] = _BY_CHANCE
            continue
        own = atol.get(name) if isinstance(atol, Mapping) else atol
        try:
            judged.append(
                compare_output(
                    name,
                    given[name],
                    reference,
                    rtol=rtol,
                    atol=own,
                    noise=case.references[0].noise.get(name),
                    allow_blind=case.options.allow_blind,
                )
            )
        except UsageError as error:
            unjudged[name] = error.message
    return _finding(judged, unjudged)


def within(layer: Layer, whole: Finding) -> Finding:
    """What a layer came to in a run that returned its tensors among others."""
    names = set(layer.outputs)
    outputs = [one for one in whole.outputs if one.name in names]
    unjudged = {name: why for name, why in whole.unjudged.items() if name in names}
    if len(outputs) + len(unjudged) == len(names):
        return _finding(outputs, unjudged)
    if whole.outputs:
        return Finding(Outcome.SKIP, "it takes from a layer that could not be run, or is that layer")
    return Finding(Outcome.SKIP, f"the whole model ended in {whole.outcome.value}: {whole.reason}")


def failed_by_itself(finding: Finding) -> bool:
    """Whether it ended in an error of the model's own: not in a wrong answer, and not for the board."""
    return finding.outcome not in {Outcome.PASS, Outcome.FAIL, Outcome.BLIND, Outcome.SKIP, *BOARD_OUTCOMES}


def without_failed(layers: Sequence[Layer], failed: Collection[str]) -> list[Layer]:
    """The layers that are not among these, and take nothing from them, near or far."""
    lost: set[str] = set()
    rest = []
    for layer in layers:
        if layer.name in failed or not lost.isdisjoint(layer.inputs):
            lost.update(layer.outputs)
        else:
            rest.append(layer)
    return rest


def _finding(judged: Sequence[OutputComparison], unjudged: Mapping[str, str]) -> Finding:
    outcome = outcome_of(judged) if judged else Outcome.SKIP
    wrong = [one for one in judged if not one.passed and one.blind is (outcome is Outcome.BLIND)]
    reason = f"output {wrong[0].name}: {wrong[0].reason}" if wrong else next(iter(unjudged.values()), "")
    return Finding(outcome, reason, outputs=tuple(judged), unjudged=unjudged)
