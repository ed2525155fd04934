"""Sum a compilation's profile up: its phases, its passes, and the operations that it compiled, by estimates."""

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

# What only runs other passes, which the compiler's report tells within it, or beside it.
_RUNS_OTHERS = re.compile(
    r" Pipeline$|PipelinePass$|OpPipelineAdaptorPass$|AllExecutablesPass$|TargetExecutableVariantsPass$"
    r"|FixedPointIteratorPass$|UsingTransformDialectPass$"
)
_HINT = "compile with --compile-time-profile again"


@dataclass(frozen=True)
class CompileStep:
    """A phase, or all runs of one pass within a phase; a pass without what ran within it."""

    name: str
    seconds: float
    share: float  # of the whole compilation, 0 to 1
    phase: str = ""
    runs: int = 1


@dataclass(frozen=True)
class CompiledOperation:
    """A dispatch. What it takes is estimated from its shapes, for a nominal core."""

    name: str  # its ONNX nodes, or the dispatch's own name
    share: float
    seconds: float
    flops: float | None
    bytes: float | None
    bound: str  # compute, memory, or "" where it is not known


@dataclass(frozen=True)
class Compilation:
    """A compilation, summed up."""

    seconds: float
    phases: Sequence[CompileStep]  # in order of time
    passes: Sequence[CompileStep]  # the longest first
    operations: Sequence[CompiledOperation]  # those that are estimated, the largest share first
    dispatches: int
    program_bytes: int


def is_compile_profile(folder: Path) -> bool:
    """Return whether a folder holds a profile of ``--compile-time-profile``."""
    return (folder / PASSES).is_file()


def read_compilation(folder: Path) -> Compilation:
    """Sum up the profile in a folder. Raises UsageError: a table of it is missing or damaged."""
    tables = {name: _read(folder / name) for name in (PASSES, DISPATCHES, EXECUTABLES)}
    try:
        rows = tables[PASSES]
        phases = [row for row in rows if row["depth"] == "0"]
        whole = sum(map(_time, phases)) or 1.0
        passes = [
            CompileStep(name, spent, spent / whole, phase, runs) for (phase, name), (spent, runs) in _own(rows).items()
        ]
        operations = [_operation(row) for row in tables[DISPATCHES] if row.get("share_estimate")]
        return Compilation(
            seconds=whole,
            phases=[CompileStep(row["pass"], _time(row), _time(row) / whole) for row in phases],
            passes=sorted(passes, key=lambda one: -one.seconds),
            operations=sorted(operations, key=lambda one: -one.share),
            dispatches=len(tables[DISPATCHES]),
            program_bytes=sum(int(row["bytes"]) for row in tables[EXECUTABLES]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} cannot be read: {type(error).__name__}: {error}", hint=_HINT) from error


def _operation(row: Mapping[str, str]) -> CompiledOperation:
    return CompiledOperation(
        name=", ".join(split_list(row["onnx_nodes"])) or row["dispatch"],
        share=float(row["share_estimate"]),
        seconds=float(row["time_us_estimate"]) / 1e6,
        flops=_number(row["flops_estimate"]),
        bytes=_number(row["bytes_estimate"]),
        bound=row["bound_estimate"],
    )


def _time(row: Mapping[str, str]) -> float:
    return float(row["wall_ms"]) / 1e3


def _own(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Phase and pass -> the time that all its runs took without what ran within them, and how many there were.

    Those that only run others are left out. A row is followed by those that ran within it, each one deeper.
    """
    inner = [0.0] * len(rows)
    around: list[tuple[int, int]] = []  # depth and number of the rows that the next one may be within
    for number, row in enumerate(rows):
        depth = int(row["depth"])
        while around and around[-1][0] >= depth:
            around.pop()
        if around and around[-1][0] == depth - 1:
            inner[around[-1][1]] += _time(row)
        around.append((depth, number))
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for row, within in zip(rows, inner, strict=True):
        if int(row["depth"]) and not _RUNS_OTHERS.search(row["pass"]):
            spent, runs = found.get((row["phase"], row["pass"]), (0.0, 0))
            found[row["phase"], row["pass"]] = spent + max(0.0, _time(row) - within), runs + 1
    return found


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8")
        return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=_HINT) from error
