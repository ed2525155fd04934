"""Board whose programs have configured times on a simulated clock, for tests of benches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.bench.stats import Batch
from hil.controller.devices.board_client import Invocation
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.core.results import Artifact, RunResult


@dataclass
class PacedProgram:
    """Loaded program. ``pace`` returns the duration of the next iteration in nanoseconds."""

    board: PacedBoard
    name: str
    pace: Callable[[], int]

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
        names: tuple[str, ...] = (),
    ) -> Any:
        self.board.calls.append((self.name, warmup, iterations))
        if self.board.fail_at and len(self.board.calls) == self.board.fail_at:
            raise self.board.failure
        warm = sum(self.pace() for _ in range(warmup))
        self.board.now_ns += warm
        stamps = []
        for _ in range(iterations):
            start = self.board.now_ns
            self.board.now_ns += self.pace()
            stamps.append((start, self.board.now_ns))
        outputs = {name: np.zeros(1) for name in names}
        return RunResult("paced", outputs, tuple(stamps), 7), Invocation({}, (), warm, (0, 0), None, 0, 0, 0.0, 0.0)

    def unload(self) -> None:
        self.board.loaded.remove(self.name)


@dataclass
class PacedBoard:
    """Programs by their main file's name.

    Attributes:
        paces: name -> how long an iteration takes.
        calls: (name, warm-up, iterations) of every call.
        loads: the names, in the order of loading.
        fail_at: the call (from 1) at which ``failure`` happens; 0 is never.
        info_at: returns the board's description at a time on its clock.
    """

    paces: Mapping[str, Callable[[], int]]
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    fail_at: int = 0
    failure: BaseException = field(default_factory=RuntimeError)
    now_ns: int = 10**9
    name: str = "paced"
    info_at: Callable[[int], Mapping[str, Any]] = lambda now_ns: {}

    @property
    def info(self) -> Mapping[str, Any]:
        return self.info_at(self.now_ns)

    def load(self, artifact: Artifact, *, timeout: float, no_fallback: bool, instructions: bool) -> PacedProgram:
        self.loads.append(artifact.main)
        self.loaded.append(artifact.main)
        return PacedProgram(self, artifact.main, self.paces[artifact.main])


def side_on(board: PacedBoard, label: str, name: str) -> BenchSide:
    """Return a side with the program of this name."""
    artifact = Artifact("paced", name, {}, {}, "main", "none")
    case = Case(f"{label}-{name}", Path(name), Options(), Path(), artifact=artifact, inputs={"x": np.zeros(1)})
    return BenchSide(label, case, board)


def read_samples(folder: Path) -> list[Batch]:
    """Return the batches in the ``samples.csv`` of a stored bench, in order. An incomplete last line is ignored."""
    whole, _, _ = (folder / "samples.csv").read_text().rpartition("\n")
    rows = [line.split(",") for line in whole.splitlines()[1:]]
    batches = []
    for _, group in groupby(rows, key=lambda row: row[2]):
        batch = list(group)
        starts, durations = (np.array([int(row[column]) for row in batch]) for column in (4, 5))
        batches.append(Batch(batch[0][0], int(batch[0][1]), int(batch[0][3]), starts, durations))
    return batches
