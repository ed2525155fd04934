"""IREE's profile of a run: what happened on its device, event by event, told apart by the runs that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hil.controller.analysis.profile.clock_pairs import mapped
from hil.controller.analysis.profile.iree_arrays import (
    EVENT,
    EVENTS,
    MEMORY,
    MEMORY_SAMPLE,
    NONE,
    mapped_rows,
    places_of,
    submissions_of,
    within,
)
from hil.controller.analysis.profile.iree_export import export
from hil.controller.analysis.profile.iterations import SETUP, by_repetition
from hil.controller.storage.isolated import Isolated, IsolatedError, IsolatedTimeout
from hil.core.timeline import Sample
from hil.errors import RunFailed, StageTimeout, UsageError
from hil.formats.iree_command import own_tool

DISPATCH = "dispatch"
_BATCH = 1 << 14


class IreeEvent(NamedTuple):
    """Something the device did for the host: a dispatch, a copy, an allocation.

    Attributes:
        iteration: which run it belongs to, from 0; ``SETUP`` (-1) where to none: warm-up, initialisation.
        op: ``dispatch``, ``fill``, ``copy``, ``execute``, ``alloca``, ``dealloca``, ``barrier``, ...
        key: the dispatch's name, as the program calls it; "" of what is none.
        start_ns, duration_ns: by the clock that the pairs lead to.
        submission: which of its iteration's, from 0: what was handed to the queue at once.
        place: which of its submission's dispatches, from 0; None of what is no dispatch.
        command: its place in the command buffer, barriers counted; None where the driver does not tell.
        executable, function: the program's numbers; None of what is no dispatch.
        tiles: workgroups that it was cut into; None where the driver does not tell.
        tile_time_ns: what all of them took together, with ``tiles``.
        workgroups: how many in x, y and z.
        bytes: what it allocates, fills or copies; 0 of others.
    """

    iteration: int
    op: str
    key: str
    start_ns: int
    duration_ns: int
    submission: int
    place: int | None
    command: int | None
    executable: int | None
    function: int | None
    tiles: int | None
    tile_time_ns: int | None
    workgroups: tuple[int, int, int]
    bytes: int


@dataclass(frozen=True)
class IreeEvents:
    """A profile of IREE's. It lies in files, 88 bytes an event, and is read whenever it is gone through.

    Attributes:
        folder: where those files are.
        names: what ``op`` and ``key`` are numbers of, there.
        order: [events] the events in the order of their start.
        iteration: [events] which each belongs to.
        submission: [events] which of its iteration's.
        place: [events] which of its submission's dispatches; -1 of others.
        iterations: how many runs it holds.
        clock: pairs of (profile's time, board's time), ns.
        notes: what is uncertain or missing, a line each.
    """

    folder: Path
    names: Sequence[str]
    order: NDArray[np.int64]
    iteration: NDArray[np.int64]
    submission: NDArray[np.int64]
    place: NDArray[np.int64]
    iterations: int
    clock: Sequence[tuple[int, int]]
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.order)

    def events(self) -> Iterator[IreeEvent]:
        """Every event in the order of its start, those of no iteration too."""
        rows = mapped_rows(self.folder / EVENTS, EVENT)
        dispatch = self.names.index(DISPATCH) if DISPATCH in self.names else -1
        for first in range(0, len(self.order), _BATCH):
            batch = self.order[first : first + _BATCH]
            where = (array[batch].tolist() for array in (self.iteration, self.submission, self.place))
            for row, iteration, submission, place in zip(rows[batch].tolist(), *where, strict=True):
                yield self._event(row, iteration, submission, place, is_dispatch=row[10] == dispatch)

    def submitted(self) -> tuple[list[list[tuple[str, ...]]], list[int]]:
        """What the iterations submitted: the dispatches' names of each submission, in order.

        Returns:
            Those that differ, as a rule one, and for each iteration which of them it is.
        """
        rows = mapped_rows(self.folder / EVENTS, EVENT)
        own = np.flatnonzero((self.iteration >= 0) & (self.place >= 0))
        own = own[np.lexsort((self.place[own], self.submission[own], self.iteration[own]))]
        pairs = np.stack([self.submission[own], rows["key"][own]], 1)
        firsts = np.searchsorted(self.iteration[own], np.arange(self.iterations + 1))
        counts = np.zeros(self.iterations, np.int64)
        np.maximum.at(counts, self.iteration[self.iteration >= 0], self.submission[self.iteration >= 0] + 1)
        known: dict[tuple[int, bytes], int] = {}
        found: list[list[tuple[str, ...]]] = []
        which: list[int] = []
        for iteration, count in enumerate(counts.tolist()):
            part = pairs[firsts[iteration] : firsts[iteration + 1]]
            which.append(known.setdefault((count, part.tobytes()), len(found)))
            if which[-1] == len(found):
                keys: list[list[str]] = [[] for _ in range(count)]
                for submission, key in part.tolist():
                    keys[submission].append(self.names[key])
                found.append([tuple(each) for each in keys])
        return found, which

    def memory(self) -> Iterator[Sample]:
        """Bytes that the program has reserved of the device's memory, at every change."""
        samples = mapped_rows(self.folder / MEMORY, MEMORY_SAMPLE)
        order = np.argsort(samples["at"], kind="stable")
        for at, reserved in zip(samples["at"][order], samples["reserved"][order], strict=True):
            yield Sample(mapped(int(at), self.clock), "IREE memory reserved", float(reserved), "bytes")

    def _event(
        self, row: tuple[Any, ...], iteration: int, submission: int, place: int, *, is_dispatch: bool
    ) -> IreeEvent:
        start, duration, tile_time, size, _, _, executable, command, function, tiles, op, key, groups = row
        begin = mapped(start, self.clock)
        has_tiles = is_dispatch and tiles > 0
        return IreeEvent(
            iteration,
            self.names[op],
            self.names[key],
            begin,
            mapped(start + duration, self.clock) - begin,
            submission,
            place if is_dispatch else None,
            command if command != NONE else None,
            executable if is_dispatch else None,
            function if is_dispatch else None,
            tiles if has_tiles else None,
            tile_time if has_tiles else None,
            tuple(groups),
            size,
        )


def read_ireeprof(
    path: Path,
    *,
    folder: Path,
    isolated: Isolated,
    timeout: float | None,
    log: Path,
    warmup: int = 0,
    iterations: int | None = None,
    clock: Sequence[tuple[int, int]] = (),
) -> IreeEvents:
    """Read a ``.ireeprof`` file.

    Args:
        path: the file.
        folder: an existing one for the events, to be kept while they are used.
        isolated: where ``iree-profile`` runs.
        timeout: seconds that it may take.
        log: what it prints is appended here.
        warmup: so many runs come before them.
        iterations: how many runs of the same inputs the profile ends with, where that is known.
        clock: pairs of (profile's time, board's time): linear, through the first and the last; none: they are the same.

    Raises:
        RunFailed: it is no profile of IREE's, is cut off, or holds nothing.
        UsageError: ``iree-profile`` is not installed.
        StageTimeout: the limit was reached.
    """
    tool = own_tool("iree-profile")
    if tool is None:
        raise UsageError("iree-profile is not installed", hint="pip install iree-base-runtime")
    if not path.is_file():
        raise RunFailed(f"there is no profile {path.name}", hint="the run that was to write it says why")
    try:
        said = isolated.call(
            export,
            {"path": str(path.absolute()), "tool": str(tool), "folder": str(folder.absolute())},
            timeout=timeout,
            log=log,
        )
    except IsolatedTimeout as error:
        raise StageTimeout(f"reading IREE's profile {error.message}", detail=error.detail) from error
    except IsolatedError as error:
        raise RunFailed(
            f"IREE's profile {path.name} cannot be read: {error.message}", detail=error.detail, hint="it is damaged"
        ) from error
    rows = mapped_rows(folder / EVENTS, EVENT)
    if not len(rows):
        raise RunFailed(
            f"IREE's profile {path.name} holds no events", hint="its device has no profiling, or nothing was run"
        )
    notes = [f"{said['lost']} events of IREE's profile were not valid and are left out"] if said["lost"] else []
    names: list[str] = said["names"]
    dispatch = names.index(DISPATCH) if DISPATCH in names else -1
    places = places_of(rows, dispatch)
    numbers, kinds = submissions_of(rows, places)
    per_submission, doubt = by_repetition(kinds, None if iterations is None else warmup + iterations)
    notes += [doubt] if doubt else []
    if per_submission.max(initial=SETUP) + 1 > warmup:
        per_submission = np.maximum(per_submission - warmup, SETUP)
    return IreeEvents(
        folder,
        names,
        np.argsort(rows["start"], kind="stable"),
        per_submission[numbers],
        within(per_submission)[numbers],
        places,
        int(per_submission.max(initial=SETUP)) + 1,
        tuple(clock),
        tuple(notes),
    )
