"""Commands that reproduce a failure without hil: IREE's tools, or a short Python script for ONNX Runtime."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.files import MAX_LOG_BYTES
from hil.core.processes import kill_trees
from hil.core.results import Outcome

_TAIL = 40
# Default tolerances of the script for ONNX Runtime.
_RTOL, _ATOL = 1e-3, 1e-5
# Float types for which iree-run-module has an absolute tolerance.
_IREE_FLOATS = ("f16", "bf16", "f32", "f64")
# Outcomes of the compiler, which occur without a board.
COMPILING = (Outcome.COMPILE_ERROR, Outcome.COMPILE_CRASH)
_ORT_SCRIPT = '''"""Run model.onnx with ONNX Runtime, and compare with the expected outputs."""
import sys
from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(__file__).parent
session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
inputs, expected = ([np.load(file) for file in map(folder.joinpath, names)] for names in ({inputs}, {expected}))
names = [value.name for value in session.get_inputs()]
outputs = session.run(None, dict(zip(names, inputs)))
for value, output, wanted in zip(session.get_outputs(), outputs, expected):
    print(value.name, "largest difference", np.max(np.abs(output - wanted), initial=0))
same = all(np.allclose(output, wanted, {rtol}, {atol}) for output, wanted in zip(outputs, expected))
sys.exit(not same)
'''
_ORT_TIMING = '''"""Measure the time of model.onnx with ONNX Runtime."""
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(__file__).parent
session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
arrays = [np.load(file) for file in map(folder.joinpath, {inputs})]
inputs = dict(zip([value.name for value in session.get_inputs()], arrays))
times = []
for _ in range(20):
    start = time.perf_counter()
    session.run(None, inputs)
    times.append(1e3 * (time.perf_counter() - start))
print(f"shortest {{min(times):.4g}} ms, median {{statistics.median(times):.4g}} ms")
'''


@dataclass(frozen=True)
class StockScript:
    """Script that reproduces a failure. Exit code 0 means that the failure does not occur.

    For a slow model, the script prints times, and the exit code is 0.
    """

    name: str
    text: str
    command: str


@dataclass(frozen=True)
class IreeSource:
    """Model for IREE's tools.

    Attributes:
        file: name of an ONNX or MLIR file.
        function: function of an MLIR file.
    """

    file: str
    function: str

    @property
    def is_onnx(self) -> bool:
        """Return whether the model must be imported."""
        return self.file.endswith(".onnx")

    @property
    def entry(self) -> str:
        """Name of the function in the program."""
        return "main_graph" if self.is_onnx else self.function


def make_iree_script(
    outcome: Outcome,
    source: IreeSource,
    flags: Sequence[str],
    device: str,
    inputs: Sequence[str],
    expected: Sequence[str],
    rtol: float | None,
    atol: float | None,
) -> StockScript:
    """Return the script for IREE's tools. Files are relative to its directory.

    Args:
        rtol, atol: tolerances; None for the defaults of iree-run-module.
    """
    lines = _list_iree_steps(source, flags)
    if outcome not in COMPILING:
        words = ["iree-run-module", "--module=model.vmfb", f"--device={device or 'local-task'}"]
        words += [f"--function={source.entry}", *(f"--input=@{name}" for name in inputs)]
        words += [f"--expected_output=@{name}" for name in expected]
        if rtol is not None:
            words.append(f"--expected_rtol={rtol:g}")
        if atol is not None:
            words += [f"--expected_{kind}_threshold={atol:g}" for kind in _IREE_FLOATS]
        lines.append(shlex.join(words))
    return StockScript("reproduce.sh", "\n".join([*lines, ""]), "sh reproduce.sh")


def make_onnxruntime_script(
    inputs: Sequence[str], expected: Sequence[str], rtol: float | None, atol: float | None
) -> StockScript:
    """Return the Python script for ONNX Runtime."""
    values = {
        "inputs": list(inputs),
        "expected": list(expected),
        "rtol": _RTOL if rtol is None else rtol,
        "atol": _ATOL if atol is None else atol,
    }
    return StockScript("reproduce.py", _ORT_SCRIPT.format(**values), "python reproduce.py")


def make_onnxruntime_timing(inputs: Sequence[str]) -> StockScript:
    """Return the Python script that measures the time with ONNX Runtime."""
    return StockScript("reproduce.py", _ORT_TIMING.format(inputs=list(inputs)), "python reproduce.py")


def make_iree_timing(source: IreeSource, flags: Sequence[str], device: str, inputs: Sequence[str]) -> StockScript:
    """Return the script that measures the time with IREE's tools."""
    words = ["iree-benchmark-module", "--module=model.vmfb", f"--device={device or 'local-task'}"]
    words += [f"--function={source.entry}", *(f"--input=@{name}" for name in inputs)]
    return StockScript(
        "reproduce.sh", "\n".join([*_list_iree_steps(source, flags), shlex.join(words), ""]), "sh reproduce.sh"
    )


def _list_iree_steps(source: IreeSource, flags: Sequence[str]) -> list[str]:
    lines = ["#!/bin/sh -e", 'cd "$(dirname "$0")"']
    if source.is_onnx:
        lines.append(f"iree-import-onnx {source.file} -o model.mlir")
    return [*lines, shlex.join(["iree-compile", "model.mlir", "-o", "model.vmfb", *flags])]


def run_script(folder: str, command: str, limit: float) -> dict[str, Any]:
    """Run a script with the tools of this Python environment. Runs in an isolated process.

    Returns:
        ``code``: exit code, negative for a signal, None if it was stopped after ``limit`` seconds; ``printed``: the
        last lines of the output.
    """
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Disable symbolization of stack traces, which takes seconds.
    environment: Mapping[str, str] = {**os.environ, "PATH": tools, "LLVM_DISABLE_SYMBOLIZATION": "1"}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # Use a file instead of a pipe: reading a pipe waits for every process that has the pipe open.
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(shlex.split(command), cwd=folder, env=environment, stdout=output, **how) as process:
            code: int | None = None
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                # Kill the process tree. The script does not run in a separate session, because it would then survive
                # the end of the isolated process.
                kill_trees({process.pid})
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
        printed = output.read(MAX_LOG_BYTES).decode(errors="replace")
    return {"code": code, "printed": "\n".join(printed.splitlines()[-_TAIL:])}
