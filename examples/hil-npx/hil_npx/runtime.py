"""Run programs of the chip. This module runs on the board, so it imports hil.agent.plugins and not hil.plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hil.agent.plugins import (
    Check,
    ErrorCode,
    LoadFailed,
    Operation,
    Part,
    RunFailed,
    TensorSpec,
    get_time_ns,
    parse_dtype,
    write_operations,
)
from hil_npx import VERSION
from hil_npx.kernels import KERNELS
from hil_npx.program import NpxProgram, Step, read_program

DEVICE = "npx0"
# Vector lanes of the chip. A program for more lanes does not run.
LANES = 16


class NpxRuntime:
    """Runtime of the chip. ``options["arithmetic"]`` is the arithmetic of a simulated board."""

    arithmetics = ("float16", "bfloat16")

    def __init__(self, options: dict[str, Any]) -> None:
        self._arithmetic = options.get("arithmetic") or "float32"

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the version and the devices. The default device is first."""
        return {"version": VERSION, "devices": [DEVICE]}

    def prepare(self, device: str) -> None:
        """Do nothing: there is no device to open."""

    def load(self, folder: Path, main: str, device: str, function: str) -> NpxLoaded:
        """Load a program."""
        if device not in ("", DEVICE):
            raise LoadFailed(f"unknown device {device!r}", hint=f"devices: {DEVICE}")
        if function not in ("", "main"):  # bundles call the only function main
            raise LoadFailed(f"function {function!r} not found: a program of NPX has a single function")
        try:
            program = read_program(folder / main)
        except ValueError as error:
            raise LoadFailed(str(error)) from error
        if program.lanes > LANES:
            raise LoadFailed(
                f"the program needs {program.lanes} lanes, the chip has {LANES}", code=ErrorCode.WRONG_TARGET
            )
        return NpxLoaded(program, self._arithmetic)


class NpxLoaded:
    """Loaded program."""

    function = ""

    def __init__(self, program: NpxProgram, arithmetic: str) -> None:
        self._rounding = None if arithmetic == "float32" else parse_dtype(arithmetic)
        self._steps = program.steps
        self._weights = {name: self._round(array) for name, array in program.weights.items()}
        self.inputs, self.outputs = (
            tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in side)
            for side in (program.inputs, program.outputs)
        )
        self._given: list[Any] = []
        self._results: list[Any] = []
        self._times: list[tuple[Step, int, int]] = []
        self._placed = (Part.of(DEVICE, [step.name for step in self._steps]),)

    def bind(self, inputs: list[Any]) -> None:
        """Set the inputs of the next runs."""
        self._given = inputs

    def run(self) -> None:
        """Run the program."""
        names = [spec.name for spec in self.inputs]
        values = self._weights | {name: self._round(one) for name, one in zip(names, self._given, strict=True)}
        self._times = []
        for step in self._steps:
            start = get_time_ns()
            try:
                with np.errstate(all="ignore"):
                    made = KERNELS[step.op](*(values[name] for name in step.inputs if name), **step.attributes)
            except (ArithmeticError, ValueError, TypeError, KeyError) as error:
                raise RunFailed(f"step {step.name} ({step.op}) failed: {error}") from error
            values[step.outputs[0]] = self._round(np.asarray(made))
            self._times.append((step, start, get_time_ns()))
        self._results = [
            np.asarray(values[spec.name], parse_dtype(spec.dtype)).reshape(spec.shape) for spec in self.outputs
        ]

    def fetch(self) -> list[Any]:
        """Return the outputs of the last run."""
        return self._results

    def placement(self) -> tuple[Part, ...]:
        """Return the device of the steps: the chip runs all of them."""
        return self._placed

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Run the program and write the time of each step."""
        found = []
        for number in range(warmup + iterations):
            self.run()
            check(self.fetch())
            found += [Operation(step.op, number, start, end, (step.name,)) for step, start, end in self._times]
        return [write_operations(found, folder)]

    def _round(self, array: Any) -> Any:
        """Round float32 values to the arithmetic of a simulated board."""
        if self._rounding is None or array.dtype != np.float32:
            return array
        return array.astype(self._rounding).astype(np.float32)
