"""Facts that support a case's verdict, as lines for reports.

The input is a suite's record (:class:`hil.controller.workloads.suites.store.CaseRecord`) as JSON. The record may be
from another version, or corrupt: missing and invalid values are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hil.compare.random_outputs import random_text
from hil.core.results import Relation

_MAX_LINES = 100
# Title -> key of the case in run.json.
_TEXTS = {"answers": "repetition", "programs": "compilations"}


def evidence(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) for each fact: references, failed references, repetition, criteria and caveats."""
    return [fact for fact, _ in zip(_iter_facts(record), range(_MAX_LINES), strict=False)]


def evidence_of_case(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts for a case of run.json: see :func:`evidence`."""
    first, *others = _list_mappings(case.get("verdicts")) or [{}]
    texts = {title: _as_mapping(case.get(key)).get("text") for title, key in _TEXTS.items()}
    return evidence({**case, **texts, **first, "other_references": others})


def evidence_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the facts of :func:`evidence` as lines."""
    return [f"{title}: {text}" for title, text in evidence(record)]


def reference_text(record: Mapping[str, Any]) -> str:
    """Return a reference's name, with its relation unless independent; "" without a reference."""
    against = _as_text(record.get("against"))
    try:
        return Relation(record.get("relation") or "independent").named(against) if against else ""
    except ValueError:  # relation of a newer version
        return f"{against} ({_as_text(record.get('relation'))})"


def unanswered_text(one: Mapping[str, Any]) -> str:
    """Return the name of a failed reference and the reason."""
    return f"{_as_text(one.get('reference'))}: {_as_text(one.get('reason')) or _as_text(one.get('outcome'))}"


def _iter_facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    decider, reference = _as_text(record.get("decided_by")), reference_text(record)
    if decider:
        yield "decided by", decider
    if reference and reference != decider:
        yield "compared with", reference
    for other in _list_mappings(record.get("other_references")):
        if (named := reference_text(other)) != decider:
            yield "compared with", f"{named}: {_as_text(other.get('outcome'))}"
    for one in _list_mappings(record.get("unanswered")):
        yield "failed reference", unanswered_text(one)
    if disagreement := _as_text(record.get("disagreement")):
        yield "the references disagree", disagreement
    if random := [one for one in _as_list(record.get("random")) if isinstance(one, str)]:
        yield "random", random_text(random)
    for title in _TEXTS:
        if text := _as_text(record.get(title)):
            yield title, text
    for output in _list_mappings(record.get("outputs")):
        yield from _iter_output_facts(output)


def _iter_output_facts(output: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    name = _as_text(output.get("name"))
    for criterion in _list_mappings(output.get("criteria")):
        if {"criterion", "value", "passed", "reason"} <= criterion.keys():
            yield "criterion", f"{name}: {criterion_text(criterion)}"
    if control := _as_mapping(output.get("control")):
        yield "arithmetic", f"{name}: {_as_text(control.get('arithmetic'))}, {_as_text(control.get('source'))}"
    for note in _as_list(output.get("notes")):
        yield "note", f"{name}: {_as_text(note)}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list_mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in _as_list(value) if isinstance(one, Mapping)]


def criterion_text(criterion: Mapping[str, Any]) -> str:
    """Format a criterion of a record: ``top1>=0.99: 1, met``."""
    value = criterion["value"]
    found = "met" if criterion["passed"] else "not met"
    shown = found if value is None else f"{format_number(value, 6)}, {found}"
    return f"{criterion['criterion']}: {shown}" + (f" ({criterion['reason']})" if criterion["reason"] else "")


def format_number(value: Any, digits: int) -> str:
    """Format a number of a record; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str):  # stored record: JSON lacks inf and nan
        return value
    return f"{value:.{digits}g}" if isinstance(value, float) or abs(value) >= 1e7 else str(value)
