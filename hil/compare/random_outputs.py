"""Handle outputs that depend on random numbers. Such outputs need not be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hil.compare.comparison import OutputComparison
from hil.compare.verdict import Verdict, decide_outcome
from hil.core.results import Outcome

_SHOWN = 5


def mark_random(
    verdict: Verdict, nodes: Sequence[str], outputs: Sequence[str], allow_blind: Sequence[str] = ()
) -> Verdict:
    """Mark differing outputs that depend on random numbers as BLIND.

    These outputs must still match in shape and dtype. Without random nodes the verdict is unchanged.

    Args:
        nodes: labels of the nodes that draw random numbers.
        outputs: names of the outputs that depend on them.
        allow_blind: name patterns of outputs that may pass although they cannot be judged.
    """
    if not nodes or not any(one.name in outputs for one in verdict.outputs):
        return verdict
    marked = tuple(_mark_blind(one, allow_blind) if one.name in outputs else one for one in verdict.outputs)
    outcome, draws = decide_outcome(marked), format_random(nodes)
    differing = [one for one, was in zip(marked, verdict.outputs, strict=True) if one is not was]
    if outcome is Outcome.FAIL:
        reason = verdict.reason
    elif outcome is Outcome.BLIND:
        first = next(one for one in marked if not one.passed)
        reason = f"{draws}: output {first.name}: {first.reason}"
    else:
        allowed = [f"output {one.name} is not judged, as allowed by --allow-blind: {one.reason}" for one in differing]
        reason = "; ".join(filter(None, (draws, *allowed, verdict.reason if verdict else "")))
    return replace(verdict, outcome=outcome, outputs=marked, reason=reason)


def _mark_blind(output: OutputComparison, allow_blind: Sequence[str]) -> OutputComparison:
    # Without a mismatch count, the shapes differ. Random numbers do not explain different shapes.
    if output.passed or output.mismatches is None or output.dtype != output.reference_dtype:
        return output
    allowed = any(fnmatchcase(output.name, pattern) for pattern in allow_blind)
    return replace(output, passed=allowed, blind=True, reason=f"output depends on random numbers: {output.reason}")


def format_random(nodes: Sequence[str]) -> str:
    """Return a line that lists the random nodes."""
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"the model draws random numbers (node{'s' * (len(nodes) > 1)} {', '.join(nodes[:_SHOWN])}{more})"
