"""Read the causes of new failures from the stored sessions, without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from hil.controller.records.decisions.notification import NotifiedCause
from hil.controller.records.decisions.triage import HIDDEN
from hil.controller.records.pages.common import BaselineName
from hil.controller.web.history.baseline import find_baseline_of
from hil.controller.web.history.causes import Cause
from hil.controller.web.history.changed_cases import NewChanges, read_new_changes
from hil.controller.web.index.folders import index_path
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer, is_partial
from hil.controller.workloads.triage.entries import TriagedCase, TriageList
from hil.errors import UsageError

# Maximum seconds to analyse the histories of cases, and maximum cases to name in a message.
_ANALYSIS_SECONDS, MAX_NAMES = 600.0, 20
# Maximum changed cases to read, newest first. A page shows fewer.
MAX_CASES = 20_000


@dataclass(frozen=True)
class NightNews:
    """New causes since a baseline."""

    baseline: BaselineName
    causes: Sequence[NotifiedCause]  # without known failures
    known: int  # causes whose cases are all known failures
    url: str  # home page of these causes, or ""
    is_cut: bool = False  # whether there are more changed cases than :data:`MAX_CASES`


def read_news(roots: Sequence[Path], since: str, triage: TriageList, web_url: str = "") -> NightNews:
    """Update the index of the runs directories, and return the causes of changes since a baseline.

    Args:
        since: baseline as in the address of the home page; "" is the night before the newest night.
        web_url: address of hil web for links, or "".

    Raises:
        UsageError: invalid baseline, or hil cannot analyse all sessions.
        StorageError: the index cannot be written.
    """
    changes = _read_changes([root.resolve() for root in roots], since)
    if not changes.baseline.kind:
        # Otherwise a wrong directory would set the status of a commit to success.
        text = f"nothing to compare: no sessions of suites in {', '.join(map(str, roots))}"
        raise UsageError(text, hint="select the directory of stored results with --runs")
    if changes.baseline.is_empty:
        text = f"nothing to compare: no earlier session of {changes.baseline.kind} {changes.baseline.value!r}"
        raise UsageError(text, hint="select another baseline with --since")
    address = web_url.rstrip("/")
    shown = [one for one in changes.causes if not _is_known(one, triage)]
    url = f"{address}/?{urlencode({'since': changes.baseline.text})}" if address else ""
    found = [_make_cause(one, changes, triage, address) for one in shown]
    baseline = BaselineName(kind=changes.baseline.kind, value=changes.baseline.value)
    return NightNews(baseline, found, len(changes.causes) - len(shown), url, changes.is_cut)


def _read_changes(roots: Sequence[Path], since: str) -> NewChanges:
    path, begun = index_path(roots), time.monotonic()
    with IndexWriter(path) as writer:
        indexer, reader = Indexer(writer, roots), IndexReader(path)
        unread: dict[tuple[int, str], str] | None = None  # sessions to wait for, with their stamps at the start
        while True:
            indexer.scan()
            # A running hil web with the same directories writes the index instead.
            with reader.open_snapshot() as database:
                now = indexer.find_unread(database)
                changes = read_new_changes(database, find_baseline_of(database, since), MAX_CASES)
            # A running suite changes all the time: wait only until each session was read once.
            unread = {
                place: stamp
                for place, stamp in (now if unread is None else unread).items()
                if place in now and (now[place] == stamp or is_partial(now[place]))
            }
            if not unread and not changes.unjudged:
                return changes
            if time.monotonic() - begun > _ANALYSIS_SECONDS:
                text = f"{len(unread)} sessions and {changes.unjudged} histories are not analysed yet"
                raise UsageError(text, hint="retry later")
            time.sleep(indexer.pause_s)


def _is_known(cause: Cause, triage: TriageList) -> bool:
    """Return True if triage marks all cases of a cause as known failures."""
    states = [
        entry.state if entry is not None and (not entry.outcomes or (one.outcome or "SLOWER") in entry.outcomes) else ""
        for one in cause.members
        for entry in [triage.find(TriagedCase(one.case, one.suite, one.flow, one.board, one.runtime))]
    ]
    return all(state in HIDDEN for state in states)


def _make_cause(cause: Cause, changes: NewChanges, triage: TriageList, address: str) -> NotifiedCause:
    entries = [triage.find(TriagedCase(one.case, one.suite, one.flow, one.board, one.runtime)) for one in cause.members]
    names = ("key", "title", "explanation", "kind", "subject", "what", "date", "ratio")
    return NotifiedCause(
        **{name: getattr(cause, name) for name in names},
        boards=list(cause.boards),
        names=list(cause.names)[:MAX_NAMES],
        cases=len(cause.members),
        owners=sorted({entry.owner for entry in entries if entry is not None and entry.owner}),
        url=f"{address}/cause?{changes.make_query(cause)}" if address else "",
    )
