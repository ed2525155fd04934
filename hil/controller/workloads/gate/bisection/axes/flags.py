"""Axis of compiler flags: the differences between the flags of both measurements, applied one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.gate import GateCandidate, GateVerdict
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.errors import UsageError

_UNCHANGED = "flags of the baseline"
_ORDER = "order of the flags"


class FlagAxis(BisectAxis):
    """Changed compiler flags. hil compiles the judged model with each candidate's flags."""

    name = "flag"

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the changed flags, after a candidate with the old flags."""
        assert case.old is not None
        steps = list_flag_steps(case.old.tools.flags, case.new.tools.flags)
        if len(steps) < 2:
            raise UsageError("the compiler flags of both measurements are equal")
        if case.old.program == case.new.program:
            raise UsageError("both measurements ran the same program, so compiler flags cannot be the cause")
        return CandidateRange(
            [GateCandidate(value=label) for label in steps],
            first="the judged model with the flags of the baseline",
            last="the judged model with the judged flags",
        )

    def make_program(self, suspect: SuspectRun, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        """Compile the judged model with the flags of a candidate, without the flags of the board config."""
        assert suspect.case.old is not None
        steps = list_flag_steps(suspect.case.old.tools.flags, suspect.case.new.tools.flags)
        flags = steps[candidate.value]
        suspect.check_flags(flags)
        case = suspect.begin_judged(folder)
        case = replace(case, options=replace(case.options, compile_flags=flags))
        return suspect.runner.compile(case, replace(config, compile_flags={}))


def list_flag_steps(old: Sequence[str], new: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the flags after each difference: label of the difference -> all flags.

    The first item has the old flags. Values of the same flag are one difference. The last item has the new flags.
    """
    before, after = _group_flags(old), _group_flags(new)
    steps = {_UNCHANGED: tuple(old)}
    current = dict(before)
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            current[name] = after.get(name, [])
            flags = tuple(flag for values in current.values() for flag in values)
            steps[_describe_change(before.get(name, []), after.get(name, []))] = flags
    if tuple(old) == tuple(new):
        return steps
    # Without a difference in a flag, only the order differs.
    last = list(steps)[-1] if len(steps) > 1 else _ORDER
    return {**steps, last: tuple(new)}


def _group_flags(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags by name, in order."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        found.setdefault(flag.partition("=")[0], []).append(flag)
    return found


def _describe_change(before: Sequence[str], after: Sequence[str]) -> str:
    old, new = " ".join(before), " ".join(after)
    if not old:
        return f"{new} added"
    return f"{old} -> {new}" if new else f"{old} removed"
