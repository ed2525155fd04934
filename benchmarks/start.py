"""Measure whole commands: `hil run` on the simulator, relative to other commands for the same task.

Either everything is cached and the simulator runs (`warm`), or the model changes each time (`changed`). There are three
rivals: `polygraphy run --onnxrt` with the same model, which compares nothing; a script that calls `iree-run-module` and
compares with NumPy; and the sequence `iree-import-onnx`, `iree-compile`, `iree-run-module`. The time is from the start
to the end of a process. The commands alternate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import common
from hil.core.boards import load_board

MODEL = Path(__file__).parents[1] / "examples" / "digits" / "digits_cnn.onnx"
POLYGRAPHY = "polygraphy==0.53.*"
MANY = 10
# Script without hil, for an existing program.
SCRIPT = """
import subprocess, sys
import numpy as np
tool = [sys.argv[1], "--device=local-task", "--module=kept.vmfb"]
subprocess.run([*tool, "--input=@x.npy", "--output=@y.npy"], check=True)
assert np.allclose(np.load("y.npy"), np.load("expected.npy"), rtol=1e-5, atol=1e-5)
"""


def changed(path: Path, number: int) -> Path:
    """Write the model with a different weight."""
    model = onnx.load(MODEL)
    weight = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += np.float32((number + 1) / 1000)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, path)
    return path


def tool(name: str) -> str:
    """Return the path of a command in this environment."""
    return str(Path(sys.executable).parent / name)


class Place:
    """Directory with a home, a cache and the files of the rivals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = {"HOME": folder, "HIL_CACHE_DIR": folder / "cache", "TMPDIR": folder}
        self.environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        for name in ("HIL_SIMULATOR", "PYTHONDONTWRITEBYTECODE"):
            self.environment.pop(name, None)
        self.flags = load_board("sim").config.compile_flags["iree"]

    def run(self, *command: str | Path) -> float:
        """Run a command, which must succeed. Return the seconds."""
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return time.perf_counter() - start

    def hil(self, *models: Path) -> float:
        """Return the seconds of `hil run` on the simulator."""
        return self.run(tool("hil"), "run", *models, "--runtime-hw-type", "sim")

    def program(self, model: Path) -> float:
        """Return the seconds for importing, compiling and running a model with IREE's tools."""
        tools = [
            [tool("iree-import-onnx"), model, "-o", "m.mlir"],
            [tool("iree-compile"), "m.mlir", "-o", "m.vmfb", *self.flags],
            [tool("iree-run-module"), "--device=local-task", "--module=m.vmfb", "--input=@x.npy", "--output=@y.npy"],
        ]
        return sum(self.run(*command) for command in tools)


def _within(case: str, seconds: Sequence[float], bar_s: float) -> common.Row:
    median = statistics.median(seconds)
    return common.Row(case, median * 1e3, "ms", "the bar", bar_s * 1e3, median / bar_s, "<= 1.0")


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=7)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(Path(scratch))
        np.save(place.folder / "x.npy", np.random.default_rng(0).random((1, 1, 8, 8), np.float32))
        place.program(MODEL)
        (place.folder / "m.vmfb").rename(place.folder / "kept.vmfb")
        (place.folder / "y.npy").replace(place.folder / "expected.npy")
        several = [changed(place.folder / f"many{n}.onnx", 1000 + n) for n in range(MANY)]
        numbers = iter(range(10_000))

        def fresh(measure: Callable[[Path], float]) -> Callable[[], Sequence[float]]:
            return lambda: [measure(changed(place.folder / "changed.onnx", next(numbers)))]

        cases: dict[str, Callable[[], Sequence[float]]] = {
            "hil": lambda: [place.hil(MODEL)],
            "script": lambda: [place.run(sys.executable, "-c", SCRIPT, tool("iree-run-module"))],
            "many": lambda: [place.hil(*several)],
            "changed": fresh(place.hil),
            "tools": fresh(place.program),
        }
        polygraphy = common.python_with("polygraphy-0.53", [POLYGRAPHY, "onnx", "onnxruntime"], notes)
        if polygraphy:
            command = str(polygraphy.parent / "polygraphy")
            cases["polygraphy"] = lambda: [place.run(command, "run", MODEL, "--onnxrt")]
        try:
            taken = common.interleave(cases, asked.rounds)
        finally:
            subprocess.run(["pkill", "-f", scratch])  # end the simulator, which hil keeps for reuse
    more = [(many - one) / (MANY - 1) for many, one in zip(taken["many"], taken["hil"], strict=True)]
    mine = taken["hil"]
    rows = [
        _within("hil run, warm", mine, 0.45),
        common.beside("hil run, warm", mine, "iree-run-module + NumPy", taken["script"], 1e3, "ms", ""),
        common.beside("hil run, model changed", taken["changed"], "IREE's tools", taken["tools"], 1e3, "ms", "<= 0.8"),
        _within("a model more in one hil run, warm", more, 0.015),
    ]
    if theirs := taken.get("polygraphy"):
        rows.insert(1, common.beside("hil run, warm", mine, "polygraphy run --onnxrt", theirs, 1e3, "ms", "<= 1.0"))
    common.show("start", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
