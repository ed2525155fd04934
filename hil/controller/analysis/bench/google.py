"""Google Benchmark's JSON, which its ``compare.py`` and CI's benchmark trackers read.

Its repetitions are this bench's batches: iterations that were measured in one go, with their mean time.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.bench.measure import Side
from hil.controller.storage.runs import storing


def google_document(document: Mapping[str, Any], sides: Sequence[Side]) -> dict[str, Any]:
    """A bench as Google Benchmark would have told it.

    ``cpu_time`` is the real time by how many cores were at work on average, and the real time where that is not known.

    Args:
        document: the bench's own.
        sides: with the batches.
    """
    rows: list[dict[str, Any]] = []
    for family, side in enumerate(one for one in sides if one.batches):
        rows += _rows(side, family, document["concurrency"])
    return {
        "context": {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(document["created"])),
            "host_name": platform.node(),
            "executable": "hil bench",
            "num_cpus": os.cpu_count() or 1,
            "mhz_per_cpu": 0,
            "cpu_scaling_enabled": False,
            "caches": [],
            "load_avg": list(os.getloadavg()),
            "library_build_type": "release",
            "json_schema_version": 1,
            "boards": ", ".join(dict.fromkeys(side.board.name for side in sides)),
            "run": document["id"],
        },
        "benchmarks": rows,
    }


def write_google(path: Path, document: Mapping[str, Any], sides: Sequence[Side]) -> None:
    """Write it.

    Raises:
        StorageError: it cannot be written there.
    """
    with storing(path, "--benchmark-out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(google_document(document, sides), indent=2) + "\n")


def _rows(side: Side, family: int, threads: int) -> list[dict[str, Any]]:
    name = side.case.name
    busy = side.cpu_ns / side.ran_ns if side.ran_ns else 1.0
    means = [float(batch.duration_ns.mean()) for batch in side.batches]
    common = {
        "name": name,
        "family_index": family,
        "per_family_instance_index": 0,
        "run_name": name,
        "repetitions": len(means),
        "threads": threads,
    }
    rows = [
        {
            **common,
            "run_type": "iteration",
            "repetition_index": number,
            "iterations": int(batch.duration_ns.size),
            "real_time": mean,
            "cpu_time": mean * busy,
            "time_unit": "ns",
        }
        for number, (batch, mean) in enumerate(zip(side.batches, means, strict=True))
    ]
    middle = statistics.fmean(means)
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    aggregates = {
        "mean": (middle, "time"),
        "median": (statistics.median(means), "time"),
        "stddev": (spread, "time"),
        "cv": (spread / middle if middle else 0.0, "percentage"),
    }
    for word, (value, unit) in aggregates.items():
        rows.append(
            {
                **common,
                "name": f"{name}_{word}",
                "run_type": "aggregate",
                "aggregate_name": word,
                "aggregate_unit": unit,
                "iterations": len(means),
                "real_time": value,
                "cpu_time": value if word == "cv" else value * busy,
                "time_unit": "ns",
            }
        )
    return rows
