"""ONNX Runtime's CPU provider, at its default optimisation level."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import version
from hil.core.results import Model


def source() -> str:
    """Who speaks."""
    return f"onnxruntime {version('onnxruntime')} CPU"


def compute(
    model: Model,
    inputs: Path,
    outputs: Path,
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    timeout: float | None,
    log: Path,
) -> None:
    """Run the model in an isolated process."""
    isolated.call(
        run,
        {"model": str(model.path.absolute()), "inputs": str(inputs), "outputs": str(outputs)},
        timeout=timeout,
        log=log,
    )


def run(model: str, inputs: str, outputs: str) -> None:
    """Run a model on the tensors of one folder, into another; called in the isolated process.

    Raises:
        ReferenceFailed: ONNX Runtime refuses the model, has no CPU kernel for an operator with these dtypes, or fails.
    """
    import onnxruntime as ort

    from hil.controller.storage.tensor_files import load_tensors, save_tensors
    from hil.errors import ReferenceFailed, UsageError
    from hil.formats.ort_values import dtype_of_type, from_ort, to_ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {name: to_ort(array) for name, array in load_tensors(Path(inputs)).items()}
    except UsageError as error:
        raise ReferenceFailed(error.message) from error
    except Exception as error:
        raise ReferenceFailed(f"ONNX Runtime cannot load the model: {words(error)}", detail=str(error)) from error
    try:
        values = session.run_with_ort_values(None, feeds)
    except Exception as error:
        raise ReferenceFailed(f"ONNX Runtime failed to run the model: {words(error)}", detail=str(error)) from error
    results: dict[str, Any] = {}
    for node, value in zip(session.get_outputs(), values, strict=True):
        dtype = dtype_of_type(node.type)
        if dtype is None:
            raise ReferenceFailed(f"output {node.name!r} is a {node.type}: hil compares tensors only")
        results[node.name] = from_ort(value, dtype)
    save_tensors(Path(outputs), results)


def words(error: Exception) -> str:
    """What ONNX Runtime says, without its error code's number and the place in its source."""
    text = str(error).removeprefix("[ONNXRuntimeError] : ").split(" : ", 1)[-1]
    return re.sub(r"/onnxruntime_src/.*\) ", "", text).strip()[:400]
