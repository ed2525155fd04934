"""Choose the measurements to judge: for every series, one of the commit and one of the baseline."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hil.controller.analysis.detection.suspects import SeriesPoint, Suspect, find_suspects
from hil.controller.pipeline.instructions import compare_counts
from hil.controller.pipeline.records.energy_text import compare_energies
from hil.controller.records.measurements.conditions import is_comparable
from hil.controller.records.measurements.energy import EnergyComparison
from hil.controller.records.measurements.history import Confirmation, HistoryEntry, SeriesKey
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.storage.history.store import HistoryStore, make_series_id
from hil.controller.storage.outcomes import exit_code_for
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import UsageError, did_you_mean

# Facts of a board that must be equal to compare instructions: libraries choose their code by the CPU.
_CPU = ("arch", "cpu_model")


@dataclass(frozen=True)
class GateCase:
    """A series to judge.

    Attributes:
        new: measurement of the judged commit.
        old: measurement to compare with; None without a baseline.
        suspect: the most serious finding in the history; None if nothing is suspect.
        is_stored: whether the history has the programs of both measurements.
        instructions: comparison of the stored instruction counts; None if they are not comparable.
        energy: comparison of the stored energies; None if they are not comparable.
    """

    new: HistoryEntry
    old: HistoryEntry | None = None
    suspect: Suspect | None = None
    is_stored: bool = False
    instructions: InstructionComparison | None = None
    energy: EnergyComparison | None = None

    @property
    def has_more_energy(self) -> bool:
        """Whether the stored energies show that a different program, or the same with new tools, needs more energy."""
        is_same = self.old is not None and self.new.program == self.old.program != ""
        return self.energy is not None and self.energy.verdict == "more" and (not is_same or self.has_new_tools)

    @property
    def has_new_tools(self) -> bool:
        """Whether the version of the compiler or of the runtime changed."""
        if self.old is None:
            return False
        old, new = self.old.tools, self.new.tools
        pairs = ((old.compiler, new.compiler), (old.runtime, new.runtime))
        return any(before and after and before != after for before, after in pairs)

    @property
    def has_more_instructions(self) -> bool:
        """Whether the stored counts show more instructions."""
        return self.instructions is not None and self.instructions.verdict == "more"

    @property
    def series(self) -> str:
        """ID of the series."""
        return make_series_id(self.new.key)


@dataclass(frozen=True)
class GatePlan:
    """Series to judge, and series of the baseline that the judged commit did not measure."""

    cases: list[GateCase]
    unmeasured: list[SeriesKey]


def plan_gate(
    store: HistoryStore, *, baseline: str, commit: str, min_effect: float, ancestors: Collection[str] | None = None
) -> GatePlan:
    """Choose the measurements of a commit, and the measurements of the baseline branch for the comparison.

    Args:
        commit: commit or its first digits; "" judges the newest measurement of every series.
        min_effect: smallest relative change to detect.
        ancestors: the commit and the ancestors; None if unknown. Only measurements of these commits are a baseline.
            Changes outside the branch, and another branch of the same name, therefore have no effect.

    Raises:
        UsageError: the commit is ambiguous, or the branch was never measured.
    """
    plan = GatePlan([], [])
    commits: set[str] = set()
    branches: set[str] = set()
    for series in store.series():
        entries = list(store.entries(series.id, samples=False))
        branches.update(entry.source.branch for entry in entries)
        measured = [entry for entry in entries if entry.source.commit.startswith(commit)]
        usable = [entry for entry in entries if _is_baseline(entry, baseline, ancestors)]
        if measured:
            commits.update(entry.source.commit for entry in measured)
            # Judge a board error only if the commit's other measurements are missing.
            judged = [entry for entry in measured if entry.outcome not in BOARD_OUTCOMES] or measured
            plan.cases.append(_plan_case(store, usable, judged[-1], min_effect))
        elif usable:
            plan.unmeasured.append(series.key)
    if plan.cases and baseline not in branches:
        measured_branches = sorted(filter(None, branches))
        similar = did_you_mean(baseline, measured_branches)
        raise UsageError(
            f"the history has no measurement of branch {baseline!r}",
            hint=f"{similar}measured branches: {', '.join(measured_branches) or 'none'}; see --baseline",
        )
    if commit and len(commits) > 1:
        raise UsageError(f"ambiguous commit {commit!r}: {', '.join(sorted(commits))}", hint="give more digits")
    return plan


def _plan_case(store: HistoryStore, baseline: Sequence[HistoryEntry], new: HistoryEntry, min_effect: float) -> GateCase:
    usable = [entry for entry in baseline if entry.created < new.created and not _is_repetition(entry, new)]
    if not usable:
        return GateCase(new)
    if exit_code_for(new.outcome) and new.outcome == usable[-1].outcome:
        return GateCase(new, usable[-1])
    points = [_make_point(entry, new) for entry in [*usable, new]]
    stored = [number for number, entry in enumerate(usable) if _is_good(entry) and store.program(entry.program)]
    good, drift_checked, accepted = (
        _find_newest(usable, kinds) for kinds in (("measured", "drift", "accepted"), ("drift",), ("accepted",))
    )
    suspects = find_suspects(
        points,
        min_effect=min_effect,
        good=good,
        anchor=accepted if accepted is not None else next(iter(stored), None),
        drift_checked=drift_checked,
    )
    suspect = suspects[0] if suspects else None
    if suspect is None and not _has_comparable_times(usable, points, new):
        # The history cannot show whether the program is slower, so both programs run again.
        suspect = Suspect("grade", "slower", len(usable), len(usable) - 1, len(usable), None, None)
    wanted = suspect.baseline if suspect is not None else len(usable) - 1
    # Use an earlier run's program if necessary: the compared run's program may be deleted, and a failed run cannot be a
    # baseline.
    choices = [number for number in stored if number <= wanted]
    old = usable[choices[-1] if choices else wanted]
    is_stored = bool(choices) and store.program(new.program) is not None
    energy = _compare_energy(old, new, min_effect)
    return GateCase(new, old, suspect, is_stored, _compare_instructions(old, new), energy)


def _compare_energy(old: HistoryEntry, new: HistoryEntry, min_effect: float) -> EnergyComparison | None:
    """Compare the stored energies of two entries; None if they are not comparable.

    Boards of the same kind differ, and so do their meters. Other programs on the board also need energy (grade F).
    """
    is_other_board = old.board.id and new.board.id and old.board.id != new.board.id
    if is_other_board or not is_comparable(old.grade) or not is_comparable(new.grade):
        return None
    return compare_energies(old.energy, new.energy, min_effect)


def _compare_instructions(old: HistoryEntry, new: HistoryEntry) -> InstructionComparison | None:
    """Compare the stored counts of two entries; None unless the same kind of counter counted on the same CPU."""
    if any(old.board.stack.get(name) != new.board.stack.get(name) for name in _CPU):
        return None
    return compare_counts(old.instructions, new.instructions)


def _has_comparable_times(baseline: Sequence[HistoryEntry], points: Sequence[SeriesPoint], new: HistoryEntry) -> bool:
    """Return False if grade F or a missing stack prevents a comparison: of the new time, or of all earlier times."""
    if not is_comparable(new.grade):
        return False
    is_known = any(point.value is not None for point in points[:-1])
    return new.p50_ns is None or is_known or all(_is_comparable_time(entry, new) for entry in baseline)


def _is_comparable_time(entry: HistoryEntry, new: HistoryEntry) -> bool:
    """Return False for grade F, and for an entry without a stack if the new entry has one."""
    return is_comparable(entry.grade) and (entry.board.parts is not None or new.board.parts is None)


def _is_repetition(entry: HistoryEntry, new: HistoryEntry) -> bool:
    """Return whether an entry is another measurement of the judged commit with the same tools."""
    return bool(new.source.commit) and (entry.source.commit, entry.tools) == (new.source.commit, new.tools)


def _is_baseline(entry: HistoryEntry, branch: str, ancestors: Collection[str] | None) -> bool:
    """Return whether an entry measured the baseline branch, without uncommitted changes and without a board error.

    An accepted ancestor of the judged commit may be on another branch.
    """
    source, outcome = entry.source, entry.outcome
    if source.dirty or outcome not in Outcome.__members__ or outcome in BOARD_OUTCOMES:
        return False
    if source.branch != branch and not (entry.confirmed == "accepted" and ancestors):
        return False
    return ancestors is None or source.commit in ancestors


def _find_newest(entries: Sequence[HistoryEntry], kinds: Sequence[Confirmation]) -> int | None:
    """Return the number of the newest entry with one of these confirmations, or None."""
    return max((number for number, entry in enumerate(entries) if entry.confirmed in kinds), default=None)


def _is_good(entry: HistoryEntry) -> bool:
    return Outcome(entry.outcome).exit_code == 0


def _make_point(entry: HistoryEntry, new: HistoryEntry) -> SeriesPoint:
    outcome = Outcome(entry.outcome) if entry.outcome in Outcome.__members__ else Outcome.RUN_ERROR
    value = entry.p50_ns if entry.clock == new.clock and _is_comparable_time(entry, new) else None
    is_time = value is not None and math.isfinite(value) and value > 0
    return SeriesPoint(value if is_time else None, outcome)
