"""Read a suite run, finished or not, and count the outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.pipeline.records.evidence import format_unanswered
from hil.controller.records.base import parse_number
from hil.controller.records.measurements.conditions import is_comparable
from hil.controller.records.outputs import StoredComparison, note_software_devices
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import is_failing
from hil.controller.storage.screen.texts import format_count, format_joules, format_seconds
from hil.controller.workloads.suites.store import SuiteRun
from hil.core.results import Outcome, Relation
from hil.errors import UsageError

WHOLE_MODEL = "whole model"
EXPECTED = Outcome.XFAIL.value

# Options that make device times comparable.
MEASURE = "--iterations 20 --warmup 2"
_LISTED = 5


@dataclass(frozen=True)
class SuiteResults:
    """A stored suite run."""

    folder: Path
    id: str
    source: str  # the suite as named on the command line
    suite: str
    flow: str
    runtime: str
    boards: tuple[str, ...]
    # started, finished: seconds since the epoch; None if unknown or not finished.
    started: float | None
    finished: float | None
    exit_code: int | None  # None until the run has finished
    command: str  # the command that resumes the run
    versions: Mapping[str, str]  # tool -> version
    interrupted: bool
    records: tuple[CaseRecord, ...]  # for finished cases, in the suite's order
    missing: tuple[str, ...] = ()  # unfinished case IDs
    damaged: int = 0  # unreadable lines in results.jsonl
    left_out: tuple[str, ...] = ()  # test cases of the models that cannot be run, one line per place

    @property
    def title(self) -> str:
        """The suite and the flow."""
        return f"{self.suite} · {self.flow}"

    @property
    def notes(self) -> list[str]:
        """Sentences with the reasons why the run is incomplete."""
        notes = []
        if self.missing:
            share = f"{len(self.missing)} of {format_count(len(self.missing) + len(self.records), 'case')}"
            why = "interrupted" if self.interrupted else "the run is unfinished or was aborted"
            notes.append(f"{share} not run: {why}")
        notes += [f"left out: {line}" for line in self.left_out]
        if self.damaged:
            notes.append(f"{format_count(self.damaged, 'unreadable line')} in results.jsonl")
        return notes


def load_run(folder: Path) -> SuiteResults:
    """Read the run in a directory.

    Ignore an incomplete last line. Raises UsageError if the run is missing or unreadable.
    """
    run = SuiteRun.open(folder)
    head = run.head
    try:
        records, damaged = run.read()
    except OSError as error:
        raise UsageError(f"the suite run in {folder} cannot be read: {type(error).__name__}: {error}") from error
    ended = {record.id for record in records}
    return SuiteResults(
        folder=folder,
        id=head.id,
        source=head.source,
        suite=head.suite,
        flow=head.flow,
        runtime=head.runtime,
        boards=tuple(head.boards),
        started=head.started,
        finished=head.finished,
        exit_code=head.exit_code,
        command=head.command,
        versions=head.versions,
        interrupted=head.interrupted,
        records=tuple(records),
        missing=tuple(one for one in head.ids if one not in ended),
        damaged=damaged,
        left_out=tuple(head.left_out),
    )


class Totals:
    """Counts over a run."""

    def __init__(self, run: SuiteResults) -> None:
        outcomes = Counter(record.outcome for record in run.records)
        order = [one.value for one in Outcome]
        words = sorted(outcomes, key=lambda one: order.index(one) if one in order else len(order))
        self.outcomes = {key: outcomes[key] for key in words}  # outcome -> case count
        # The cases that need attention, in the suite's order.
        self.failing = tuple(record for record in run.records if is_failing(record.outcome))
        # Operator or stage -> failing case count, the largest first.
        self.by_op = _count_words(record.op or WHOLE_MODEL for record in self.failing)
        self.by_stage = _count_words(record.stage or "-" for record in self.failing)
        self.run_by_op = _count_words(record.op or WHOLE_MODEL for record in run.records)  # over all cases
        self.remarks = list(_list_remarks(run.records, outcomes))


def _list_remarks(records: Sequence[CaseRecord], outcomes: Mapping[str, int]) -> Iterator[str]:
    """Yield remarks on cases that need more than their outcome, and at the end a remark on the delegated share."""
    known = sum(record.outcome == EXPECTED and record.triage != "" for record in records)
    if expected := outcomes.get(EXPECTED, 0) - known:
        yield f"{expected} failed as expected"
    if known:
        yield f"{format_count(known, 'known failure')} (triage)"
    if passed := outcomes.get(Outcome.XPASS.value):
        yield f"{passed} passed unexpectedly: remove {'it' if passed == 1 else 'them'} from the expected failures"
    if disputed := [record for record in records if record.disagreement]:
        first = disputed[0]
        yield f"the references disagree in {format_count(len(disputed), 'case')}: {first.id}: {first.disagreement}"
    yield from _list_reference_remarks(records)
    if confirmed := _count_words(record.confirmed for record in records if record.confirmed):
        results = ", ".join(f"{count} {result}" for result, count in confirmed.items())
        yield f"rerun mismatches: {results}"
    tries = [sum(one.get("why") != "confirm" for one in record.attempts) for record in records]
    if retries := sum(tries):
        times = "once" if retries == 1 else f"{retries} times"
        yield f"the infrastructure failed {times}: {format_count(len(tries) - tries.count(0), 'case')} retried"
    if elsewhere := [record for record in records if record.elsewhere]:
        first = elsewhere[0]
        yield f"{format_count(len(elsewhere), 'case')} ran partly on a different device: {first.id}: {first.elsewhere}"
    yield from _count_words(note for record in records for note in note_software_devices(record.placement))
    passing = [record for record in records if record.outcome == Outcome.PASS.value]
    if unjudged := [one.id for one in passing if any(output.blind for output in one.outputs)]:
        what = "passed with an output that cannot be judged, as allowed by --allow-blind"
        yield f"{format_count(len(unjudged), 'case')} {what}: {unjudged[0]}"
    yield from _list_energy_remarks(records)
    if graded := [record for record in records if not is_comparable(record.grade)]:
        first = graded[0]
        reasons = "; ".join(first.grade.reasons) if first.grade else ""
        yield f"times of {format_count(len(graded), 'case')} not comparable (grade F): {first.id}: {reasons}"
    for why, count in _count_words(record.agentless for record in records if record.agentless).items():
        yield f"{format_count(count, 'case')} ran without an agent: {why}"
    if delegated := format_delegation(records):
        yield delegated


def _list_energy_remarks(records: Sequence[CaseRecord]) -> Iterator[str]:
    """Yield the range of the measured energies, and the number of refused ones."""
    energies = [(record.id, record.energy) for record in records if record.energy]
    joules = [energy.per_inference.joules for _, energy in energies if energy.per_inference]
    if joules:
        values = " to ".join(dict.fromkeys(map(format_joules, (min(joules), max(joules)))))
        yield f"energy of {format_count(len(joules), 'case')}: {values} an inference"
    if refused := [(name, energy) for name, energy in energies if energy.refused]:
        name, first = refused[0]
        yield f"energy of {format_count(len(refused), 'case')} refused: {name}: {first.refused}: {first.reason}"


def _list_reference_remarks(records: Sequence[CaseRecord]) -> Iterator[str]:
    """Yield remarks on verdicts without an independent reference."""
    deciders = _count_words(one.decided_by for one in records if one.relation not in ("", Relation.INDEPENDENT.value))
    for decider, count in deciders.items():
        if decider:
            yield f"{format_count(count, 'case')} judged only by {decider}, which is not an independent reference"
    silent = [one for record in records for one in record.unanswered]
    for reference, count in _count_words(one.reference for one in silent).items():
        first = next(one for one in silent if one.reference == reference)
        yield f"{format_count(count, 'case')} without a result from the reference {format_unanswered(first)}"
    if random := [record.id for record in records if record.random]:
        draw = "draws" if len(random) == 1 else "draw"
        yield f"{format_count(len(random), 'case')} {draw} random numbers: {random[0]}"


def find_worst(outputs: Sequence[StoredComparison]) -> int | None:
    """Return the index of the worst output: failed outputs first, then by mismatches, then by SQNR.

    None without outputs.
    """

    def compute_badness(index: int) -> tuple[bool, float, float]:
        output = outputs[index]
        passed, share, sqnr = output.passed, parse_number(output.mismatch_share), parse_number(output.sqnr_db)
        if share is None:
            share = 0.0 if passed else 1.0  # shapes differ, so all elements count
        return not passed, share, -math.inf if sqnr is None or math.isnan(sqnr) else -sqnr

    return max(range(len(outputs)), key=compute_badness, default=None)


def find_worst_output(outputs: Sequence[StoredComparison]) -> StoredComparison | None:
    """Return the worst output; None without outputs."""
    index = find_worst(outputs)
    return None if index is None else outputs[index]


def sum_host_seconds(record: CaseRecord) -> float:
    """Return the seconds of all stages on the host."""
    return sum(value for value in record.timings.values() if value)


def format_timed(record: CaseRecord) -> str:
    """Return the sample of a case's device time and a grade other than A; "" if not timed.

    Examples: ``20 iterations``, ``1 cold iteration``, ``5 iterations, grade F``.
    """
    if not record.iterations:
        return ""
    if record.cold:
        return "1 cold iteration"
    grade = f", grade {record.grade.grade}" if record.grade and record.grade.grade != "A" else ""
    return format_count(record.iterations, "iteration") + grade


def list_slowest(records: Iterable[CaseRecord]) -> tuple[list[CaseRecord], str]:
    """Return the cases by device time, the slowest first, and a sentence on cases that cannot be ranked.

    The first run of a program includes deferred loading (pages, caches, threads), so such times are not ranked.
    """
    measured = [record for record in records if record.device_p50_ns]
    ranked = sorted((one for one in measured if not one.cold), key=lambda one: -(one.device_p50_ns or 0))
    cold = len(measured) - len(ranked)
    if not cold:
        return ranked, ""
    which = format_count(cold, "case") if ranked else "all cases"
    return ranked, f"{which} timed with 1 cold iteration and not ranked: use {MEASURE}"


def _count_words(words: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Return the number of occurrences by word, the most frequent first."""
    return dict(sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True)
class Delegation:
    """Share of a program that a backend executes."""

    delegated: Mapping[str, int]  # operator -> number of nodes that the backend executes
    undelegated: Mapping[str, int]  # operator -> number of nodes that the CPU's kernels execute

    @classmethod
    def of(cls, record: CaseRecord) -> Delegation | None:
        """Return a case's delegation, or None if the compiler reported none."""
        notes = record.notes.get("delegation")
        if not isinstance(notes, Mapping):
            return None
        return cls(_parse_counts(notes.get("delegated")), _parse_counts(notes.get("undelegated")))

    @property
    def delegated_nodes(self) -> int:
        """Number of nodes that the backend executes."""
        return sum(self.delegated.values())

    @property
    def undelegated_nodes(self) -> int:
        """Number of nodes that the CPU executes."""
        return sum(self.undelegated.values())

    @property
    def text(self) -> str:
        """Text such as ``3 of 4 nodes; not delegated: aten.foo 1``."""
        share = f"{self.delegated_nodes} of {format_count(self.delegated_nodes + self.undelegated_nodes, 'node')}"
        return f"{share}; not delegated: {_format_counts(self.undelegated)}" if self.undelegated else share


def format_lowering(record: CaseRecord) -> str:
    """Return text such as ``quantised in 0.4 s, lowered in 1.2 s``, or "" if the compiler reported no times."""
    times = {"quantised": record.notes.get("quantise_s"), "lowered": record.notes.get("lower_s")}
    return ", ".join(
        f"{verb} in {format_seconds(value)}" for verb, value in times.items() if isinstance(value, int | float)
    )


def format_delegation(records: Iterable[CaseRecord]) -> str:
    """Return the delegated share of a whole run, with the main undelegated operators; "" if none was reported."""
    found = [one for record in records if (one := Delegation.of(record)) is not None]
    delegated, left = sum(one.delegated_nodes for one in found), sum(one.undelegated_nodes for one in found)
    if not delegated + left:
        return ""
    programs = sum(one.delegated_nodes > 0 for one in found)
    nodes = f"{delegated} of {format_count(delegated + left, 'node')}"
    text = f"delegated: {nodes}, in {programs} of {format_count(len(found), 'program')}"
    ops: Counter[str] = Counter()
    for one in found:
        ops.update(one.undelegated)
    return f"{text}; not delegated: {_format_counts(ops)}" if ops else text


def _format_counts(counts: Mapping[str, int]) -> str:
    most = [f"{name} {count}" for name, count in _count_words(counts).items()]
    return ", ".join(most[:_LISTED]) + (f", {len(most) - _LISTED} others" if len(most) > _LISTED else "")


def _parse_counts(value: Any) -> dict[str, int]:
    return {str(name): count for name, count in value.items() if isinstance(count, int)} if value else {}
