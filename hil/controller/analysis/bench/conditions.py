"""Conditions and grades of a bench's sides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.bench.sustained import select_counters
from hil.controller.devices.measuring.conditions import ConditionWatch
from hil.controller.devices.measuring.settling import settle_board
from hil.controller.records.measurements.bench import SideRecord
from hil.controller.records.measurements.conditions import Conditions
from hil.core.results import Stage
from hil.errors import HilError, UsageError


def settle_boards(sides: Sequence[BenchSide], limit_s: float) -> None:
    """Wait until the sides' boards are steady, one board after the other, for at most ``limit_s`` seconds each."""
    for group in _group_by_board(sides):
        found = settle_board(group[0].board, limit_s)
        for side in group:
            side.settling = found


def prepare_boards(sides: Sequence[BenchSide]) -> None:
    """Run the ``[measure] before`` commands of the boards, unless they already ran.

    If a command fails, the error becomes the outcome of the cases on this board, and is raised.
    """
    for group in _group_by_board(sides):
        try:
            group[0].board.prepare()
        except UsageError:
            raise
        except HilError as error:
            for side in group:
                side.case = side.case.with_error(error, Stage.RUN)
            raise


@contextlib.contextmanager
def watch_conditions(sides: Sequence[BenchSide], copies: int) -> Iterator[None]:
    """Record the conditions of the sides' boards during the block, even if an error ends it.

    Args:
        copies: number of programs of a side that run at the same time.
    """
    with contextlib.ExitStack() as stack:
        watched = [(group, stack.enter_context(ConditionWatch(group[0].board))) for group in _group_by_board(sides)]
        try:
            yield
        finally:
            for group, watch in watched:
                found = _summarise(group, watch, copies)
                for side in group:
                    side.conditions = found
                    side.counters = select_counters(watch.samples) if side.summaries else ()


def _group_by_board(sides: Sequence[BenchSide]) -> list[list[BenchSide]]:
    groups: dict[int, list[BenchSide]] = {}
    for side in sides:
        groups.setdefault(id(side.board), []).append(side)
    return list(groups.values())


def _summarise(sides: Sequence[BenchSide], watch: ConditionWatch, copies: int) -> Conditions:
    batches = [batch for side in sides if side.clock == "board" for batch in side.batches if batch.start_ns.size]
    starts = [int(batch.start_ns[0]) for batch in batches]
    ends = [int(batch.start_ns[-1] + batch.duration_ns[-1]) for batch in batches]
    ran_ns, cpu_ns = sum(side.ran_ns for side in sides), sum(side.cpu_ns for side in sides)
    window = (min(starts), max(ends)) if batches else None
    return watch.summarise(window, copies * cpu_ns / ran_ns if ran_ns else None)


def list_incomparable(sides: Sequence[SideRecord]) -> list[str]:
    """Return why the sides cannot be compared, one text per reason; an empty list if they can be."""
    names: dict[str, list[str]] = {}
    for side in sides:
        if side.grade is not None and side.grade.grade == "F":
            for reason in side.grade.reasons:
                names.setdefault(reason, []).append(side.name)
    return [f"{' and '.join(found)}: {reason}" for reason, found in names.items()]
