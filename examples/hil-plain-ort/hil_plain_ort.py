"""ONNX Runtime without graph optimizations, as a reference for hil."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from hil.plugins import Isolated, Model, Reference, load_tensors, save_tensors


def describe_source() -> str:
    """Return the name and the version of the reference. hil caches results by this text."""
    return f"onnxruntime {version('onnxruntime')} without optimizations"


def compute(
    model: Model, inputs: Path, outputs: Path, *, isolated: Isolated, timeout: float | None, log: Path, **_: Any
) -> None:
    """Compute a model's outputs in a separate process, which may crash or hang."""
    paths = {"model": str(model.path.absolute()), "inputs": str(inputs), "outputs": str(outputs)}
    isolated.call(run, paths, timeout=timeout, log=log)


def run(model: str, inputs: str, outputs: str) -> None:
    """Read the inputs, run the model and write the outputs. Replace this function with calls of your library."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, load_tensors(Path(inputs)))
    save_tensors(Path(outputs), dict(zip(names, values, strict=True)))


reference = Reference(formats=("onnx",), source=describe_source, compute=compute)
