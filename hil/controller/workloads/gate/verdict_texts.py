"""Texts of a gate's verdicts, for terminals, reports and web pages."""

from __future__ import annotations

from collections.abc import Iterator

from hil.controller.records.decisions.gate import (
    GateCandidate,
    GateCause,
    GateRecord,
    GateSide,
    GateVerdict,
    SlowerLayer,
)
from hil.controller.records.decisions.triage import HIDDEN
from hil.controller.storage.outcomes import exit_code_for
from hil.controller.storage.screen.texts import format_score, format_seconds

HEADS = ("verdict", "model", "case", "board", "baseline", "this commit", "ratio", "rounds", "reason")
# Shown digits of a commit.
COMMIT_DIGITS = 9
# Verdict -> explanation, for the rules in SARIF and for readers of reports.
MEANINGS = {
    "broken": "the new program fails, and the old program passes or does not exist",
    "regressed": "the new program is slower when both programs run alternately, executes more instructions or "
    "needs more energy, or the score of an evaluation is worse",
    "toolchain": "the same commit is broken or slower with a different compiler or runtime",
    "undecided": "the change is suspect, but hil could not decide",
    "board fault": "the board failed, or both programs changed",
    "improved": "the new program is faster, has a better score, or passes while the old program fails",
    "no change": "the outputs are correct, and the time is the same",
    "new": "the baseline has no measurement",
}


def is_failure(one: GateVerdict, record: GateRecord) -> bool:
    """Return True if a verdict fails the gate: it is in ``fail_on``, and is no known failure."""
    return one.verdict in record.fail_on and one.triage not in HIDDEN


def name_verdict(one: GateVerdict) -> str:
    """Return the name of a verdict, and the state of a known failure: ``broken (known)``."""
    return one.verdict + (f" ({one.triage})" if one.triage in HIDDEN else "")


def describe_verdict(one: GateVerdict) -> tuple[str, ...]:
    """Return the cells of a verdict for :data:`HEADS`."""
    return (
        *(name_verdict(one), one.key.model, " ".join(filter(None, (one.key.case, one.key.flow))), one.key.board),
        *(_describe_side(one, one.old), _describe_side(one, one.new), _describe_ratio(one)),
        *(str(one.rounds or "-"), one.reason),
    )


def describe_total(record: GateRecord) -> str:
    """Return the number of series by verdict, and the board time, in one line."""
    counts: dict[str, int] = {}
    for one in record.verdicts:
        counts[one.verdict] = counts.get(one.verdict, 0) + 1
    spent_s = sum(one.board_s for one in record.verdicts)
    parts = [f"{count} {verdict}" for verdict, count in counts.items()]
    if known := sum(one.triage in HIDDEN for one in record.verdicts):
        parts.append(f"{known} of these known")
    if record.unmeasured:
        parts.append(f"{len(record.unmeasured)} not measured at this commit")
    return f"{', '.join(parts)}; {format_seconds(spent_s)} of board time"


def list_details(one: GateVerdict) -> Iterator[str]:
    """Yield details of a verdict other than ``no change``: outcomes, programs, changed tools and boards."""
    if one.verdict in ("no change", "new"):
        return
    for title, side in (("baseline", one.old), ("this commit", one.new)):
        if side is not None:
            again = f", now {side.again}" if side.again else ""
            tools = ", ".join(one for one in (side.compiler, side.runtime) if one not in ("", "none"))
            yield f"{title}: {side.commit[:COMMIT_DIGITS] or '-'} ({side.run}), {side.outcome}{again}; {tools}"
    if one.second_board:
        yield f"measured on {one.second_board}, because {one.key.board} is suspect: {one.board_problem}"
    if one.triage and one.triage not in HIDDEN:
        yield f"triage: {one.triage}"
    yield from one.changes
    if one.slower_layers or one.layers_reason:
        yield f"slower layers: {', '.join(map(_describe_layer, one.slower_layers)) or f'unknown; {one.layers_reason}'}"
    if one.cause is not None:
        yield from _list_cause(one.cause)


def _describe_layer(one: SlowerLayer) -> str:
    return f"{one.name} +{format_seconds(one.change_ns / 1e9)}{' (new)' * one.is_new}"


def describe_cause(cause: GateCause) -> str:
    """Return the result of a search in one line: axis and first bad candidate, or why it is not known."""
    if cause.candidates and not cause.reason:
        return f"first bad {cause.axis}: {describe_candidate(cause.candidates[0])}"
    found = f"one of {len(cause.candidates)}" if cause.candidates else "not found"
    return f"first bad {cause.axis}: {found}; {cause.reason}"


def describe_candidate(one: GateCandidate) -> str:
    """Return a commit with its subject, a changed flag, or a version."""
    return one.value or f"{one.commit[:COMMIT_DIGITS]} {one.subject}"


def _list_cause(cause: GateCause) -> Iterator[str]:
    """Yield the result of the search, and the tested candidates."""
    yield describe_cause(cause)
    if cause.reason:
        yield from (f"candidate: {describe_candidate(one)}" for one in cause.candidates)
    for tried in cause.tried:
        yield f"tested: {tried.value or tried.commit[:COMMIT_DIGITS]}: {tried.outcome}: {tried.reason}"


def _describe_side(one: GateVerdict, side: GateSide | None) -> str:
    """Return the median time of a measurement, or the score of an evaluation."""
    if side is None:
        return "-"
    if one.score is not None:
        return format_score(one.score.new if side is one.new else one.score.old, one.score.is_share)
    if exit_code_for(side.outcome):
        return side.outcome
    return format_seconds(None if side.p50_ns is None else side.p50_ns / 1e9)


def _describe_ratio(one: GateVerdict) -> str:
    if one.ratio is None:
        return "-"
    bounds = f" ({one.interval.low:.3f} to {one.interval.high:.3f})" if one.interval is not None else ""
    return f"{one.ratio:.3f}{bounds}"
