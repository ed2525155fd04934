"""List facts that support a case's verdict, as lines for reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hil.compare.random_outputs import format_random
from hil.controller.pipeline.records.case_fields import make_case_fields
from hil.controller.pipeline.records.print_generation import describe_generation
from hil.controller.records.outputs import FailedReference, StoredComparison, StoredCriterion
from hil.controller.records.run import RunCase
from hil.controller.records.suite import CaseRecord
from hil.core.results import Relation

_MAX_LINES = 100


def list_evidence(record: CaseRecord) -> list[tuple[str, str]]:
    """Return (title, text) for every fact: references, failed references, repetition, criteria and caveats."""
    return [fact for fact, _ in zip(_iter_facts(record), range(_MAX_LINES), strict=False)]


def list_case_evidence(case: RunCase) -> list[tuple[str, str]]:
    """Return the facts for a case of run.json: see :func:`list_evidence`."""
    facts = list_evidence(
        CaseRecord(
            **make_case_fields(case), id=case.name, model="", suite="", flow="", runtime="", outcome="", ended=""
        )
    )
    return [*facts, *([("programs", case.compilations.text)] if case.compilations else [])]


def format_evidence(record: CaseRecord) -> list[str]:
    """Return the facts of :func:`list_evidence` as lines."""
    return [f"{title}: {text}" for title, text in list_evidence(record)]


def format_reference(against: str, relation: str) -> str:
    """Return a reference's name, with the relation unless it is independent; "" without a reference."""
    try:
        return Relation(relation or "independent").named(against) if against else ""
    except ValueError:  # a newer version of hil may define more relations
        return f"{against} ({relation})"


def format_unanswered(one: FailedReference) -> str:
    """Return the name of a failed reference and the reason."""
    return f"{one.reference}: {one.reason or one.outcome}"


def _iter_facts(record: CaseRecord) -> Iterator[tuple[str, str]]:
    decider, reference = record.decided_by, format_reference(record.against, record.relation)
    if decider:
        yield "decided by", decider
    if reference and reference != decider:
        yield "compared with", reference
    for other in record.other_references:
        if (named := format_reference(other.against, other.relation)) != decider:
            yield "compared with", f"{named}: {other.outcome}"
    for one in record.unanswered:
        yield "failed reference", format_unanswered(one)
    if record.disagreement:
        yield "the references disagree", record.disagreement
    if record.random:
        yield "random", format_random(record.random)
    if record.answers:
        yield "answers", record.answers
    if record.generation is not None:
        yield from ((label, ", ".join(parts)) for label, parts in describe_generation(record.generation))
    for output in record.outputs:
        yield from _iter_output_facts(output)


def _iter_output_facts(output: StoredComparison) -> Iterator[tuple[str, str]]:
    for criterion in output.criteria:
        yield "criterion", f"{output.name}: {format_criterion(criterion)}"
    if output.control:
        yield "arithmetic", f"{output.name}: {output.control.arithmetic}, {output.control.source}"
    for note in output.notes:
        yield "note", f"{output.name}: {note}"


def format_criterion(criterion: StoredCriterion) -> str:
    """Format a criterion of a record: ``top1>=0.99: 1, met``."""
    found = "met" if criterion.passed else "not met"
    shown = found if criterion.value is None else f"{format_number(criterion.value, 6)}, {found}"
    return f"{criterion.criterion}: {shown}" + (f" ({criterion.reason})" if criterion.reason else "")


def format_number(value: Any, digits: int) -> str:
    """Format a number of a record; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str):  # stored records have inf and nan as strings, because JSON lacks them
        return value
    return f"{value:.{digits}g}" if isinstance(value, float) or abs(value) >= 1e7 else str(value)
