"""How a worker executes orders: every run, including profile runs, gets the original inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.agent.forkserver import _ForkedWorker
from hil.agent.ipc import Arena, lay_out
from hil.core.tensors import Array, TensorSpec
from hil.errors import RunFailed

GIVEN = np.array([1, 2], np.float32)


class CountingProgram:
    """Returns its input, and adds 1 to it in its second run; its profile reports ``reported`` runs."""

    inputs = (TensorSpec("x", "float32", (2,)),)
    outputs = (TensorSpec("y", "float32", (2,)),)
    function = "main"

    def __init__(self, reported: int = 0) -> None:
        self.reported = reported
        self.number = 0

    def bind(self, inputs: list[Array]) -> None:
        (self.x,) = inputs

    def run(self) -> None:
        self.y = self.x.copy()
        self.number += 1
        if self.number == 2:
            self.x += 1

    def fetch(self) -> list[Array]:
        return [self.y]

    def profile(
        self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Callable[[Sequence[Array]], None]
    ) -> list[Path]:
        for number in range(warmup + iterations):
            self.run()
            if number < self.reported:
                check(self.fetch())
        return []


def answer(program: CountingProgram, op: str, tmp_path: Path) -> dict[str, Any]:
    given = Arena()
    entries, size = lay_out(given, [("x", GIVEN)])
    worker = _ForkedWorker(given, Arena())
    worker.program, worker._folder = program, tmp_path
    order = {"inputs": entries, "bytes": size, "warmup": 1, "iterations": 4, "tool": "", "limit": 1 << 20}
    found: dict[str, Any] = getattr(worker, f"do_{op}")(order)
    return found


@pytest.mark.parametrize("op", ["invoke", "profile"])
def test_worker_restores_inputs_changed_by_a_run(op: str, tmp_path: Path):
    found = answer(CountingProgram(reported=5), op, tmp_path)
    assert [(runs, first) for runs, first, _ in found["answers"]] == [(5, 0)]


def test_worker_accepts_profile_without_reported_outputs(tmp_path: Path):
    assert answer(CountingProgram(), "profile", tmp_path)["answers"] == []


@pytest.mark.parametrize("reported", [1, 4])
def test_worker_rejects_profile_with_outputs_of_some_runs(reported: int, tmp_path: Path):
    with pytest.raises(RunFailed, match=f"reported the outputs of {reported} runs, expected 5"):
        answer(CountingProgram(reported), "profile", tmp_path)
