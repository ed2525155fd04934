"""Which of a module's programs runs on a board."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hil.controller.pipeline.boards import board_pool
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, RunResult
from hil.core.tensors import TensorSpec
from hil.testing.traces.backends import parse_backend
from hil.testing.traces.target import BoardTarget


class Program:
    """A program that multiplies x by a weight."""

    def __init__(self, weights: Path) -> None:
        self.loaded = SimpleNamespace(
            inputs=(TensorSpec("x", "float32", (1,)),), outputs=(TensorSpec("y", "float32", (1,)),)
        )
        self._weight = np.frombuffer(weights.read_bytes(), np.float32)

    def run(self, given: dict[str, Any], **_: Any) -> tuple[RunResult, SimpleNamespace]:
        return RunResult("fake", {"y": given["x"] * self._weight}), SimpleNamespace(warmup_ns=0, fetch_s=0.0)

    def unload(self) -> None:
        """Nothing is loaded."""


class Board:
    """A board that loads programs with a weights file next to them."""

    name = "fake"

    def __init__(self) -> None:
        self.config = BoardConfig("fake", "fake")
        self.info = {"runtimes": [{"name": "iree", "devices": []}]}

    def add_target(self, runtime: str) -> None:
        """The fake has no compile target."""

    def take(self) -> None:
        """The fake has no other users."""

    def push(self, artifact: Artifact, progress: Any) -> int:
        """Report zero missing files."""
        return 0

    def load(self, artifact: Artifact, timeout: float, no_fallback: bool, instructions: bool = False) -> Program:
        return Program(artifact.files["params.irpa"])

    def close(self) -> None:
        """Nothing is open."""


def program(folder: Path, weight: float) -> Artifact:
    weights = folder / f"{weight}.irpa"
    weights.write_bytes(np.float32(weight).tobytes())
    files = {"module.vmfb": folder / "module.vmfb", "params.irpa": weights}
    digests = {"module.vmfb": "blake3:the same", "params.irpa": f"blake3:{weight}"}
    return Artifact("iree", "module.vmfb", files, digests, "main", "iree")


def test_target_distinguishes_programs_by_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(board_pool, "open_board", lambda *_, **__: Board())
    board = BoardTarget(parse_backend("iree_llvmcpu"), None, tmp_path)  # type: ignore[arg-type]
    x = np.ones(1, np.float32)
    answers = [board.run(program(tmp_path, weight), "main", [x], ()).returned for weight in (2.0, 3.0, 2.0)]
    assert [float(answer[0][0]) for answer in answers] == [2.0, 3.0, 2.0]
