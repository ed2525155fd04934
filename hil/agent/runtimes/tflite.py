"""Run .tflite files with LiteRT's interpreter. A device is a set of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hil.agent.runtimes import Runtime
from hil.core.installed import get_version
from hil.core.results import Placement
from hil.core.tensors import Array
from hil.errors import LoadFailed, did_you_mean
from hil.formats.litert import KERNELS, PACKAGE, LiteRtSignature, open_signature

DEFAULT_DEVICE = "xnnpack"


class TfLiteRuntime(Runtime):
    """Runtime for .tflite files."""

    def __init__(self, options: dict[str, Any]) -> None:
        pass

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the version and the kernel sets: ``xnnpack``, LiteRT's kernels (``builtin``), and plain loops."""
        try:
            return {"version": get_version(PACKAGE), "devices": list(KERNELS)}
        except ModuleNotFoundError as error:
            raise ImportError(f"{PACKAGE} is not installed") from error

    def prepare(self, device: str) -> None:
        """Import the interpreter."""
        importlib.import_module("ai_edge_litert.interpreter")

    def load(self, folder: Path, main: str, device: str, function: str) -> TfLiteProgram:
        """Open a signature of the model, or its main graph."""
        if (device or DEFAULT_DEVICE) not in KERNELS:
            hint = f"{did_you_mean(device, KERNELS)}supported: {', '.join(KERNELS)}"
            raise LoadFailed(f"unsupported LiteRT device {device!r}", hint=hint)
        return TfLiteProgram(lambda: open_signature(folder / main, function, kernels=device or DEFAULT_DEVICE))


class TfLiteProgram:
    """Loaded signature."""

    def __init__(self, opened: Callable[[], LiteRtSignature]) -> None:
        self._open = opened
        self._signature = signature = opened()
        self.function = signature.name
        self.inputs = signature.inputs
        self.outputs = signature.outputs
        self._given: list[Array] | None = None
        self._has_run = False

    def bind(self, inputs: list[Array]) -> None:
        """Copy the inputs into the interpreter. New shapes reallocate the interpreter's memory."""
        self._given = inputs
        self._signature.set_inputs(inputs)

    def renew(self) -> None:
        """Set the inputs, which kernels may overwrite, and reopen a model that has state.

        LiteRT resets variables to zero instead of their initial values.
        """
        if self._has_run:
            if self._signature.keeping:
                self._signature = self._open()
            if self._given is not None:
                self._signature.set_inputs(self._given)

    def run(self) -> None:
        """Invoke the signature."""
        self._has_run = True
        self._signature.invoke()

    def step(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Invoke the signature with arrays."""
        self._given, self._has_run = None, True
        self._signature.set_inputs(inputs)
        self._signature.invoke()
        return self._signature.copy_outputs()

    def to_array(self, place: int, value: Array) -> Array:
        """Return the value, which is an array."""
        return value

    def open_function(self, name: str) -> TfLiteProgram:
        """Open another signature of the same interpreter."""
        return TfLiteProgram(lambda: self._signature.open_other(name))

    def placement(self) -> Placement | None:
        """Return the nodes that the delegate ran, for the shapes of the last run."""
        return self._signature.placement()

    def fetch(self) -> list[Array]:
        """Return the outputs of the last run."""
        return self._signature.copy_outputs()
