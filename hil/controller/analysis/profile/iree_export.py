"""What happens in the isolated process: a ``.ireeprof`` file into arrays. Nothing here is called by the controller."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hil.controller.analysis.profile.iree_arrays import EVENT, EVENTS, MEMORY, MEMORY_SAMPLE
from hil.errors import RunFailed

_BATCH = 1 << 14


def export(path: str, tool: str, folder: str) -> dict[str, Any]:
    """Write a profile's events and its memory into ``events.bin`` and ``memory.bin``, in the file's own order.

    Args:
        path: the ``.ireeprof`` file.
        tool: ``iree-profile``.
        folder: an existing one.

    Returns:
        ``names``: what ``op`` and ``key`` of an event are numbers of; ``lost``: how many events were not valid.

    Raises:
        RunFailed: it is no profile, or is cut off.
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
        lost = _sort_out(process.stdout, events, memory, names)
        process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    print(said, flush=True)
    if process.returncode:
        raise RunFailed(
            f"IREE's profile {Path(path).name} cannot be read: {said.rpartition(': ')[2] or 'iree-profile died'}",
            detail=said,
            hint="its run was ended before it was written out, or it is another kind of file",
        )
    return {"names": list(names), "lost": lost}


def _sort_out(lines: Iterable[bytes], events: BinaryIO, memory: BinaryIO, names: dict[str, int]) -> int:
    rows: list[tuple[Any, ...]] = []
    samples: list[tuple[int, int]] = []
    pools: dict[Any, int] = {}
    lost = 0
    for line in lines:
        # Parsing is what takes the time, and a profile holds three times as many lines as are wanted.
        if b'"host_execution_event"' in line:
            record = json.loads(line)
            if record["valid"] and not record["status_code"]:
                rows.append(_row(record, names))
            else:
                lost += 1
        elif b'"memory_event"' in line:
            record = json.loads(line)
            if record.get("pool_stats_available"):
                pools[record["pool_id"]] = record["pool_bytes_reserved"]
                samples.append((record["host_time_ns"], sum(pools.values())))
        if len(rows) + len(samples) >= _BATCH:
            _flush(rows, samples, events, memory)
    _flush(rows, samples, events, memory)
    return lost


def _flush(rows: list[tuple[Any, ...]], samples: list[tuple[int, int]], events: BinaryIO, memory: BinaryIO) -> None:
    events.write(np.array(rows, EVENT).tobytes())
    memory.write(np.array(samples, MEMORY_SAMPLE).tobytes())
    rows.clear()
    samples.clear()


def _row(record: Mapping[str, Any], names: dict[str, int]) -> tuple[Any, ...]:
    return (
        record["start_host_time_ns"],
        record["duration_ns"],
        record["tile_duration_sum_ns"],
        record["payload_length"],
        record["submission_id"],
        record["physical_device_ordinal"] << 16 | record["queue_ordinal"],
        record["executable_id"],
        record["command_index"],
        record["function_ordinal"],
        record["tile_count"],
        names.setdefault(record["op"], len(names)),
        names.setdefault(record["key"] or "", len(names)),
        tuple(record["workgroup_count"]),
    )
