"""Implement the stage *compare*: compare the board's outputs with the references, and set the case's outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from hil import errors
from hil.compare.random_outputs import mark_random
from hil.compare.verdict import Verdict, compare, depends_on_noise, describe_disagreement, find_excess_difference, judge
from hil.controller.backends.references import EXPECTED_HINT, measure_noise
from hil.controller.backends.references.noise import merge_noise
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.flagfiles import find_tool_difference, make_comparable
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.tools import Tools, make_reference_settings
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.pipeline.verdicts.in_arithmetic import (
    add_control,
    drop_other_control,
    get_arithmetic,
    needs_control,
)
from hil.controller.pipeline.verdicts.independence import (
    describe_unasked,
    find_dependence,
    find_unasked_reference,
    get_runtime,
    list_refusals,
)
from hil.controller.pipeline.verdicts.repetition import decide_instability, judge_answers, may_differ
from hil.core.results import Outcome, Relation, RunResult, Stage
from hil.core.tensors import Array

# Name of the plain model's reference among the failed references.
PLAIN = "of the model before the recipe"


def compare_case(case: Case, tools: Tools) -> Iterator[Case]:
    """Compare the outputs with the references and set the outcome."""
    try:
        for judged in _judge_case(case, tools):
            yield judged
    except errors.VacuousTolerance as error:
        if not case.options.replace_blind_tolerance:
            raise
        case = replace(case, options=replace(case.options, rtol=None, atol=None))
        for judged in _judge_case(case, tools):
            yield (case := judged)
        note = f"hil used its default tolerances: {error.message}"
        yield replace(case, reason="; ".join(filter(None, (case.reason, note))))


def _judge_case(case: Case, tools: Tools) -> Iterator[Case]:
    start = time.monotonic()
    tools.sink.stage(case, Stage.COMPARE, "")
    for judged in _judge_answer(case, tools, noise := _LazyNoise(case, tools)):
        yield (case := judged)
    runtime = get_runtime(case, tools.config)
    evidence, rest = list_refusals(case, runtime)
    case = replace(case, reason="; ".join(filter(None, (*evidence, case.reason, *rest))))
    for judged in judge_repetition(case, tools, noise):
        yield (case := judged)
    if case.outcome is Outcome.REFERENCE_ERROR:
        left = find_unasked_reference(case, runtime)
        hint, option = (f"--reference {left}", "") if left else (EXPECTED_HINT, "--expected")
        raise errors.ReferenceFailed(case.reason, stage=Stage.REFER.value, hint=hint, option=option)
    if case.outcome is Outcome.PASS and case.options.min_sqnr_db is not None and PLAIN in case.unanswered:
        why = case.unanswered[PLAIN]
        what = f"cannot compare the outputs with the model before the recipe: {why.message}"
        raise errors.ReferenceFailed(what, stage=Stage.REFER.value, hint=why.hint, detail=why.detail)
    yield case.with_timings(compare_s=time.monotonic() - start)


def compare_without_noise(case: Case) -> tuple[Verdict, ...]:
    """Return the verdict of each reference, ignoring noise and the control for the board's arithmetic."""
    assert case.result is not None
    return _compare_with_references(case, case.result, case.references, _make_compare_args(case.options))


def judge_repetition(case: Case, tools: Tools, noise: _LazyNoise | None = None) -> Iterator[Case]:
    """Judge outputs that differ between iterations.

    The case is UNSTABLE unless the outputs may differ. All outputs are judged by the same rules.

    Raises:
        StageError: the outputs may differ, and some cannot be judged.
    """
    result, allowed = case.result, case.options.allow_unstable
    repetition = result.repetition if result is not None else None
    if result is None or repetition is None or repetition.is_stable or case.error is not None:
        yield case
        return
    noise = noise or _LazyNoise(case, tools)

    def judge_outputs(outputs: Mapping[str, Array]) -> Verdict:
        answer = replace(case, result=replace(result, outputs=outputs, repetition=None))
        *_, answer = _judge_answer(answer, tools, noise)
        return _pick_verdict(answer)

    try:
        verdicts = judge_answers(repetition, judge_outputs) if case.references else {}
    except errors.StageError as error:
        if may_differ(repetition, allowed):
            raise
        verdicts, why = {}, f"; hil cannot judge these outputs: {error.message}"
    else:
        why = ""
    is_unstable, text = decide_instability(repetition, verdicts, case.model, allowed)
    case = replace(case, answer_verdicts=verdicts)
    if is_unstable:
        yield replace(case, outcome=Outcome.UNSTABLE, reason=text + why)
    else:
        yield replace(case, reason="; ".join(filter(None, (case.reason, text))))


class _LazyNoise:
    """Noise of a case's references, measured on first use.

    With multiple references, the largest noise applies to all references, because noise is a property of the
    computation.
    """

    def __init__(self, case: Case, tools: Tools) -> None:
        self._case = case
        self._tools = tools

    @cached_property
    def value(self) -> Mapping[str, Array]:
        """Output name -> noise."""
        case, tools = self._case, self._tools
        if case.model is None or case.inputs is None:
            return {}
        tools.sink.stage(case, Stage.COMPARE, "measuring the noise of the reference")
        settings = make_reference_settings(case.options, tools.context, case.folder / "logs" / "noise.log")
        return merge_noise([measure_noise(case.model, case.inputs, one, **settings) for one in case.references])


def _judge_answer(case: Case, tools: Tools, noise: _LazyNoise) -> Iterator[Case]:
    """Set the verdicts on a case's result, then the resulting outcome and reason."""
    options, result = case.options, case.result
    assert result is not None
    tolerance = _make_compare_args(options)
    case = drop_other_control(case)
    case = replace(case, verdicts=_compare_with_references(case, result, case.references, tolerance))
    if needs_control(case):
        yield case
        tools.sink.stage(case, Stage.COMPARE, f"computing the model in {get_arithmetic(result)}")
        log = case.folder / "logs" / "control.log"
        case = add_control(case, make_reference_settings(options, tools.context, log))
        tolerance |= {"rtol": None, "atol": None}
        case = replace(case, verdicts=_compare_with_references(case, result, case.references, tolerance))
    if tolerance["atol"] is None and any(map(depends_on_noise, case.verdicts)):
        case = _allow_for_noise(case, result, tolerance, noise.value)
    yield case
    one, *others = case.references
    # References compute in float32, independent of the board's arithmetic.
    plain = replace(one, control={})
    between = [
        _mark_random_outputs(case, compare(make_comparable(other, one, case.model), plain, **tolerance))
        for other in others
    ]
    outcome, reason = judge(case.verdicts, between)
    case = replace(case, disagreement=describe_disagreement(case.verdicts, between))
    if options.expected and outcome is Outcome.PASS and case.verdicts[0].outcome is Outcome.FAIL:
        # other references cannot outvote the user's expected outputs
        outcome, reason = Outcome.FAIL, f"{case.verdicts[0].reason}; {reason}"
    passed = outcome is Outcome.PASS
    first = make_comparable(result, one, case.model)
    declared, types = (case.model and case.model.outputs) or (), options.element_types
    if passed and (differs := find_tool_difference(first, one, types, case.inputs or {}, declared)):
        outcome, reason, passed = Outcome.FAIL, differs, False
    if case.plain_reference is not None:
        case = replace(case, plain_verdict=compare(result, case.plain_reference))
        assert case.plain_verdict is not None
        if passed and (far := find_excess_difference(case.plain_verdict, options.min_sqnr_db)):
            outcome, reason, passed = Outcome.FAIL, far, False
    if passed and options.require_independent and (weak := find_dependence(case.verdicts)):
        outcome, reason = Outcome.REFERENCE_ERROR, weak
    if outcome is Outcome.REFERENCE_ERROR:
        reason = "; ".join(filter(None, (reason, describe_unasked(case, get_runtime(case, tools.config)))))
    yield replace(case, outcome=outcome, reason=reason)


def _pick_verdict(case: Case) -> Verdict:
    """Return the verdict that decides a judged case's outcome, with the case's outcome and reason.

    If the case has no outcome, or its outcome is REFERENCE_ERROR, the verdict is returned unchanged, because this
    outcome says nothing about the outputs.
    """
    strongest = [one for one in case.verdicts if one.relation is not Relation.SELF_CHECK] or case.verdicts
    verdict = next((one for one in strongest if not one), strongest[0])
    if case.outcome is None or case.outcome is Outcome.REFERENCE_ERROR:
        return verdict
    return replace(verdict, outcome=case.outcome, reason=case.reason)


def _make_compare_args(options: Options) -> dict[str, Any]:
    within = {name: getattr(options, name) for name in ("rtol", "atol", "allow_blind", "allow_flush")}
    return {**within, "accept": load_rules(options.accept)}


def _compare_with_references(
    case: Case, result: RunResult, references: Sequence[RunResult], tolerance: Mapping[str, Any]
) -> tuple[Verdict, ...]:
    """Return the verdict of each reference. The reason of a pass includes a note on state that was not tested."""
    unseen = case.model.unseen if case.model is not None else ""
    verdicts = [
        _mark_random_outputs(case, compare(make_comparable(result, one, case.model), one, **tolerance))
        for one in references
    ]
    return tuple(
        replace(one, reason="; ".join(filter(None, (one.reason, unseen)))) if one.outcome is Outcome.PASS else one
        for one in verdicts
    )


def _mark_random_outputs(case: Case, verdict: Verdict) -> Verdict:
    """Mark the outputs that depend on random numbers, if the model draws random numbers."""
    if case.model is None:
        return verdict
    return mark_random(verdict, case.model.random, case.model.random_outputs, case.options.allow_blind)


def _allow_for_noise(case: Case, result: RunResult, tolerance: Mapping[str, Any], noise: Mapping[str, Array]) -> Case:
    """Compare again within the references' noise. If no output changes its judgement, return the case unchanged."""
    references = tuple(replace(one, noise=one.noise or noise) for one in case.references)
    verdicts = _compare_with_references(case, result, references, tolerance)
    if _list_judgements(verdicts) == _list_judgements(case.verdicts):
        return case
    return replace(case, references=references, verdicts=verdicts)


def _list_judgements(verdicts: Sequence[Verdict]) -> list[tuple[bool, bool]]:
    """Return the judgement of each output. (One outcome for all outputs would hide changes of an output.)"""
    return [(output.passed, output.blind) for verdict in verdicts for output in verdict.outputs]
