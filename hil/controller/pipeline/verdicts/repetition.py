"""Judge outputs that differ between iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from hil.compare.verdict import Verdict
from hil.core.repetition import Repetition
from hil.core.results import Model, Outcome
from hil.core.tensors import Array

_GRAVITY = (Outcome.PASS, Outcome.BLIND, Outcome.FAIL)


def judge_answers(repetition: Repetition, compare: Callable[[Mapping[str, Array]], Verdict]) -> dict[int, Verdict]:
    """Compare the distinct answers with known outputs. Return number of the answer -> verdict."""
    if repetition.is_stable:
        return {}
    known = enumerate(repetition.answers)
    return {number: compare(answer.outputs) for number, answer in known if answer.outputs is not None}


def find_worst_answer(verdicts: Mapping[int, Verdict]) -> int:
    """Return the number of the answer with the largest error."""

    def compute_severity(number: int) -> tuple[int, float, float]:
        verdict = verdicts[number]
        shares = [output.mismatch_share for output in verdict.outputs if output.mismatch_share is not None]
        errors = [output.max_abs for output in verdict.outputs if output.max_abs is not None]
        return _GRAVITY.index(verdict.outcome), max(shares, default=0.0), max(errors, default=0.0)

    return max(verdicts, key=compute_severity)


def may_differ(repetition: Repetition, allowed: Sequence[str]) -> bool:
    """Return True if the patterns match all differing outputs."""
    differing = repetition.differing
    return bool(differing) and all(any(fnmatchcase(name, one) for one in allowed) for name in differing)


def decide_instability(
    repetition: Repetition | None, verdicts: Mapping[int, Verdict], model: Model | None, allowed: Sequence[str]
) -> tuple[bool, str]:
    """Decide if outputs that differ make a case UNSTABLE.

    Outputs that match an allowed pattern may differ if every answer was fetched and passes.

    Returns:
        True for an unstable case; and the reason or a note, which is "" if the answers do not differ.
    """
    if repetition is None or repetition.is_stable:
        return False, ""
    differing = repetition.differing
    is_allowed = may_differ(repetition, allowed)
    unseen = len(repetition.answers) - len(verdicts) + repetition.others
    if is_allowed and not unseen and all(verdicts.values()):
        return False, f"{repetition.text} in {', '.join(differing)}, allowed by --allow-unstable"
    text = f"{repetition.text} for the same inputs"
    if is_allowed and unseen:
        text += f" ({unseen} of them were not fetched, so --allow-unstable does not apply)"
    if random := [name for name in differing if model is not None and name in model.random_outputs]:
        text += f" ({', '.join(random)} {'depends' if len(random) == 1 else 'depend'} on random numbers)"
    if not verdicts:
        return True, text
    worst = find_worst_answer(verdicts)
    first = f"the first answer {_describe_verdict(verdicts[0])}"
    if not worst:
        return True, f"{text}; {first}, and no other answer is worse"
    return True, f"{text}; {first}, the worst answer {_describe_verdict(verdicts[worst])}"


def _describe_verdict(verdict: Verdict) -> str:
    if verdict:
        return "passes"
    return f"{'cannot be judged' if verdict.outcome is Outcome.BLIND else 'is wrong'} ({verdict.reason})"
