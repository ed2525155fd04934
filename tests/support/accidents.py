"""Run `hil run` while its board fails, and build models that keep the board busy in one stage."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from support.models import save_model
from tools.virtual_board import VirtualBoard

FLOAT = TensorProto.FLOAT
MB = 1_000_000
# Longer than any outcome takes: hil detects a lost link within 15 s, searches for the board, and gives up.
PATIENCE_S = 150


@dataclass
class Run:
    """Active process of `hil run`."""

    process: subprocess.Popen[str]
    mark: str
    record: dict[str, Any] = field(default_factory=dict)
    err: str = ""

    def end(self) -> dict[str, Any]:
        """Wait for the process. Return its only case."""
        out, self.err = self.process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in self.err, self.err
        self.record = json.loads(out)
        return self.record["cases"][0]

    def left_behind(self) -> list[str]:
        """Return the command lines of processes that the command started on this machine and that still exist."""
        return [line for pid, line in _processes() if self.mark.encode() in _read(f"/proc/{pid}/environ")]


def _processes() -> Iterator[tuple[str, str]]:
    for place in Path("/proc").glob("[0-9]*"):
        pid = place.name
        yield pid, _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def traffic(board: VirtualBoard, way: str) -> int:
    """Return the bytes to (``tx``) or from (``rx``) the board so far."""
    return int(Path(f"/sys/class/net/{board.link}/statistics/{way}_bytes").read_text())


def working(board: VirtualBoard) -> bool:
    """Return whether a program runs on the board: a process of the agent computes all the time."""

    def ticks() -> dict[str, int]:
        script = "for p in $(pgrep -f hil.agent); do cat /proc/$p/stat 2>/dev/null; done; true"
        rows = [line.split() for line in board.run(["sh", "-c", script]).stdout.splitlines()]
        return {row[0]: int(row[13]) for row in rows}

    before = ticks()
    # Long enough to use 20 ticks of CPU time on a core that other processes share.
    time.sleep(0.6)
    return any(spent - before.get(pid, spent) > 20 for pid, spent in ticks().items())


def agents_processes(board: VirtualBoard) -> list[str]:
    """Return the processes of hil on the board, without their process IDs."""
    rows = board.run(["ps", "-eo", "args="]).stdout.splitlines()
    return sorted(row.split(".hil", 1)[-1] for row in rows if ".hil/" in row or "hil.agent" in row)


def is_quiet(board: VirtualBoard, before: list[str]) -> bool:
    return len(agents_processes(board)) <= len(before)


def model_with_weights(folder: Path, megabytes: int) -> Path:
    """Save a model with weights of this size. A maximum, unlike a sum, does not depend on the order of the elements."""
    # Use different weights each time, because hil does not send a blob again that the board already has.
    weights = np.random.default_rng().standard_normal(megabytes * MB // 4).astype(np.float32)
    nodes = [helper.make_node("Mul", ["x", "w"], ["z"]), helper.make_node("ReduceMax", ["z"], ["y"], keepdims=1)]
    return save_model(
        folder / "heavy.onnx",
        nodes,
        [("x", FLOAT, [1])],
        [("y", FLOAT, [1])],
        [numpy_helper.from_array(weights, "w")],
    )


def model_with_output(folder: Path, megabytes: int) -> Path:
    """Save a model with a small input and an output of this size."""
    shape = numpy_helper.from_array(np.array([megabytes * MB // 4 // 1000, 1000]), "shape")
    return save_model(
        folder / "loud.onnx",
        [helper.make_node("Expand", ["x", "shape"], ["y"])],
        [("x", FLOAT, [1, 1000])],
        [("y", FLOAT, [megabytes * MB // 4 // 1000, 1000])],
        [shape],
    )
