"""ONNX Runtime: the program is the ONNX file itself, with its external data beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hil.agent.runtimes import profiling
from hil.errors import LoadFailed, RunFailed
from hil.ort_values import from_ort, spec_of_node, to_ort
from hil.tensors import Array, TensorSpec

# What a profiling pass writes.
PROFILE_FILE = "onnxruntime.json"
DEFAULT_DEVICE = "CPUExecutionProvider"


class OnnxRuntime:
    """Loads .onnx files with onnxruntime; a device is an execution provider."""

    def __init__(self, options: dict[str, Any]) -> None:
        ort.set_default_logger_severity(3)

    @staticmethod
    def describe() -> dict[str, Any]:
        """Version and execution providers, the CPU's first."""
        providers = [name for name in ort.get_available_providers() if name != "AzureExecutionProvider"]
        ordered = sorted(providers, key=lambda name: name != DEFAULT_DEVICE)
        return {"version": ort.__version__, "devices": ordered}

    def prepare(self, device: str) -> None:
        """Nothing: an execution provider opens with its session."""

    def load(self, folder: Path, main: str, device: str, function: str) -> OnnxProgram:
        """Make a session of the model."""
        provider = device or DEFAULT_DEVICE
        if provider not in ort.get_available_providers():
            raise LoadFailed(
                f"ONNX Runtime has no execution provider {provider!r}", hint=f"one of {ort.get_available_providers()}"
            )

        def make(options: ort.SessionOptions) -> ort.InferenceSession:
            options.log_severity_level = 3
            return ort.InferenceSession(str(folder / main), options, providers=[provider])

        try:
            session = make(ort.SessionOptions())
        except Exception as error:
            text = str(error).replace(str(folder) + "/", "")
            raise LoadFailed(f"ONNX Runtime refused {main}: {text[:400]}", detail=text) from error
        return OnnxProgram(session, function, make)


class OnnxProgram:
    """A session; its one function is the graph.

    Args:
        session: of the model.
        function: its name, for the record.
        make: makes another session of the same model.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        function: str,
        make: Callable[[ort.SessionOptions], ort.InferenceSession],
    ) -> None:
        self._session = session
        self._make = make
        self.function = function
        self.inputs = _specs("input", session.get_inputs())
        self.outputs = _specs("output", session.get_outputs())
        self._names = [spec.name for spec in self.outputs]
        self._feeds: dict[str, Any] = {}
        self._arrays: list[Array] = []
        self._values: Any = None

    def bind(self, inputs: list[Array]) -> None:
        """Wrap the inputs as OrtValues; they share the arrays' memory."""
        self._arrays = inputs
        try:
            self._feeds = {spec.name: to_ort(array) for spec, array in zip(self.inputs, inputs, strict=True)}
        except Exception as error:
            raise RunFailed(f"ONNX Runtime's Python API cannot take an input: {error}") from error

    def run(self) -> None:
        """One session run."""
        self._values = self._run(self._session)

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None) -> list[Path]:
        """Run a session of its own that writes down what it does: this one stays as quick as it was."""
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "pass")
        try:
            session = self._make(options)
            # What it counts its microseconds from.
            start_ns = session.get_profiling_start_time_ns()
            clocks = profiling.ClockPairs(lambda: time.time_ns() - start_ns)
            clocks.look()
            for _ in range(warmup + iterations):
                self._run(session)
            clocks.look()
            written = Path(session.end_profiling())
            written.rename(folder / PROFILE_FILE)
        except RunFailed:
            raise
        except Exception as error:
            raise RunFailed(
                f"ONNX Runtime failed to profile the model: {str(error)[:400]}", detail=str(error)
            ) from error
        return [folder / PROFILE_FILE, clocks.write(folder)]

    def _run(self, session: ort.InferenceSession) -> Any:
        try:
            return session._sess.run_with_ort_values(
                {name: value._get_c_value() for name, value in self._feeds.items()}, self._names, None
            )
        except Exception as error:
            raise RunFailed(f"ONNX Runtime failed to run the model: {str(error)[:400]}", detail=str(error)) from error

    def fetch(self) -> list[Array]:
        """The outputs of the last run."""
        arrays = []
        for spec, value in zip(self.outputs, self._values, strict=True):
            wrapped = ort.OrtValue(value)
            if not wrapped.is_tensor():
                raise RunFailed(f"output {spec.name} is no tensor")
            arrays.append(from_ort(wrapped, spec.dtype))
        return arrays


def _specs(kind: str, nodes: Any) -> tuple[TensorSpec, ...]:
    specs = []
    for node in nodes:
        spec = spec_of_node(node)
        if spec is None:
            raise LoadFailed(f"{kind} {node.name} is a {node.type}: hil passes tensors only")
        specs.append(spec)
    return tuple(specs)
