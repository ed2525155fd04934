"""Sum a compilation's profile: phases, passes, and estimates for the compiled operations."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.analysis.profile.rows import DISPATCHES, EXECUTABLES, PASSES, split_list
from hil.core.files import open_file
from hil.errors import UsageError

# Passes that only run other passes. The compiler's report lists the inner passes separately.
_RUNS_OTHERS = re.compile(
    r" Pipeline$|PipelinePass$|OpPipelineAdaptorPass$|AllExecutablesPass$|TargetExecutableVariantsPass$"
    r"|FixedPointIteratorPass$|UsingTransformDialectPass$"
)
_HINT = "compile again with --compile-time-profile"


@dataclass(frozen=True)
class CompileStep:
    """A phase, or all runs of a pass within a phase; nested passes are not included."""

    name: str
    seconds: float
    share: float  # relative to the whole compilation, 0 to 1
    phase: str = ""
    runs: int = 1


@dataclass(frozen=True)
class CompiledOperation:
    """A dispatch. Time and work are estimated from shapes, for a nominal core."""

    name: str  # ONNX nodes, or the dispatch's name
    share: float
    seconds: float
    flops: float | None
    bytes: float | None
    bound: str  # ``compute``, ``memory``, or "" if unknown


@dataclass(frozen=True)
class Compilation:
    """A compilation's totals."""

    seconds: float
    phases: Sequence[CompileStep]  # in time order
    passes: Sequence[CompileStep]  # the longest first
    operations: Sequence[CompiledOperation]  # only operations with an estimate, the largest share first
    dispatches: int
    program_bytes: int


def is_compile_profile(folder: Path) -> bool:
    """Return True if a directory contains a profile from ``--compile-time-profile``."""
    return (folder / PASSES).is_file()


def read_compilation(folder: Path) -> Compilation:
    """Sum the profile in a directory.

    Raises:
        UsageError: a table is missing or damaged.
    """
    tables = {name: _read_table(folder / name) for name in (PASSES, DISPATCHES, EXECUTABLES)}
    try:
        rows = tables[PASSES]
        phases = [row for row in rows if row["depth"] == "0"]
        whole = sum(map(_parse_wall_time, phases)) or 1.0
        passes = [
            CompileStep(name, spent, spent / whole, phase, runs)
            for (phase, name), (spent, runs) in _sum_exclusive_times(rows).items()
        ]
        operations = [_parse_operation(row) for row in tables[DISPATCHES] if row.get("share_estimate")]
        return Compilation(
            seconds=whole,
            phases=[CompileStep(row["pass"], _parse_wall_time(row), _parse_wall_time(row) / whole) for row in phases],
            passes=sorted(passes, key=lambda one: -one.seconds),
            operations=sorted(operations, key=lambda one: -one.share),
            dispatches=len(tables[DISPATCHES]),
            program_bytes=sum(int(row["bytes"]) for row in tables[EXECUTABLES]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} cannot be read: {type(error).__name__}: {error}", hint=_HINT) from error


def _parse_operation(row: Mapping[str, str]) -> CompiledOperation:
    return CompiledOperation(
        name=", ".join(split_list(row["onnx_nodes"])) or row["dispatch"],
        share=float(row["share_estimate"]),
        seconds=float(row["time_us_estimate"]) / 1e6,
        flops=_parse_number(row["flops_estimate"]),
        bytes=_parse_number(row["bytes_estimate"]),
        bound=row["bound_estimate"],
    )


def _parse_wall_time(row: Mapping[str, str]) -> float:
    return float(row["wall_ms"]) / 1e3


def _sum_exclusive_times(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Return (phase, pass) -> (total exclusive time in seconds, run count).

    Passes that only run other passes are left out. In the table, nested passes follow the enclosing row, one level
    deeper.
    """
    inner = [0.0] * len(rows)
    around: list[tuple[int, int]] = []  # stack of (depth, row index): possible parents of the next row
    for number, row in enumerate(rows):
        depth = int(row["depth"])
        while around and around[-1][0] >= depth:
            around.pop()
        if around and around[-1][0] == depth - 1:
            inner[around[-1][1]] += _parse_wall_time(row)
        around.append((depth, number))
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for row, within in zip(rows, inner, strict=True):
        if int(row["depth"]) and not _RUNS_OTHERS.search(row["pass"]):
            spent, runs = found.get((row["phase"], row["pass"]), (0.0, 0))
            found[row["phase"], row["pass"]] = spent + max(0.0, _parse_wall_time(row) - within), runs + 1
    return found


def _parse_number(cell: str) -> float | None:
    return float(cell) if cell else None


def _read_table(path: Path) -> list[dict[str, str]]:
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8")
        return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=_HINT) from error
