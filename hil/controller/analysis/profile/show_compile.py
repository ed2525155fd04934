"""A profile of a compilation, for the terminal."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.analysis.profile.compile_time import DISPATCHES, EXECUTABLES, PASSES
from hil.controller.analysis.profile.show import Column, named_table
from hil.controller.storage.texts import plain, seconds
from hil.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def is_compile_profile(folder: Path) -> bool:
    """Whether a folder holds what ``--compile-time-profile`` wrote."""
    return (folder / PASSES).is_file()


def print_compile_profile(console: Console, folder: Path, *, top: int) -> None:
    """Print the phases in order, the passes that took the longest, and what came of it.

    Args:
        console: where.
        folder: the profile's.
        top: how many passes.

    Raises:
        UsageError: a table is missing, or is none.
    """
    from rich.text import Text

    rows = _read(folder / PASSES)
    phases = [row for row in rows if row["depth"] == "0"]
    passes = sorted((row for row in rows if row["depth"] != "0"), key=_time, reverse=True)
    whole = sum(map(_time, phases)) or 1.0
    console.print(Text(f"compiling took {seconds(whole)}, in {len(phases)} phases", style="bold"))
    for title, shown in (("phase", phases), ("pass", passes[:top])):
        columns = [
            Column("in phase", [Text(plain(row["phase"])) for row in shown], 3),
            Column("time", [seconds(_time(row)) for row in shown], 1),
            Column("share", [f"{_time(row) / whole:.1%}" for row in shown], 2),
        ]
        table = named_table(console, title, [Text(plain(row["pass"])) for row in shown], columns)
        console.print()
        console.print(table)
    dispatches, binaries = _read(folder / DISPATCHES), _read(folder / EXECUTABLES)
    size = sum(int(row["bytes"]) for row in binaries)
    console.print(Text(f"\n{len(dispatches)} dispatches, a program of {size:,} bytes: {folder / DISPATCHES}"))


def _time(row: dict[str, str]) -> float:
    return float(row["wall_ms"]) / 1e3


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
            for row in rows:
                float(row.get("wall_ms") or 0), int(row.get("bytes") or 0)
            return rows
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="compile with --compile-time-profile again") from error
