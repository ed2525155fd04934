"""Compute references for ONNX models with ONNX Runtime's CPU provider, or with the ONNX project's reference evaluator.

The evaluator uses numpy. It is slow, but independent of all runtimes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.backends.references.runners.cpu_limit import limit_cpu
from hil.controller.backends.references.runners.exact_model import make_exact, needs_rewriting
from hil.controller.storage.screen.texts import convert_foreign_errors, get_first_line
from hil.core.installed import get_version
from hil.core.tensors import Array, get_dtype_name
from hil.errors import ReferenceFailed, UsageError
from hil.formats.onnx_file import load_onnx
from hil.formats.onnx_functions import MAX_INLINED_BYTES, inline_functions
from hil.formats.ort_values import copy_from_ort, make_plain_options, parse_type, to_ort


def describe_runtime() -> str:
    """Return the name and version of the reference."""
    return f"onnxruntime {get_version('onnxruntime')} CPU"


def run_runtime(model: str, given: Mapping[str, Array]) -> dict[str, Array]:
    """Run a model. Runs in an isolated process. Raises ReferenceFailed if ONNX Runtime rejects the model or fails."""
    with convert_foreign_errors(ReferenceFailed, "ONNX Runtime cannot load the model", error_text=format_ort_error):
        session = open_exact_session(Path(model))
    try:
        feeds = {name: to_ort(array) for name, array in given.items()}
    except UsageError as error:  # an unsupported dtype
        raise ReferenceFailed(error.message) from error
    with convert_foreign_errors(ReferenceFailed, "ONNX Runtime failed to run the model", error_text=format_ort_error):
        values = session.run_with_ort_values(None, feeds)
    results: dict[str, Array] = {}
    for node, value in zip(session.get_outputs(), values, strict=True):
        dtype = parse_type(node.type)
        if dtype is None:
            raise ReferenceFailed(f"output {node.name!r} is a {node.type}: hil compares tensors only")
        results[node.name] = copy_from_ort(value, dtype)
    return results


def open_exact_session(path: Path, model: Any = None, *, threads: int = 0) -> Any:
    """Open a session that computes a model as specified, without the optimizer and with exact integer products.

    Args:
        path: The model file. External data is in the same directory.
        model: A ModelProto to use instead of the file. The function modifies this object.
        threads: Number of threads; 0 means a thread per core. Idle threads of a session use CPU time.
    """
    import onnxruntime as ort

    options = make_plain_options()
    options.intra_op_num_threads = threads
    providers = ["CPUExecutionProvider"]
    if model is None and not needs_rewriting(path):
        return ort.InferenceSession(path, options, providers=providers)
    if model is None:
        model = load_onnx(path)
    make_exact(model)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def format_ort_error(error: Exception) -> str:
    """Return an ONNX Runtime error message without the error code and source location."""
    text = str(error).removeprefix("[ONNXRuntimeError] : ").split(" : ", 1)[-1]
    return re.sub(r"/onnxruntime_src/.*\) ", "", text).strip()[:400]


def describe_evaluator() -> str:
    """Return the name and version of the reference."""
    return f"onnx reference evaluator {get_version('onnx')}"


def run_evaluator(model: str, given: Mapping[str, Array], cpu_seconds: float | None = None) -> dict[str, Array]:
    """Run a model. Runs in an isolated process.

    Args:
        cpu_seconds: Limit of CPU time; None is no limit.

    Raises:
        ReferenceFailed: the evaluator rejects the model, or fails.
        ReferenceTooSlow: the model needs more than ``cpu_seconds``.
    """
    import numpy as np

    from hil.controller.models.importers.onnx_data import detach_weights, embed_all

    with convert_foreign_errors(
        ReferenceFailed, "onnx's evaluator cannot load the model", error_text=format_evaluator_error
    ):
        whole = load_onnx(model)
        # The evaluator would copy each weight several times.
        weights = detach_weights(whole, Path(model).parent)
        embed_all(whole, Path(model).parent)
        # Inline functions: the evaluator ignores default attributes of functions, and does not pass attributes to unary
        # operators. ONNX's inliner only supports models that fit into a protobuf message.
        has_attributes = any(function.attribute or function.attribute_proto for function in whole.functions)
        if has_attributes and whole.ByteSize() <= MAX_INLINED_BYTES:
            whole = inline_functions(whole)
        evaluator = make_evaluator(whole)
    with (
        convert_foreign_errors(
            ReferenceFailed, "onnx's evaluator failed to run the model", error_text=format_evaluator_error
        ),
        np.errstate(all="ignore"),
        limit_cpu(cpu_seconds),
    ):
        values = evaluator.run(None, {**weights, **given})
    results: dict[str, Array] = {}
    for name, value in zip(evaluator.output_names, values, strict=True):
        array = np.asarray(value)
        try:
            get_dtype_name(array.dtype)
        except UsageError as error:
            raise ReferenceFailed(f"output {name!r} is not a tensor: {error.message}") from error
        results[name] = array.astype(object) if array.dtype.kind in "US" else array
    return results


def make_evaluator(model: Any) -> Any:
    """Return ONNX's evaluator for a ModelProto, with definitions for quantized operators and attention.

    The function modifies the model: it names omitted outputs. Otherwise, the evaluator would use them as the omitted
    inputs of later nodes.
    """
    from onnx.reference import ReferenceEvaluator

    from hil.controller.backends.references.definitions import old_softmax, operators
    from hil.controller.models.importers.onnx_nodes import list_nodes

    for number, node in enumerate(list_nodes(model)):
        for place, name in enumerate(node.output):
            if not name:
                node.output[place] = f"hil.omitted.{number}.{place}"
    return ReferenceEvaluator(model, new_ops=[*operators.OPERATORS, *old_softmax.OPERATORS])


def format_evaluator_error(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {get_first_line(error)}" if str(error).strip() else type(error).__name__
