"""Read IREE's profiles: device events, with iteration and dispatch."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hil.controller.analysis.profile.runtimes.device_events import EVENT, NO_TILE_TIME, DeviceEvents
from hil.controller.models.compiling import IsolatedCall, call_isolated
from hil.controller.storage.isolation.isolated import convert_errors
from hil.core.clock import convert_by_pairs
from hil.core.files import map_file
from hil.core.timeline import Sample
from hil.errors import RunFailed, UsageError
from hil.formats.iree_command import own_tool

if TYPE_CHECKING:
    from typing_extensions import Unpack

DISPATCH = "dispatch"
_BATCH = 1 << 14

EVENTS = "events.bin"
MEMORY = "memory.bin"
# Row type for changes in memory use.
MEMORY_SAMPLE = np.dtype([("at", "<i8"), ("reserved", "<i8")])
SETUP = -1


class IreeEvent(NamedTuple):
    """A device operation: a dispatch, a copy, an allocation."""

    iteration: int  # run index, from 0; ``SETUP`` (-1) for warm-up and initialisation
    op: str  # ``dispatch``, ``fill``, ``copy``, ``execute``, ``alloca``, ``dealloca``, ``barrier``, ..
    key: str  # the dispatch's name in the program; "" for other operations
    # start_ns, duration_ns: on the board's clock.
    start_ns: int
    duration_ns: int
    submission: int  # index of the submission within the iteration, from 0; a submission is a batch of operations
    ordinal: int | None  # index among the submission's dispatches, from 0; None for other operations
    tiles: int | None  # workgroup count; None if the driver does not report it
    tile_time_ns: int | None  # sum over the tiles
    bytes: int  # allocated, filled or copied; otherwise 0


@dataclass(frozen=True)
class IreeEvents:
    """An IREE profile. Events are stored in files, 64 bytes each, and read from disk at every pass."""

    folder: Path
    names: Sequence[str]  # strings that an event's ``op`` and ``key`` index
    order: NDArray[np.int64]  # [events] of int64: event indices sorted by start
    iteration: NDArray[np.int64]  # [events] of int64: iteration of each event
    submission: NDArray[np.int64]  # [events] of int64: index within the iteration
    ordinal: NDArray[np.int64]  # [events] of int64: index among the submission's dispatches, or -1
    iterations: int
    clock: Sequence[tuple[int, int]]  # (profile's time, board's time) pairs, ns
    timed_by_device: bool = False  # True if the times are from a GPU's clock, fitted to the profile's clock
    notes: Sequence[str] = ()  # omitted and uncertain data, one line each

    def __len__(self) -> int:
        return len(self.order)

    def events(self) -> Iterator[IreeEvent]:
        """Yield every event by start, including events outside iterations."""
        rows = map_rows(self.folder / EVENTS, EVENT)
        dispatch = self.names.index(DISPATCH) if DISPATCH in self.names else -1
        for first in range(0, len(self.order), _BATCH):
            batch = self.order[first : first + _BATCH]
            where = (array[batch].tolist() for array in (self.iteration, self.submission, self.ordinal))
            for row, iteration, submission, ordinal in zip(rows[batch].tolist(), *where, strict=True):
                start, duration, tile_time, size, _, _, _, tiles, op, key = row
                begin = convert_by_pairs(start, self.clock)
                yield IreeEvent(
                    iteration,
                    self.names[op],
                    self.names[key],
                    begin,
                    convert_by_pairs(start + duration, self.clock) - begin,
                    submission,
                    ordinal if op == dispatch else None,
                    tiles if op == dispatch and tiles > 0 else None,
                    tile_time if op == dispatch and tiles > 0 and tile_time != NO_TILE_TIME else None,
                    size,
                )

    def group_submissions(self) -> tuple[list[list[tuple[str, ...]]], list[int]]:
        """Return the dispatch names of every submission per iteration, in order.

        Returns:
            The distinct lists, usually a single list, and for every iteration the index of its list.
        """
        rows = map_rows(self.folder / EVENTS, EVENT)
        own = np.flatnonzero((self.iteration >= 0) & (self.ordinal >= 0))
        own = own[np.lexsort((self.ordinal[own], self.submission[own], self.iteration[own]))]
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

    def iter_memory(self) -> Iterator[Sample]:
        """Yield the device memory reserved by the program in bytes, at every change."""
        samples = map_rows(self.folder / MEMORY, MEMORY_SAMPLE)
        order = np.argsort(samples["at"], kind="stable")
        for at, reserved in zip(samples["at"][order], samples["reserved"][order], strict=True):
            yield Sample(convert_by_pairs(int(at), self.clock), "IREE memory reserved", float(reserved), "bytes")


def read_ireeprof(
    path: Path,
    *,
    folder: Path,
    warmup: int = 0,
    iterations: int | None = None,
    clock: Sequence[tuple[int, int]] = (),
    **how: Unpack[IsolatedCall],
) -> IreeEvents:
    """Read a ``.ireeprof`` file.

    Args:
        folder: an existing directory for the events. The directory must exist as long as the events are used.
        warmup: number of warm-up runs before the iterations.
        iterations: number of runs with the same inputs at the profile's end, if known.
        clock: (profile's time, board's time) pairs, see :func:`hil.core.clock.convert_by_pairs`.

    Raises:
        RunFailed: the file is not an IREE profile, is truncated, or is empty.
        UsageError: ``iree-profile`` is not installed.
    """
    tool = own_tool("iree-profile")
    if tool is None:
        raise UsageError("iree-profile is not installed", hint="pip install iree-base-runtime")
    if not path.is_file():
        raise RunFailed(f"profile {path.name} not found", hint="see the error of the run that should have written it")
    damaged, failed = partial(RunFailed, hint="the file is damaged"), f"IREE's profile {path.name} cannot be read"
    with convert_errors("", "reading IREE's profile", damaged, failed):
        arguments = {"path": str(path.absolute()), "tool": str(tool), "folder": str(folder.absolute())}
        exported = call_isolated(export, arguments, how)
    rows = map_rows(folder / EVENTS, EVENT)
    if not len(rows):
        raise RunFailed(
            f"IREE's profile {path.name} has no events",
            hint="the device does not support profiling, or no operation ran",
        )
    notes = [f"{exported['lost']} invalid events in IREE's profile are ignored"] if exported["lost"] else []
    names: list[str] = exported["names"]
    dispatch = names.index(DISPATCH) if DISPATCH in names else -1
    ordinals = number_events(rows, dispatch)
    numbers, kinds = find_submissions(rows, ordinals)
    per_submission, doubt = assign_by_repetition(kinds, None if iterations is None else warmup + iterations)
    notes += [doubt] if doubt else []
    if per_submission.max(initial=SETUP) + 1 > warmup:
        per_submission = np.maximum(per_submission - warmup, SETUP)
    return IreeEvents(
        folder,
        names,
        np.argsort(rows["start"], kind="stable"),
        per_submission[numbers],
        number_within_iterations(per_submission)[numbers],
        ordinals,
        int(per_submission.max(initial=SETUP)) + 1,
        tuple(clock),
        bool(exported["timed_by_device"]),
        tuple(notes),
    )


def map_rows(path: Path, dtype: Any) -> NDArray[Any]:
    """Return a file's rows as a memory map."""
    return np.frombuffer(map_file(path), dtype)


def number_events(rows: NDArray[Any], dispatch: int) -> NDArray[np.int64]:
    """Return the index of every event among the dispatches of its submission, int64 [events]; -1 for other events."""
    own = np.flatnonzero(rows["op"] == dispatch)
    # The sort is stable: without known commands, the order of the file remains, which is the execution order.
    own = own[np.lexsort((rows["command"][own], rows["submission"][own], rows["queue"][own]))]
    ordinals = np.full(len(rows), -1, np.int64)
    ordinals[own] = _count_preceding(rows["queue"][own], rows["submission"][own])
    return ordinals


def find_submissions(rows: NDArray[Any], ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every event's submission number, int64 [events], and each submission's kind, int64 [submissions]."""
    pairs = np.stack([rows["queue"], rows["submission"]], 1)
    unique, numbers = np.unique(pairs, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    # A submission's kind is an order-sensitive hash over operations and dispatches.
    weights = (rows["op"].astype(np.int64) * 1_000_003 + rows["key"] + 1) * (2 * ordinals + 5)
    kinds = np.zeros(len(unique), np.int64)
    np.add.at(kinds, numbers, weights * weights)
    return numbers, kinds


def number_within_iterations(per_submission: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of every submission within its iteration, int64 [submissions]."""
    order = np.argsort(per_submission, kind="stable")
    within = np.empty(len(per_submission), np.int64)
    within[order] = _count_preceding(per_submission[order])
    return within


def _count_preceding(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of equal elements before each element, int64 [n]. Equal elements must be adjacent."""
    count = len(keys[0])
    if not count:
        return np.zeros(0, np.int64)
    new = np.ones(count, bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    firsts = np.flatnonzero(new)
    return np.arange(count) - np.repeat(firsts, np.diff([*firsts, count]))


def assign_by_repetition(kinds: NDArray[np.int64], iterations: int | None) -> tuple[NDArray[np.int64], str]:
    """Assign submissions to iterations by repetition.

    The function finds the longest sequence that occurs ``iterations`` times at the end of the submissions. If the
    number is unknown, an iteration is the shortest sequence whose repetition gives all submissions.

    Returns:
        The iteration of every submission, int64 [submissions], with :data:`SETUP` before the first run; and a note on
        uncertain data, or "".
    """
    count = len(kinds)
    alike = _compute_z_function(kinds[::-1].tolist())
    if iterations is None:
        period = next((p for p in range(1, count) if count % p == 0 and alike[p] == count - p), count)
        doubt = (
            f"the profile does not contain the number of runs: repeated operations suggest {count // period}"
            if count
            else ""
        )
        return np.arange(count) // max(period, 1), doubt
    for period in range(count // iterations, 0, -1):
        if iterations == 1 or alike[period] >= period * (iterations - 1):
            tail = period * iterations
            setup = np.full(count - tail, SETUP)
            return np.concatenate([setup, np.arange(tail) // period]), ""
    if count and count % iterations == 0:
        doubt = "the runs differ: hil divides the submissions equally between the runs"
        return np.arange(count) // (count // iterations), doubt
    return np.zeros(count, np.int64), f"cannot separate {iterations} runs: hil shows a single run"


def _compute_z_function(kinds: Sequence[int]) -> list[int]:
    """Return the Z function in linear time: for each index, the length of the longest prefix that also starts there."""
    found = [0] * len(kinds)
    begin = end = 0
    for at in range(1, len(kinds)):
        length = min(found[at - begin], end - at) if at < end else 0
        while at + length < len(kinds) and kinds[length] == kinds[at + length]:
            length += 1
        found[at] = length
        if at + length > end:
            begin, end = at, at + length
    return found


def export(path: str, tool: str, folder: str) -> dict[str, Any]:
    """Write a profile's events and memory to ``events.bin`` and ``memory.bin``. Runs in an isolated process.

    Returns:
        ``names``: the strings that an event's ``op`` and ``key`` index; ``lost``: invalid event count;
        ``timed_by_device``: number of events with times of the device's clock.
    """
    command = [tool, "export", "--format=ireeperf-jsonl", "--output=-", path]
    print("$", *command, flush=True)
    names: dict[str, int] = {}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process,
        (Path(folder) / EVENTS).open("wb") as events,
        (Path(folder) / MEMORY).open("wb") as memory,
    ):
        assert process.stdout is not None
        lost, timed_by_device = _write_events(process.stdout, events, memory, names)
        process.wait()
        errors.seek(0)
        messages = errors.read().decode(errors="replace").strip()
    print(messages, flush=True)
    if process.returncode:
        raise RunFailed(
            f"IREE's profile {Path(path).name} cannot be read: {messages.rpartition(': ')[2] or 'iree-profile failed'}",
            detail=messages,
            hint="the run ended before the file was complete, or the file has a different format",
        )
    return {"names": list(names), "lost": lost, "timed_by_device": timed_by_device}


def _write_events(lines: Iterable[bytes], events: BinaryIO, memory: BinaryIO, names: dict[str, int]) -> tuple[int, int]:
    """Write the rows. Return the number of invalid events, and the number of events that the device timed."""
    rows: list[tuple[Any, ...]] = []
    samples: list[tuple[int, int]] = []
    pools: dict[Any, int] = {}
    device = DeviceEvents(names)
    lost = 0

    def flush() -> None:
        events.write(np.array(rows, EVENT).tobytes())
        memory.write(np.array(samples, MEMORY_SAMPLE).tobytes())
        rows.clear()
        samples.clear()

    for line in lines:
        # Parse only the needed third of the lines, because parsing takes most of the time.
        if b'"host_execution_event"' in line:
            record = json.loads(line)
            if record["valid"] and not record["status_code"]:
                rows.append(_build_row(record, names))
            else:
                lost += 1
        elif b'"dispatch_event"' in line:
            lost += not device.add_dispatch(json.loads(line))
        elif b'"clock_correlation"' in line:
            device.add_correlation(json.loads(line))
        elif b'"memory_event"' in line:
            record = json.loads(line)
            if record.get("pool_stats_available"):
                pools[record["pool_id"]] = record["pool_bytes_reserved"]
                samples.append((record["host_time_ns"], sum(pools.values())))
        if len(rows) + len(samples) >= _BATCH:
            flush()
    flush()
    events.write(device.build_rows().tobytes())
    return lost, len(device)


def _build_row(record: Mapping[str, Any], names: dict[str, int]) -> tuple[Any, ...]:
    keys = ("start_host_time_ns", "duration_ns", "tile_duration_sum_ns", "payload_length", "submission_id")
    queue = record["physical_device_ordinal"] << 16 | record["queue_ordinal"]
    op, key = (names.setdefault(record[name] or "", len(names)) for name in ("op", "key"))
    return *(record[name] for name in keys), queue, record["command_index"], record["tile_count"], op, key
