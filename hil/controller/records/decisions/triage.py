"""Records of triage: hil-triage.json, and the output of `hil triage list`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from hil.controller.records.base import Record, Timestamp, note

TriageState = Literal["new", "known", "fixed", "wontfix"]
TRIAGE_STATES: tuple[TriageState, ...] = get_args(TriageState)
# Result of a case after triage: see `TriageList.judge`.
TriageResult = Literal["", "new", "known", "fixed", "wontfix", "expired", "other outcome"]
# Results that do not fail a command.
HIDDEN: frozenset[TriageResult] = frozenset({"known", "wontfix"})
MAX_TRIAGE_CHARS = 500
TriageText = Annotated[str, Meta(max_length=MAX_TRIAGE_CHARS)]


class TriageEntry(Record, kw_only=True):
    """Owner, state and notes of a failing case. Texts that identify cases are shell patterns; empty matches all."""

    case: Annotated[TriageText, Meta(min_length=1, description="ID of the case, or a pattern")]
    suite: TriageText = ""
    flow: TriageText = ""
    board: Annotated[TriageText, note("name or hardware type")] = ""
    runtime: TriageText = ""
    excluded: Annotated[list[TriageText], note("patterns of cases that the entry does not cover", max_length=500)] = []
    outcomes: Annotated[
        list[TriageText], note("outcomes that the entry covers, or SLOWER; empty for all", max_length=50)
    ] = []
    stage: Annotated[Literal["", "compile", "run"], note("stage of a TIMEOUT; empty for both")] = ""
    state: TriageState
    owner: TriageText = ""
    issue: Annotated[TriageText, note("URL or number of an issue")] = ""
    note: Annotated[TriageText, note("reason or next step")] = ""
    until: Annotated[str | None, note("last day of `wontfix`, as YYYY-MM-DD")] = None
    changed: Timestamp = 0.0


class TriageDocument(Record, kw_only=True):
    """Entries of a triage file, and the output of `hil triage list`."""

    schema: Literal[1]
    entries: Annotated[list[TriageEntry], Meta(max_length=10_000)]
