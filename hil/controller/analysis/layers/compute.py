"""Runs a model with every tensor inside it as an output. Called in the isolated process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.errors import ReferenceFailed


def run(path: str, dims: Mapping[str, int], oracle: str, inputs: str, outputs: str) -> list[str]:
    """Compute all values that depend on the inputs, and save them in the model's order.

    Args:
        path: the ONNX model.
        dims: sizes of symbolic dimensions.
        oracle: ``onnxruntime`` or ``onnx-reference``.
        inputs, outputs: folders, as :mod:`hil.controller.storage.tensor_folder` writes them.

    Returns:
        The names of the model's own outputs, in order.

    Raises:
        ReferenceFailed: the oracle cannot run the model.
    """
    from hil.controller.analysis.layers.prepare import prepared
    from hil.controller.storage.tensor_folder import load_tensors, save_tensors

    model = prepared(Path(path), dims)
    own = [value.name for value in model.graph.output]
    _expose(model)
    compute = _onnxruntime if oracle == "onnxruntime" else _evaluator
    save_tensors(Path(outputs), compute(model, Path(path).parent, load_tensors(Path(inputs))))
    return own


def _expose(model: Any) -> None:
    """Make every value that depends on the inputs, or on chance, an output of the model."""
    import onnx

    from hil.controller.analysis.layers.prepare import draws, reads

    graph = model.graph
    known = {value.name: value for value in graph.value_info}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    runtime = {value.name for value in graph.input} - constants.keys()
    shown = {value.name for value in graph.output}
    for node in graph.node:
        if draws(node, constants) or not runtime.isdisjoint(reads(node)):
            made = [name for name in node.output if name]
            runtime.update(made)
            graph.output.extend(known.get(name) or onnx.ValueInfoProto(name=name) for name in made if name not in shown)


def _onnxruntime(model: Any, folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    import onnxruntime as ort

    from hil.controller.backends.references.onnxruntime import words
    from hil.errors import UsageError
    from hil.formats.ort_values import dtype_of_type, from_ort, to_ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {name: to_ort(array) for name, array in inputs.items()}
    except UsageError as error:
        raise ReferenceFailed(error.message) from error
    except Exception as error:
        raise ReferenceFailed(f"ONNX Runtime cannot load the model: {words(error)}", detail=str(error)) from error
    kinds = {node.name: dtype_of_type(node.type) for node in session.get_outputs()}
    wanted = {name: dtype for name, dtype in kinds.items() if dtype is not None}
    try:
        values = session.run_with_ort_values(list(wanted), feeds)
    except Exception as error:
        raise ReferenceFailed(f"ONNX Runtime failed to run the model: {words(error)}", detail=str(error)) from error
    return {name: from_ort(value, wanted[name]) for name, value in zip(wanted, values, strict=True)}


def _evaluator(model: Any, folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    from onnx.external_data_helper import load_external_data_for_model
    from onnx.reference import ReferenceEvaluator

    from hil.controller.backends.references.onnx_reference import words
    from hil.core.tensors import dtype_name
    from hil.errors import UsageError

    load_external_data_for_model(model, str(folder))
    try:
        evaluator = ReferenceEvaluator(model)
        with np.errstate(all="ignore"):
            values = evaluator.run(None, dict(inputs))
    except Exception as error:
        raise ReferenceFailed(f"onnx's evaluator failed to run the model: {words(error)}") from error
    results: dict[str, Any] = {}
    for name, value in zip(evaluator.output_names, values, strict=True):
        if isinstance(value, (list, dict)) or value is None:
            continue
        array = np.asarray(value)
        try:
            dtype_name(array.dtype)
        except UsageError:  # an optional or a map: no tensor
            continue
        results[name] = array.astype(object) if array.dtype.kind in "US" else array
    return results
