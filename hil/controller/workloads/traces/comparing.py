"""Compare two traces: calls, outputs and new values of variables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.compare.comparison import OutputComparison
from hil.compare.criteria import Rule
from hil.compare.stats import STATISTICS
from hil.compare.verdict import Verdict, compare, compare_output, depends_on_noise
from hil.controller.models.tensorflow.graphs import iter_leaves, name_new_value
from hil.controller.workloads.traces.trace import ModuleCall, Trace, list_arrays
from hil.core.digest import digest_of
from hil.core.results import Outcome, RunResult
from hil.core.tensors import Array, to_bytes, type_text
from hil.errors import VacuousTolerance


@dataclass(frozen=True)
class CallComparison:
    """Comparison of a call with the reference's call."""

    number: int  # call number, from 0
    method: str
    reason: str = ""  # mismatch in the call itself (other method or outputs), or ""
    # For the returned tensors and the assigned variables. None if the call has neither.
    verdict: Verdict | None = None

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    @property
    def outcome(self) -> Outcome:
        """PASS, FAIL, or BLIND if the outputs agree but cannot be judged."""
        if self.reason:
            return Outcome.FAIL
        return Outcome.PASS if self.verdict is None else self.verdict.outcome

    @property
    def outputs(self) -> tuple[OutputComparison, ...]:
        """A comparison per tensor, named by path (``0``, or ``0.logits`` in a dict) or ``variable NAME``."""
        return self.verdict.outputs if self.verdict is not None else ()

    def lines(self, *, failed_only: bool = False) -> list[str]:
        """Return text lines: the call, then the outputs with statistics."""
        word = {Outcome.PASS: "ok", Outcome.FAIL: "WRONG"}.get(self.outcome, self.outcome.value)
        lines = [f"call {self.number} ({self.method}): {word}{self.reason and f': {self.reason}'}"]
        if self.verdict is not None and not self.verdict.outputs and self.verdict.reason:
            lines.append(f"  {self.verdict.reason}")
        for output in self.outputs:
            if output.passed and failed_only:
                continue
            kind = type_text(output.dtype, output.shape)
            lines.append(f"  output {output.name} ({kind}): {output.reason or 'agrees'}")
            found = {one.heading: getattr(output, one.key) for one in STATISTICS}
            numbers = [f"{heading} {value:.4g}" for heading, value in found.items() if value is not None]
            if numbers:
                lines.append(f"    {', '.join(numbers)}")
        return lines


@dataclass(frozen=True)
class Judging:
    """Settings for the comparison of calls."""

    # rtol and atol override the call's tolerances. None selects the call's values, or the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    allow_blind: Sequence[str] = ()  # name patterns for outputs that may pass although they cannot be judged
    allow_flush: Sequence[str] = ()  # name patterns for outputs that may flush subnormals to 0
    accept: Sequence[Rule] = ()  # criteria that replace the tolerance
    # Returns a call's output noise, by name. Called with the call number if the verdict may depend on the noise.
    noise: Callable[[int], Mapping[str, Array]] = lambda number: {}


def compare_traces(reference: Trace, target: Trace, judging: Judging | None = None) -> list[CallComparison]:
    """Compare the calls of a trace with the reference's calls, within the call's tolerances.

    The result has a comparison per call of the longer trace. A failed call does not end the comparison.

    Raises:
        UsageError: a call has a tolerance that cannot fail.
    """
    found = []
    for number, (wanted, made) in enumerate(itertools.zip_longest(reference.calls, target.calls)):
        if wanted is not None and made is not None:
            found.append(_compare(number, reference, target, judging or Judging()))
        else:
            lacking = target if made is None else reference
            found.append(CallComparison(number, (wanted or made).method, f"call missing on {lacking.backend}"))
    return found


def judge_trace(comparisons: Sequence[CallComparison], *, ended_early: bool = False) -> tuple[Outcome, str]:
    """Return a trace's outcome and reason: FAIL if a call failed, else BLIND if a call cannot be judged, else PASS.

    A trace without compared values is also a FAIL, unless it ``ended_early``: the error then contains the reason.
    """
    failed, blind = ([one for one in comparisons if one.outcome is kind] for kind in (Outcome.FAIL, Outcome.BLIND))
    wrong = failed or blind
    if not wrong:
        if not ended_early and not any(one.outputs for one in comparisons):
            return Outcome.FAIL, "no values to compare: no call returned a tensor or assigned a variable"
        return Outcome.PASS, ""
    first = wrong[0]
    why = first.reason or (first.verdict.reason if first.verdict is not None else "")
    more = f" (and {len(wrong) - 1} more of {len(comparisons)} calls)" if len(wrong) > 1 else ""
    return first.outcome, f"call {first.number} ({first.method}): {why}{more}"


def _compare(number: int, trace: Trace, other: Trace, judging: Judging) -> CallComparison:
    reference, target = trace.calls[number], other.calls[number]
    if reference.method != target.method:
        return CallComparison(number, target.method, f"{trace.backend} called {reference.method} instead")
    wanted, got = list_arrays(reference.outputs), list_arrays(target.outputs)
    if wanted.keys() != got.keys() or _shape(reference.outputs) != _shape(target.outputs):
        reason = (
            f"returned {_format_outline(target.outputs)}, {trace.backend} returned {_format_outline(reference.outputs)}"
        )
        return CallComparison(number, target.method, reason)
    for name in dict.fromkeys((*reference.assigned, *target.assigned)):
        for one, call in ((trace, reference), (other, target)):
            if name not in call.state:
                assigner = other if one is trace else trace
                reason = (
                    f"variable {name}, assigned on {assigner.backend}, cannot be read on {one.backend}: it was "
                    "not created with the module, and no tf.function uses it"
                )
                return CallComparison(number, target.method, reason)
        wanted[name_new_value(name)], got[name_new_value(name)] = reference.state[name], target.state[name]
    rtol = reference.rtol if judging.rtol is None else judging.rtol
    atol = reference.atol if judging.atol is None else judging.atol
    call = replace(reference, rtol=rtol, atol=atol)
    differing = _find_other_inputs(call, target)
    own = [name for name in differing if not _is_passed_on(name, number, trace, other)]
    if not wanted:
        return CallComparison(number, target.method, _format_inputs(own, trace))
    verdict = _compare_outputs(wanted, got, call, trace.backend, judging)
    if depends_on_noise(verdict) and (noise := judging.noise(number)):
        within = _compare_outputs(wanted, got, call, trace.backend, judging, noise)
        # Use the verdict with noise only if it differs from the verdict without noise.
        verdict = within if _list_judgements(within) != _list_judgements(verdict) else verdict
    why = _format_inputs(differing if verdict.outcome is Outcome.FAIL else own, trace)
    return CallComparison(number, target.method, why, verdict)


def _list_judgements(verdict: Verdict) -> list[tuple[bool, bool]]:
    return [(output.passed, output.blind) for output in verdict.outputs]


def _compare_outputs(
    wanted: dict[str, Array],
    got: dict[str, Array],
    call: ModuleCall,
    backend: str,
    judging: Judging,
    noise: Mapping[str, Array] | None = None,
) -> Verdict:
    """Compare within the call's tolerances.

    For a variable that these tolerances cannot judge, use the dtype's default.
    """
    groups: dict[tuple[float | None, float | None], list[str]] = {}
    for name in wanted:
        is_variable = name.startswith(name_new_value(""))
        groups.setdefault(_choose_tolerance(wanted[name], call) if is_variable else (call.rtol, call.atol), []).append(
            name
        )
    parts = []
    for (rtol, atol), names in groups.items():
        one, other = ({name: arrays[name] for name in names} for arrays in (got, wanted))
        expected = RunResult(backend, other, noise=noise or {})
        may: dict[str, Any] = {"allow_blind": judging.allow_blind, "allow_flush": judging.allow_flush}
        parts.append(compare(RunResult("", one), expected, rtol=rtol, atol=atol, accept=judging.accept, **may))
    gravest = (part for outcome in (Outcome.FAIL, Outcome.BLIND) for part in parts if part.outcome is outcome)
    return replace(next(gravest, parts[0]), outputs=tuple(output for part in parts for output in part.outputs))


def _choose_tolerance(variable: Array, call: ModuleCall) -> tuple[float | None, float | None]:
    """Return the call's tolerances, except tolerances that can never fail for this variable.

    The user chose the tolerances for the returned values, which may have another scale.
    """
    for rtol, atol in ((call.rtol, call.atol), (call.rtol, None)):
        try:
            compare_output("", variable, variable, rtol=rtol, atol=atol)
        except VacuousTolerance:
            continue
        return rtol, atol
    return None, None


def _find_other_inputs(reference: ModuleCall, target: ModuleCall) -> list[str]:
    """Return the paths of the inputs that differ beyond the call's tolerances."""
    wanted, got = list_arrays(reference.inputs), list_arrays(target.inputs)
    if wanted.keys() != got.keys() or _shape(reference.inputs) != _shape(target.inputs):
        return [_format_outline(target.inputs)]
    found = []
    for name in wanted:
        rtol, atol = _choose_tolerance(wanted[name], reference)
        one, other = RunResult("", {name: got[name]}), RunResult("", {name: wanted[name]})
        if compare(one, other, rtol=rtol, atol=atol).outcome is Outcome.FAIL:
            found.append(name)
    return found


def _is_passed_on(name: str, number: int, trace: Trace, other: Trace) -> bool:
    """Return whether an input equals an output of an earlier call, in both traces.

    Such a value was already judged in the earlier call.
    """
    inputs = [list_arrays(one.calls[number].inputs).get(name) for one in (trace, other)]
    return any(
        all(
            given is not None and _is_same(given, list_arrays(one.calls[before].outputs).get(path))
            for given, one in zip(inputs, (trace, other), strict=True)
        )
        for before in range(number)
        for path in list_arrays(trace.calls[before].outputs)
    )


def _is_same(one: Array, other: Array | None) -> bool:
    """Return whether two arrays are equal bit by bit."""
    return (
        other is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and digest_of(to_bytes(one)) == digest_of(to_bytes(other))
    )


def _format_inputs(differing: Sequence[str], trace: Trace) -> str:
    return f"inputs differ from {trace.backend}: {', '.join(differing)}" if differing else ""


def _shape(value: Any) -> list[Any]:
    """Return the paths of a structure, and the values of leaves that are not tensors."""
    return [(path, None if hasattr(leaf, "dtype") else leaf) for path, leaf in iter_leaves(value)]


def _format_outline(outputs: Any) -> str:
    return ", ".join(path for path, _ in iter_leaves(outputs)) or "no values"
