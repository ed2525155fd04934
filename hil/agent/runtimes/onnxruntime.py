"""ONNX Runtime: the program is the ONNX file itself, with its external data beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort

from hil.errors import LoadFailed, RunFailed
from hil.ort_values import from_ort, spec_of_node, to_ort
from hil.tensors import Array, TensorSpec

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
        options = ort.SessionOptions()
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(str(folder / main), options, providers=[provider])
        except Exception as error:
            text = str(error).replace(str(folder) + "/", "")
            raise LoadFailed(f"ONNX Runtime refused {main}: {text[:400]}", detail=text) from error
        return OnnxProgram(session, function)


class OnnxProgram:
    """A session; its one function is the graph."""

    def __init__(self, session: ort.InferenceSession, function: str) -> None:
        self._session = session
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
        try:
            self._values = self._session._sess.run_with_ort_values(
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
