"""Compile a model repeatedly, and find programs that differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.results import Artifact


@dataclass(frozen=True)
class Compilations:
    """Result of repeated compilations of a model."""

    count: int
    programs: tuple[Artifact, ...]  # programs that differ from the first program and from each other

    @property
    def text(self) -> str:
        """Summary in one line."""
        if not self.programs:
            return f"{self.count} compilations gave the same program"
        return f"{self.count} compilations gave {1 + len(self.programs)} different programs"

    def record(self) -> dict[str, Any]:
        """Return the entry for run.json."""
        return {
            "count": self.count,
            "programs": 1 + len(self.programs),
            "digests": [dict(one.digests) for one in self.programs],
            "text": self.text,
        }


def compile_repeatedly(first: Artifact, count: int, again: Callable[[Path], Artifact], folder: Path) -> Compilations:
    """Compile a model ``count`` times in total and keep the differing programs.

    Args:
        again: Compiles with a cache in the given directory.
        folder: Directory for the differing programs, in separate subdirectories.
    """
    known = {frozenset(first.digests.items())}
    programs: list[Artifact] = []
    for number in range(2, count + 1):
        place = folder / str(number)
        artifact = again(place)
        if (digests := frozenset(artifact.digests.items())) in known:
            shutil.rmtree(place, ignore_errors=True)
        else:
            known.add(digests)
            programs.append(artifact)
    return Compilations(count, tuple(programs))
