"""Series of a history with their detected changes, as `hil gate` finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hil.controller.analysis.detection.changes import Change
from hil.controller.analysis.detection.median_ranks import rank_interval
from hil.controller.analysis.steps import Level, find_levels
from hil.controller.records.base import Interval
from hil.controller.records.measurements.history import EntryScore, HistoryEntry, SeriesSummary
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore, compute_relative_spread
from hil.controller.storage.outcomes import is_failing
from hil.controller.web.history.charts import make_plain_chart
from hil.controller.web.index.series import find_flips_among
from hil.controller.web.text.entries import find_worst_kind
from hil.controller.workloads.gate.verdict_texts import COMMIT_DIGITS
from hil.controller.workloads.history.entry_changes import (
    UNKNOWN_STACK,
    convert_score,
    describe_stacks,
    find_entry_changes,
    get_value,
)
from hil.controller.workloads.history.tables import describe_key
from hil.core.cancellation import check_cancelled
from hil.core.results import BOARD_OUTCOMES
from hil.core.text import escape_controls
from hil.errors import StorageError, UsageError

# Maximum entries of a series on a page.
MAX_RUNS = 500


@dataclass(frozen=True)
class MeasuredRun:
    """An entry of a series, without samples."""

    entry: HistoryEntry
    spread: float | None  # interquartile range divided by the median
    interval: Interval | None  # of the median, in nanoseconds; None with too few samples

    @property
    def value(self) -> float | None:
        """Median in nanoseconds, or score; shares in percent."""
        return get_value(self.entry)

    @property
    def reference(self) -> float | None:
        """Score of an evaluation's reference, shares in percent."""
        score = self.entry.score
        return None if score is None else convert_score(score.reference, is_share=score.is_share)

    @property
    def commit(self) -> str:
        """First digits of the commit, with a mark for uncommitted changes."""
        return f"{self.entry.source.commit[:COMMIT_DIGITS]}{'+' if self.entry.source.dirty else ''}"


@dataclass(frozen=True)
class RunSeries:
    """Newest entries of a series in time order, with the changes of their times and outcomes."""

    summary: SeriesSummary
    runs: Sequence[MeasuredRun]
    judged: Sequence[int]  # indices of the runs with comparable times or scores
    levels: Sequence[Level]  # levels with indices into ``judged``
    changes: Sequence[tuple[int, Change]]  # index of the first run with a new level, and the change
    flips: Sequence[int]  # indices of the runs that start to fail or to pass
    stacks: Sequence[str] = ()  # of each run: changed parts of the stack, "" or "unknown"

    @property
    def has_stack(self) -> bool:
        """Whether a run has a stack."""
        return any(text != UNKNOWN_STACK for text in self.stacks)

    def is_stack_changed(self, index: int) -> bool:
        """Return True if the stack of a run differs from the last known stack before it."""
        return self.stacks[index] not in ("", UNKNOWN_STACK)

    def has_text(self, index: int, text: str) -> bool:
        """Return True if the commit, board, change of the stack, parts of the stack, or notes of a run have a text."""
        entry = self.runs[index].entry
        parts = [f"{name} {version}" for name, version in (entry.board.parts or {}).items()]
        notes = [note.text for note in entry.annotations]
        texts = [entry.source.commit, entry.run, entry.outcome, entry.board.name, self.stacks[index], entry.reason]
        return any(text.lower() in one.lower() for one in (*texts, *parts, *notes))

    @property
    def score(self) -> EntryScore | None:
        """Score of an evaluation, or None if the series has times."""
        return next((one.entry.score for one in self.runs if one.entry.score is not None), None)


@contextlib.contextmanager
def _open_history(place: HistoryPlace) -> Iterator[HistoryStore]:
    """Open a history to read. Raises UsageError if the history is damaged or unusable."""
    try:
        with HistoryStore.open(place) as store:
            yield store
    except StorageError as error:
        raise UsageError(error.message, hint=error.hint) from error


def list_series(place: HistoryPlace | None, query: str = "") -> list[SeriesSummary]:
    """Return the series of a history whose description contains a text. A missing history has no series.

    Raises UsageError if the history is damaged.
    """
    if place is None:
        return []
    with _open_history(place) as store:
        found = store.series()
    wanted = query.lower()
    return [one for one in found if wanted in f"{one.id} {describe_key(one.key)}".lower()]


def list_series_ids(place: HistoryPlace | None) -> frozenset[str]:
    """Return the IDs of a history's series. A missing or damaged history has none."""
    try:
        return frozenset(one.id for one in list_series(place))
    except UsageError:
        return frozenset()


def read_run_series(place: HistoryPlace, name: str) -> RunSeries:
    """Read a series and find its changes.

    Args:
        name: see :meth:`HistoryStore.find_series`.

    Raises:
        UsageError: no series or multiple series match, or the history is damaged.
    """
    runs = []
    with _open_history(place) as store:
        summary = store.find_series(name)
        for entry in store.entries(summary.id, newest=MAX_RUNS):
            check_cancelled()
            samples = np.asarray(entry.samples_ns, np.float64)
            times = rank_interval(samples) if np.isfinite(samples).all() else None
            runs.append(MeasuredRun(entry.replace(samples_ns=[]), compute_relative_spread(entry.samples_ns), times))
    return judge_runs(summary, runs)


def judge_runs(summary: SeriesSummary, runs: Sequence[MeasuredRun]) -> RunSeries:
    """Find the levels and changes in runs in time order."""
    found = find_entry_changes([one.entry for one in runs])
    known = np.array([one.entry.outcome not in ("SKIP", *BOARD_OUTCOMES) for one in runs], np.bool_)
    fails = np.array([is_failing(one.entry.outcome) for one in runs], np.bool_)
    return RunSeries(
        summary,
        runs,
        found.judged,
        find_levels(found.values, [one.index for _, one in found.changes]),
        found.changes,
        sorted([*find_flips_among(known, fails), *find_flips_among(known, ~fails)]),
        describe_stacks([one.entry for one in runs]),
    )


def chart_runs(found: RunSeries) -> dict[str, Any]:
    """Return the chart of a series: medians with intervals, levels, changes, outcomes, notes and confirmed runs.

    The chart of an evaluation has scores instead of medians.
    """
    runs, score = found.runs, found.score
    ends = [(one.interval.low, one.interval.high) if one.interval else (None, None) for one in runs]
    return make_plain_chart(
        "median time" if score is None else score.metric,
        "ns" if score is None else "%" if score.is_share else "",
        [one.entry.created for one in runs],
        [get_value(one.entry) for one in runs],
        found.judged,
        found.levels,
        -1 if score is not None and score.is_higher_better else 1,
        [find_worst_kind([one.entry.outcome], finished=True) for one in runs],
        [index for index, one in enumerate(runs) if one.entry.annotations or found.is_stack_changed(index)],
        bars=[[low for low, _ in ends], [high for _, high in ends]],
        names=[escape_controls(" ".join(filter(None, (one.commit, one.entry.outcome)))) for one in runs],
        confirmed=[index for index, one in enumerate(runs) if one.entry.confirmed],
    )
