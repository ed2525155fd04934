"""The ONNX project's own reference evaluator: numpy, slow, and independent of every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import version
from hil.core.results import Model


def source() -> str:
    """Who speaks."""
    return f"onnx reference evaluator {version('onnx')}"


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
        ReferenceFailed: the evaluator refuses the model, does not implement an operator, or fails.
    """
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    from hil.controller.storage.tensor_files import load_tensors, save_tensors
    from hil.core.tensors import dtype_name
    from hil.errors import ReferenceFailed, UsageError

    try:
        evaluator = ReferenceEvaluator(onnx.load(model))
    except Exception as error:
        raise ReferenceFailed(f"onnx's evaluator cannot load the model: {words(error)}") from error
    try:
        with np.errstate(all="ignore"):
            values = evaluator.run(None, load_tensors(Path(inputs)))
    except Exception as error:
        raise ReferenceFailed(f"onnx's evaluator failed to run the model: {words(error)}") from error
    results: dict[str, Any] = {}
    for name, value in zip(evaluator.output_names, values, strict=True):
        array = np.asarray(value)
        try:
            dtype_name(array.dtype)
        except UsageError as error:
            raise ReferenceFailed(f"output {name!r} is no tensor: {error.message}") from error
        results[name] = array.astype(object) if array.dtype.kind in "US" else array
    save_tensors(Path(outputs), results)


def words(error: Exception) -> str:
    """The kind of an error and the first line of what the evaluator says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
