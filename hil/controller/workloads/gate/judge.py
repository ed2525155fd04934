"""Judge a series from the history and from new measurements of the gate. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hil.controller.analysis.detection.sequential import Decision
from hil.controller.pipeline.instructions import describe_change
from hil.controller.pipeline.records.energy_text import describe_energies
from hil.controller.records.base import parse_number
from hil.controller.records.decisions.gate import GateScore, GateSide, GateSuspect, GateVerdict, GateVerdictName
from hil.controller.records.measurements.conditions import is_comparable
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.storage.outcomes import exit_code_for
from hil.controller.storage.screen.texts import format_score
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.history.entry_changes import list_changed_parts
from hil.core.results import BOARD_OUTCOMES, WRONG, Outcome

# If the times of both programs differ from the stored times by more than this share, the board has changed.
BOARD_CHANGE = 0.25


@dataclass
class Remeasurement:
    """Results of a gate's new measurement of a suspect.

    Attributes:
        old, new: outcomes of the old and the new program; "" if a program was not run again.
        new_reason: reason for the new program's outcome.
        budget_s: maximum board time of this measurement in seconds.
        error: error of the board or of the stored files that ended the measurement, or "".
        is_board_error: whether the board caused the error.
        decision: verdict on the measured rounds; None if the times were not suspect.
        rounds_needed: estimated number of further rounds, if undecided.
        old_p50_ns, new_p50_ns: medians of the measurements in turns.
        is_other_board: whether the board differs from the board of the stored measurements.
        instructions: comparison of the instructions, if the history has counts.
    """

    old: str = ""
    new: str = ""
    new_reason: str = ""
    error: str = ""
    is_board_error: bool = False
    decision: Decision | None = None
    rounds_needed: int = 0
    old_p50_ns: float | None = None
    new_p50_ns: float | None = None
    instructions: InstructionComparison | None = None
    board_s: float = 0.0
    budget_s: float = 0.0
    is_other_board: bool = False


def needs_board(case: GateCase) -> bool:
    """Return whether the programs must run again for a verdict."""
    is_suspect = case.suspect is not None or case.has_more_instructions
    if not is_suspect or case.old is None or not case.is_stored or case.new.outcome in BOARD_OUTCOMES:
        return False
    if is_accepted(case.new):
        return False
    if case.new.score is not None:  # the score depends on many samples, and its interval includes their variation
        return False
    return case.new.program != case.old.program


def is_accepted(entry: HistoryEntry) -> bool:
    """Return whether a user accepted a measurement whose outputs are right."""
    return entry.confirmed == "accepted" and exit_code_for(entry.outcome) == 0


def judge_case(case: GateCase, again: Remeasurement | None, score: GateScore | str = "") -> GateVerdict:
    """Return the verdict on a series.

    Args:
        again: the new measurement; None if the gate did not run the programs.
        score: scores of two evaluations, or why they cannot be compared; "" for other series.
    """
    verdict, reason = _judge_again(case, again) if again is not None else _judge_stored(case, score)
    verdict, reason = _add_energy(verdict, reason, case)
    changes = list_changes(case.old, case.new) if case.old is not None else []
    is_same_source = case.old is not None and case.old.source.commit == case.new.source.commit != ""
    if verdict in ("broken", "regressed") and is_same_source and not case.new.source.dirty and case.has_new_tools:
        verdict, reason = "toolchain", f"{reason}; same commit, but a different compiler or runtime"
    found = GateVerdict(
        series=case.series,
        key=case.new.key,
        verdict=verdict,
        reason=reason,
        suspect=_name_suspect(case),
        new=_describe_side(case.new),
        old=_describe_side(case.old) if case.old is not None else None,
        score=score if isinstance(score, GateScore) else None,
        changes=changes,
        energy=case.energy,
        instructions=(again.instructions if again is not None else None) or case.instructions,
    )
    if again is None:
        return found
    found.new = found.new.replace(again=again.new, again_p50_ns=again.new_p50_ns)
    if found.old is not None:
        found.old = found.old.replace(again=again.old, again_p50_ns=again.old_p50_ns)
    found.board_s, found.rounds_needed = again.board_s, again.rounds_needed
    if again.decision is not None and again.decision.rounds:
        found.ratio, found.interval, found.rounds = (
            again.decision.ratio,
            again.decision.interval,
            again.decision.rounds,
        )
    return found


def _judge_stored(case: GateCase, score: GateScore | str) -> tuple[GateVerdictName, str]:
    """Return the verdict without a new measurement, and the reason."""
    new, old = case.new, case.old
    if new.outcome in BOARD_OUTCOMES:
        return "board fault", f"{new.outcome}: {new.reason}"
    is_wrong = exit_code_for(new.outcome) != 0
    if old is None:
        return ("broken", f"{new.outcome}: {new.reason}") if is_wrong else ("new", "the baseline has no measurement")
    is_same = bool(new.program) and new.program == old.program
    if is_accepted(new):
        return "no change", "accepted with hil history accept"
    if score and is_wrong == (exit_code_for(old.outcome) != 0):
        return ("undecided", score) if isinstance(score, str) else _judge_score(old, score)
    if is_wrong and exit_code_for(old.outcome) != 0:
        return "no change", f"{new.outcome}; {_name_run(old)} also failed"
    if is_wrong and is_same:
        cause: GateVerdictName = "toolchain" if case.has_new_tools else "board fault"
        return cause, f"{new.outcome}: the same program passed at {_name_run(old)}"
    if is_wrong:
        return "broken", f"{new.outcome}: {new.reason}"
    if case.suspect is None and not case.has_more_instructions:
        return "no change", _describe_unchanged(case)
    is_slower = case.suspect is not None and case.suspect.direction == "slower" and case.suspect.kind != "grade"
    if is_same and case.has_new_tools and case.has_more_instructions:
        return "toolchain", f"same program as {_name_run(old)}, but {_describe_instructions(case.instructions)}"
    if is_same and case.has_new_tools and is_slower:
        # The old runtime is not available, so the programs cannot be measured again.
        return "toolchain", f"same program as {_name_run(old)}, but the stored times are slower"
    if is_same:
        return "no change", f"same program as {_name_run(old)}"
    cannot = "hil cannot run both programs again: the history does not contain them"
    if case.has_more_instructions:
        return "regressed", f"{_describe_instructions(case.instructions)} against {_name_run(old)}; {cannot}"
    grades = [f"; grade {one.grade.text}" for one in (new, old) if one.grade and not is_comparable(one.grade)]
    if new.board.parts is not None and old.board.parts is None:
        grades.append(f"; {_name_run(old)} has no stack of the board")
    is_graded = case.suspect is not None and case.suspect.kind == "grade"
    return "undecided", cannot + (grades[0] if is_graded and grades else "")


def _add_energy(verdict: GateVerdictName, reason: str, case: GateCase) -> tuple[GateVerdictName, str]:
    """Return the verdict on the times and the energy together. A faster program may need more energy."""
    energies, old = describe_energies(case.energy), case.old
    is_passing = old is not None and exit_code_for(old.outcome) == exit_code_for(case.new.outcome) == 0
    if old is None or not energies or not is_passing or is_accepted(case.new):
        return verdict, reason
    if verdict in ("no change", "improved", "undecided") and case.has_more_energy:
        if case.new.program == old.program != "":
            return "toolchain", f"same program as {_name_run(old)}, but {energies}"
        return "regressed", "; ".join(filter(None, (energies, reason)))
    return verdict, "; ".join(filter(None, (reason, energies)))


def _describe_unchanged(case: GateCase) -> str:
    """Return why a series without a suspect has no change."""
    has_times = case.new.p50_ns is not None or case.instructions is None
    time = "the time is within the variation of the history" if has_times else ""
    return "; ".join(filter(None, (time, _describe_instructions(case.instructions))))


def _name_suspect(case: GateCase) -> GateSuspect:
    """Return what the history showed; "" if nothing was suspect."""
    if case.suspect is not None:
        return case.suspect.kind
    return "instructions" if case.has_more_instructions else "energy" if case.has_more_energy else ""


def _describe_instructions(found: InstructionComparison | None) -> str:
    if found is None:
        return ""
    return f"instructions not compared: {found.reason}" if found.verdict == "unclear" else describe_change(found)


def _judge_score(old: HistoryEntry, score: GateScore) -> tuple[GateVerdictName, str]:
    before, after = (format_score(value, score.is_share) for value in (score.old, score.new))
    text = f"score {after}, {before} at {_name_run(old)}"
    if score.interval is not None:
        ends = [format_score(value, score.is_share, "+") for value in (score.interval.low, score.interval.high)]
        text += f"; {100 * score.interval.level:g} % interval of the difference: {ends[0]} to {ends[1]}"
    elif is_different(score):
        return "undecided", f"{text}; there is no interval of the difference"
    names: dict[str, GateVerdictName] = {"worse": "regressed", "better": "improved", "same": "no change"}
    return names[find_direction(score)], text


def is_different(score: GateScore) -> bool:
    """Return whether both scores are numbers, and differ."""
    old, new = (parse_number(value) for value in (score.old, score.new))
    return old is not None and new is not None and abs(new - old) > 0


def find_direction(score: GateScore) -> str:
    """Return ``better`` or ``worse`` if the difference is certain, otherwise ``same``.

    A score that is not a number is worse than a number.
    """
    old, new = (parse_number(value) for value in (score.old, score.new))
    old_is_number, new_is_number = (value is not None and not math.isnan(value) for value in (old, new))
    if old_is_number != new_is_number:
        return "better" if new_is_number else "worse"
    if score.interval is None or score.interval.low <= 0 <= score.interval.high:
        return "same"
    return "better" if (score.interval.low > 0) == score.is_higher_better else "worse"


def _judge_again(case: GateCase, again: Remeasurement) -> tuple[GateVerdictName, str]:
    """Return the verdict from a new measurement, and the reason."""
    old, new = case.old, case.new
    assert old is not None
    failed_before = exit_code_for(new.outcome) != 0
    if again.error:
        if again.is_board_error:
            return "board fault", again.error
        return (
            ("broken", f"{new.outcome}; hil could not run the program again: {again.error}")
            if failed_before
            else ("undecided", again.error)
        )
    new_fails, old_fails = exit_code_for(again.new) != 0, exit_code_for(again.old) != 0
    if new_fails and old_fails and not (again.new in WRONG and again.old not in WRONG):
        return "board fault", f"both programs fail now ({again.new}, {again.old}); {_name_run(old)} passed"
    if new_fails:
        checked = "still passes" if again.old == Outcome.PASS else f"cannot be checked ({again.old})"
        return "broken", f"{again.new}: {again.new_reason}; the program of {_name_run(old)} {checked}"
    if failed_before:
        return "undecided", f"{new.outcome} in {new.run}, but {again.new} now"
    if old_fails:
        return "undecided", f"{again.new}; the program of {_name_run(old)} passed before, and ends in {again.old} now"
    verdict, reason = _judge_times(old, again, again.decision) if again.decision is not None else ("no change", "")
    if verdict == "undecided" and again.board_s >= again.budget_s:
        reason = f"{reason}; the board time of {again.budget_s:.0f} s is used up"
    if case.suspect is not None and case.suspect.direction == "fixed" and verdict == "no change":
        verdict, reason = "improved", "; ".join(filter(None, (f"{again.new} again", reason)))
    return _add_instructions(verdict, reason, case, again)


def _add_instructions(
    verdict: GateVerdictName, reason: str, case: GateCase, again: Remeasurement
) -> tuple[GateVerdictName, str]:
    """Return the verdict on the times and the instructions together. Fewer instructions do not change the verdict."""
    found, old = again.instructions, case.old
    assert old is not None
    if found is None:
        return verdict, reason
    counted = _describe_instructions(found)
    # Without times, the counts alone decide.
    if found.verdict == "more" and (again.decision is None or verdict in ("no change", "undecided", "board fault")):
        return "regressed", "; ".join(filter(None, (f"{counted} against {_name_run(old)}", reason)))
    if found.verdict == "unclear" and case.has_more_instructions and verdict == "no change":
        verdict = "undecided"
    return verdict, "; ".join(filter(None, (reason, counted if reason else f"{counted} against {_name_run(old)}")))


def _judge_times(old: HistoryEntry, again: Remeasurement, decision: Decision) -> tuple[GateVerdictName, str]:
    change = 100 * (decision.ratio - 1)
    if decision.verdict == "undecided":
        return "undecided", f"{change:+.1f} % so far; about {again.rounds_needed} more rounds needed"
    if decision.verdict != "no change":
        return decision.verdict, f"{change:+.1f} % against {_name_run(old)}"
    if old.p50_ns and again.old_p50_ns and not again.is_other_board:
        moved = again.old_p50_ns / old.p50_ns - 1
        if abs(moved) > BOARD_CHANGE:
            return "board fault", f"the times of both programs changed by {100 * moved:+.0f} % since {_name_run(old)}"
    return "no change", f"{change:+.1f} % against {_name_run(old)}, measured in turns"


def list_changes(old: HistoryEntry, new: HistoryEntry) -> list[str]:
    """Return the differences between the tools and boards of two measurements, one per line."""
    pairs = [
        ("compiler", old.tools.compiler, new.tools.compiler),
        ("runtime", old.tools.runtime, new.tools.runtime),
        ("compiler flags", " ".join(old.tools.flags), " ".join(new.tools.flags)),
        ("board", old.board.id, new.board.id),
        *((name, old.board.stack.get(name, ""), value) for name, value in new.board.stack.items()),
    ]
    found = [f"{name}: {before or '?'} -> {after}" for name, before, after in pairs if after and before != after]
    if old.board.parts is None or new.board.parts is None:
        return found
    # The runtime and the parts of the machine's description are in the list already.
    known = {"runtime", *old.board.stack, *new.board.stack}
    before, after = (
        {name: version for name, version in parts.items() if name not in known}
        for parts in (old.board.parts, new.board.parts)
    )
    return [*found, *list_changed_parts(before, after)]


def _describe_side(entry: HistoryEntry) -> GateSide:
    return GateSide(
        commit=entry.source.commit,
        run=entry.run,
        outcome=entry.outcome,
        reason=entry.reason,
        p50_ns=entry.p50_ns,
        instructions=entry.instructions.median if entry.instructions is not None else None,
        compiler=entry.tools.compiler,
        runtime=f"{entry.key.runtime} {entry.tools.runtime}".strip(),
        program=entry.program,
    )


def _name_run(entry: HistoryEntry) -> str:
    return entry.source.commit[:9] or entry.run
