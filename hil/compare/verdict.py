"""Compare board outputs with reference outputs: the pipeline stage *compare*.

The comparison is pure: it maps results to verdicts without I/O, so verdicts can be recomputed without a
board.

Shape and dtype must match. Integers, bools and strings must be equal; numbers may have a tolerance. Floats agree if
``|a-b| <= atol + rtol*|b|`` (b is the reference). NaN agrees only with NaN, an infinity only with the same infinity. An
output of zeros never agrees with a reference that has other values. An output is BLIND if it agrees, but a wrong output
would also agree: see :func:`hil.compare.tolerance.find_blindness`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.compare.allowance import Allowance, measure_allowance
from hil.compare.caveats import count_flushed, flush_reference, format_flushed, is_subnormal, note_constant
from hil.compare.comparison import OutputComparison
from hil.compare.judging import Judged, format_unsteady, judge_values
from hil.compare.reasons import count, explain_with_types, index_of, read_values
from hil.compare.small import describe_small
from hil.compare.stats import STATISTICS
from hil.compare.tolerance import check_tolerance, fit_tolerance, refuse_vacuous
from hil.compare.values import as_array, choose_common_kind, make_reader
from hil.core.file_tensor import Tensor
from hil.core.results import Control, Outcome, Relation, RunResult, Tolerance
from hil.core.tensors import get_dtype_name, shape_text

if TYPE_CHECKING:
    from hil.compare.criteria import Rule

_NOTHING = "0 elements compared: every output is empty"


@dataclass(frozen=True, repr=False)
class Verdict:
    """Verdict on a result compared with one reference. The verdict is true if every output passes."""

    outcome: Outcome  # PASS, FAIL, or BLIND if no output differs but some cannot be judged
    against: str
    outputs: tuple[OutputComparison, ...]
    # Cause of a failure, in one line. After a pass: "", "nothing to compare", or the blind outputs that the user
    # allowed.
    reason: str = ""
    relation: Relation = Relation.INDEPENDENT  # relation of the reference to the program

    @property
    def named(self) -> str:
        """Reference name and relation, for messages."""
        return self.relation.named(self.against)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __repr__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"<Verdict {self.outcome.value}, compared with {self.named}{reason}>"

    def _repr_html_(self) -> str:
        from hil.core.html_table import make_html_table

        shown = [one for one in STATISTICS if one.report]
        columns = ("output", "passed", "dtype", "shape", "mismatches", *(one.heading for one in shown), "reason")
        rows = [
            (
                *(one.name, "yes" if one.passed else "no", one.dtype, shape_text(one.shape), one.mismatches),
                *(getattr(one, statistic.key) for statistic in shown),
                one.reason,
            )
            for one in self.outputs
        ]
        return make_html_table(f"{self.outcome.value}: compared with {self.named}", columns, rows)


def compare_output(
    name: str,
    actual: Tensor,
    reference: Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    noise: Tensor | None = None,
    control: Control | None = None,
    allow_blind: Sequence[str] = (),
    allow_flush: Sequence[str] = (),
    accept: Sequence[Rule] = (),
) -> OutputComparison:
    """Compare one output with its reference.

    Statistics cover the elements that are finite in both tensors. A NaN or infinity that the other tensor does not have
    at the same index is a mismatch, and counts as the worst mismatch. If only the dtypes differ the output fails, but
    the statistics still show whether the values agree within the looser default tolerance.

    Args:
        actual: the board's output, of any supported dtype and layout. A file tensor is read in chunks.
        rtol: relative tolerance, instead of the dtype's default.
        atol: absolute tolerance, instead of a default from the reference's scale and noise.
        noise: the reference's noise, if measured: see ``RunResult.noise``.
        control: deviation that the board's declared arithmetic explains; replaces noise.
        allow_blind: name patterns of outputs that may pass although wrong outputs would agree.
        allow_flush: name patterns of outputs that may have 0 at subnormal reference values.
        accept: criteria; if any apply to the output, they replace the tolerance.

    Raises:
        UsageError: the tolerance cannot fail (see :func:`tolerance_for`), or a dtype is unsupported.
        VacuousTolerance: the tolerance cannot fail with this reference (see :func:`refuse_vacuous`), and
            ``allow_blind`` does not match the output.
        CriterionFailed: a user's function failed (see :func:`hil.compare.acceptance.judge_criteria`).
    """
    if accept:
        # Imported late: these take 5 ms, and most runs have no criteria.
        from hil.compare.acceptance import judge_criteria
        from hil.compare.criteria import select_criteria

        if criteria := select_criteria(name, accept):
            plain = compare_output(
                name, actual, reference, rtol=rtol, atol=atol, allow_blind=("*",), allow_flush=allow_flush
            )
            actual, reference, _ = _flush(name, actual, reference, allow_flush)
            may_be_blind = any(fnmatchcase(name, one) for one in allow_blind)
            return judge_criteria(plain, actual, reference, criteria, allow_blind=may_be_blind)
    if control is not None and rtol is None and atol is None:
        return _compare_with_control(name, actual, reference, control, allow_blind, allow_flush)
    if noise is not None:
        # Use noise only if needed: an output that passes without noise needs no wider tolerance.
        plain = compare_output(
            name, actual, reference, rtol=rtol, atol=atol, allow_blind=allow_blind, allow_flush=allow_flush
        )
        if atol is not None or (plain.passed and not plain.blind):
            return plain
    actual, reference, flushed = _flush(name, actual, reference, allow_flush)
    dtype, reference_dtype = get_dtype_name(actual.dtype), get_dtype_name(reference.dtype)
    tolerance, scale = fit_tolerance((dtype, reference_dtype), reference, rtol, atol)
    kind = choose_common_kind(dtype, reference_dtype)
    given, may_be_blind = atol is not None, any(fnmatchcase(name, one) for one in allow_blind)
    if not may_be_blind:
        refuse_vacuous(name, tolerance, scale, rtol=rtol, atol=atol)
    allowed = None
    if noise is not None and tolerance is not None and noise.shape == reference.shape:
        allowed = measure_allowance(noise, reference, scale)
    if actual.shape == reference.shape and kind:
        judged = judge_values(actual, reference, tolerance, scale, kind=kind, given=given, allowed=allowed)
    else:
        judged = Judged(None, tolerance)
    reason = explain_with_types(judged.reason, actual, reference, compared=judged.stats is not None)
    doubt = "" if reason else judged.doubt
    may_be_flushed = (reason or doubt) and flushed is None and is_subnormal(tolerance, reference)
    if may_be_flushed and (flushed := count_flushed(actual, reference)):
        reason, doubt = (text and f"{text}; {format_flushed(flushed, name)}" for text in (reason, doubt))
    stats, tolerance = judged.stats, judged.tolerance
    small = describe_small(reference, tolerance) if given and tolerance and stats and stats.max_abs else ""
    common: dict[str, Any] = {
        "name": name,
        "passed": not reason and (may_be_blind or not doubt),
        "reason": reason or doubt,
        "dtype": dtype,
        "shape": actual.shape,
        "reference_dtype": reference_dtype,
        "reference_shape": reference.shape,
        "tolerance": tolerance,
        "blind": bool(doubt),
        "noise": None if allowed is None else allowed.largest,
        "unsteady": None if allowed is None else allowed.unsteady,
        "flushed": flushed,
        "notes": () if reason or doubt else _write_notes(reference, allowed, flushed, small),
    }
    if stats is None:
        return OutputComparison(**common)
    return OutputComparison(
        **common,
        elements=stats.elements,
        mismatches=stats.mismatches,
        nonfinite=stats.nonfinite,
        masked=stats.masked,
        **{one.key: getattr(stats, one.key) for one in STATISTICS},
        first_index=index_of(stats.first, actual.shape),
        first_values=read_values(actual, reference, stats.first),
        worst_index=index_of(stats.worst, actual.shape),
        worst_values=read_values(actual, reference, stats.worst),
    )


def _flush(
    name: str, actual: Tensor, reference: Tensor, allow_flush: Sequence[str]
) -> tuple[Tensor, Tensor, int | None]:
    """Return both tensors as arrays, with the reference flushed like the output if the patterns allow it.

    Also return the number of flushed values, or None if the patterns do not allow flushing.
    """
    given, wanted = as_array(actual), as_array(reference)
    if not any(fnmatchcase(name, one) for one in allow_flush):
        return given, wanted, None
    flushed = count_flushed(given, wanted)
    return given, flush_reference(given, wanted) if flushed else wanted, flushed


def _compare_with_control(
    name: str,
    actual: Tensor,
    reference: Tensor,
    control: Control,
    allow_blind: Sequence[str],
    allow_flush: Sequence[str],
) -> OutputComparison:
    """Compare an output from a board with a declared arithmetic: see :mod:`hil.compare.control`.

    An output that passes within the default tolerance needs no wider bound.
    """
    plain = compare_output(name, actual, reference, allow_blind=allow_blind, allow_flush=allow_flush)
    comparable = plain.elements is not None and plain.dtype == plain.reference_dtype
    if (plain.passed and not plain.blind) or not comparable:
        return plain
    from hil.compare.control import Bound

    given, wanted = (
        make_reader(array)(0, array.size).reshape(array.shape) for array in map(as_array, (actual, reference))
    )
    bound = Bound(control, wanted, plain.tolerance or Tolerance(0.0, 0.0))
    found = bound.judge(given)
    wrong = np.flatnonzero(found.wrong)
    first = int(wrong[0]) if wrong.size else None
    worst = int(wrong[np.argmax(bound.compute_excess(given, wrong))]) if wrong.size else None
    may_be_blind = any(fnmatchcase(name, one) for one in allow_blind)
    return replace(
        plain,
        passed=not found.reason and (may_be_blind or not found.doubt),
        reason=found.reason or found.doubt,
        tolerance=plain.tolerance and bound.tolerance,
        blind=bool(found.doubt and not found.reason),
        control=bound.record,
        notes=(found.note,) if found.note else (),
        mismatches=len(wrong),
        first_index=index_of(first, wanted.shape),
        first_values=read_values(given, wanted, first),
        worst_index=index_of(worst, wanted.shape),
        worst_values=read_values(given, wanted, worst),
    )


def compare(
    actual: RunResult,
    reference: RunResult,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    allow_blind: Sequence[str] = (),
    allow_flush: Sequence[str] = (),
    accept: Sequence[Rule] = (),
) -> Verdict:
    """Compare every output of a run with a reference.

    Outputs are paired by name if both sides have the same names. Otherwise they are paired by position, under the
    reference's names, because a compiled program may have no names. A different number of outputs fails. A run without
    outputs fails, because nothing was compared. Empty outputs agree. The verdict's reason reports if all outputs are
    empty.

    Raises:
        UsageError, VacuousTolerance: see :func:`compare_output`.
    """
    check_tolerance(rtol, atol)

    def make_verdict(outcome: Outcome, outputs: tuple[OutputComparison, ...], reason: str) -> Verdict:
        return Verdict(outcome, reference.source, outputs, reason, reference.relation)

    mine, theirs = actual.outputs, reference.outputs
    if len(mine) != len(theirs):
        reason = f"{count(len(mine), 'output')}, the reference has {len(theirs)}"
        return make_verdict(Outcome.FAIL, (), reason)
    if not mine:
        return make_verdict(Outcome.FAIL, (), "no outputs to compare")
    if mine.keys() == theirs.keys():
        pairs = [(name, array, theirs[name]) for name, array in mine.items()]
    else:
        pairs = [(name, array, wanted) for array, (name, wanted) in zip(mine.values(), theirs.items(), strict=True)]
    outputs = tuple(
        compare_output(
            name,
            array,
            wanted,
            rtol=rtol,
            atol=atol,
            noise=reference.noise.get(name),
            control=reference.control.get(name),
            allow_blind=allow_blind,
            allow_flush=allow_flush,
            accept=accept,
        )
        for name, array, wanted in pairs
    )
    outcome = decide_outcome(outputs)
    if outcome is Outcome.PASS:
        notes = [
            f"output {output.name} is not judged, as allowed by --allow-blind: {output.reason}"
            for output in outputs
            if output.blind
        ]
        notes += [f"output {output.name}: {note}" for output in outputs for note in output.notes]
        empty = not any(output.elements for output in outputs)
        return make_verdict(outcome, outputs, _NOTHING if empty else "; ".join(notes))
    failed = [output for output in outputs if not output.passed and output.blind is (outcome is Outcome.BLIND)]
    reason = f"output {failed[0].name}: {failed[0].reason}"
    if len(failed) > 1:
        reason += f" (and {count(len(failed) - 1, 'more output')})"
    return make_verdict(outcome, outputs, reason)


def _write_notes(reference: Tensor, allowed: Allowance | None, flushed: int | None, small: str) -> tuple[str, ...]:
    """Return notes on the limits of a pass."""
    notes = (
        note_constant(reference),
        format_unsteady(allowed) if allowed else "",
        f"{count(flushed, 'subnormal value')} flushed to 0, as allowed by --allow-flush" if flushed else "",
        small,
    )
    return tuple(filter(None, notes))


def decide_outcome(outputs: Iterable[OutputComparison]) -> Outcome:
    """Return FAIL if any output differs, BLIND if any cannot be judged, or PASS."""
    found = {Outcome.BLIND if output.blind else Outcome.FAIL for output in outputs if not output.passed}
    return next((outcome for outcome in (Outcome.FAIL, Outcome.BLIND) if outcome in found), Outcome.PASS)


def depends_on_noise(verdict: Verdict) -> bool:
    """Return True if measuring the reference's noise may change the verdict.

    This is the case if an output used a default tolerance, and some values exceed the tolerance or cannot be judged.
    """
    return any(
        output.noise is None
        and output.control is None
        and not output.criteria
        and output.tolerance is not None
        and (
            output.blind or bool(output.mismatches and not output.nonfinite and output.dtype == output.reference_dtype)
        )
        for output in verdict.outputs
        if not output.passed
    )


def judge(verdicts: Sequence[Verdict], between: Sequence[Verdict]) -> tuple[Outcome, str]:
    """Return the outcome of a case with one or more references, and a one-line reason.

    - With one reference, its verdict and notes count.
    - With multiple references that agree with each other, the board must agree with each.
    - If the references disagree, the board passes if it agrees with at least one. If the board agrees with none, it
      fails. In both cases the reason names the disagreement.
    - A BLIND verdict decides only if no other verdict decides.
    - A reference that the board agrees with outvotes references of the same or a weaker relation, never a
      stronger relation.
    - An agreeing self-check does not decide: if no other reference agrees, the outcome is REFERENCE_ERROR.

    Args:
        verdicts: verdict against each reference, at least one.
        between: verdict of each further reference against the first, in the same order.

    Raises:
        ValueError: ``verdicts`` is empty, or ``between`` is not shorter by exactly one.
    """
    if not verdicts or len(between) != len(verdicts) - 1:
        raise ValueError(
            f"{len(verdicts)} verdicts need {max(len(verdicts) - 1, 0)} comparisons between references, "
            f"got {len(between)}"
        )
    agreeing = [verdict for verdict in verdicts if verdict]
    failed = [verdict for verdict in verdicts if verdict.outcome is Outcome.FAIL]
    blind = [verdict for verdict in verdicts if verdict.outcome is Outcome.BLIND]
    found = describe_disagreement(verdicts, between)
    dispute = f"the references disagree: {found}" if found else ""
    decider = find_deciding(verdicts)
    names = ", ".join(verdict.named for verdict in agreeing)
    if not failed and blind and (decider is None or decider.relation is Relation.SELF_CHECK):
        return Outcome.BLIND, f"{blind[0].reason}; {dispute}" if dispute else blind[0].reason
    if not failed and decider is not None and decider.relation is Relation.SELF_CHECK:
        reason = f"only {names} agrees, but it shares importer and compiler with the program"
        return Outcome.REFERENCE_ERROR, f"{dispute}; {reason}" if dispute else reason
    if not failed:
        agreed = f"{dispute}; the board agrees with all references within tolerance"
        return Outcome.PASS, agreed if dispute else next((verdict.reason for verdict in verdicts if verdict), "")
    if decider is not None and _outvotes(decider, failed, in_dispute=bool(dispute)):
        differs = dispute or f"differs from {', '.join(one.named for one in failed)}"
        return Outcome.PASS, f"{differs}; the board agrees with {names}"
    reason = failed[0].reason if len(verdicts) == 1 else f"differs from {failed[0].named}: {failed[0].reason}"
    if dispute:
        reason += f"; {dispute}; the board agrees with {names or 'no reference'}"
    elif agreeing:
        reason += f"; the board agrees with {names}"
    return Outcome.FAIL, reason


def find_deciding(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the first agreeing verdict with the strongest relation, or None.

    This verdict decides if the board passes.
    """
    return min((one for one in verdicts if one), key=lambda one: one.relation.rank, default=None)


def _outvotes(decider: Verdict, failed: Sequence[Verdict], *, in_dispute: bool) -> bool:
    """Return True if an agreeing reference prevails over references that differ.

    An agreeing reference that is not a self-check always prevails over self-checks. It prevails over other references
    only if the references disagree with each other and no other reference is stronger.
    """
    if decider.relation is Relation.SELF_CHECK:
        return False
    serious = [one for one in failed if one.relation is not Relation.SELF_CHECK]
    return not serious or (in_dispute and all(one.relation.rank >= decider.relation.rank for one in serious))


def describe_disagreement(verdicts: Sequence[Verdict], between: Sequence[Verdict]) -> str:
    """Return a line that lists the references and outputs in dispute; "" if none. Arguments as in :func:`judge`."""
    disputes = [
        f"{verdicts[0].against} vs {other.against} on {_name_failing(verdict)}"
        for other, verdict in zip(verdicts[1:], between, strict=True)
        if verdict.outcome is Outcome.FAIL
    ]
    return "; ".join(disputes)


def find_excess_difference(verdict: Verdict, min_sqnr_db: float | None) -> str:
    """Return a reason if an output differs from the plain model by more than allowed; otherwise "".

    Args:
        min_sqnr_db: minimum signal-to-quantisation-noise ratio of every output, in dB; None disables the check.
    """
    if min_sqnr_db is None:
        return ""
    for output in verdict.outputs:
        # SQNR ignores NaN and infinities.
        if (output.sqnr_db is None or output.nonfinite) and not output.passed:
            return f"compared with the model before the recipe ({verdict.against}): {output.reason}"
        # The negated comparison is also true for NaN.
        if output.sqnr_db is not None and not output.sqnr_db >= min_sqnr_db:
            return (
                f"output {output.name!r} has {output.sqnr_db:.1f} dB SQNR against the model before the recipe "
                f"({verdict.against}), minimum {min_sqnr_db:g} dB"
            )
    return verdict.reason if not verdict.outputs and not verdict else ""


def _name_failing(verdict: Verdict) -> str:
    names = [output.name for output in verdict.outputs if not output.passed]
    if not names:
        return "their outputs"
    return f"output{'s' if len(names) > 1 else ''} {', '.join(names)}"
