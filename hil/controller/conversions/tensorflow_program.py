"""TensorFlow's models made into StableHLO and TFLite. Called in a process of its own."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.tensorflow.lower import lower, named_outputs, words
from hil.controller.tensorflow.program import freeze
from hil.controller.tensorflow.source import Source, open_model
from hil.errors import CompileFailed

# How TensorFlow calls operations that change a variable.
_ASSIGNING = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStridedSliceAssign")


def to_mlir(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as StableHLO, in MLIR's bytecode, its variables as constants.

    Raises:
        UsageError: a dimension is open.
        CompileFailed: the function assigns variables, or uses what XLA has no translation for.
    """
    source = open_model(path, function, dims)

    def flat(*tensors: object) -> object:
        return source.call(list(tensors))

    live = lower(flat, source.sized())
    Path(output).write_bytes(freeze(live.function, live.values(), function))


def to_tflite(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as TFLite; dimensions may stay open.

    Raises:
        CompileFailed: TFLite has no such operators.
    """
    Path(output).write_bytes(tflite_of(open_model(path, function, dims)))


def tflite_of(source: Source) -> bytes:
    """A function as a TFLite file with one signature, of the function's name.

    Raises:
        CompileFailed: TFLite has no such operators.
    """
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    # TFLite sorts by name what a signature takes and gives: numbers keep our order.
    specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input{number:03}") for number, spec in enumerate(source.specs)]

    def flat(*tensors: object) -> dict[str, object]:
        results = named_outputs(source.call(list(tensors)))
        return {f"output{number:03}": tf.identity(leaf) for number, (_, leaf) in enumerate(results)}

    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
        holder = tf.Module()
        if _assigns(concrete):
            holder.model = source.model
        else:
            # The converter leaves some variables that never change without a value.
            concrete = convert_variables_to_constants_v2(concrete)
        with tempfile.TemporaryDirectory(prefix="hil-tflite-") as folder:
            tf.saved_model.save(holder, folder, {source.name: concrete})
            return bytes(tf.lite.TFLiteConverter.from_saved_model(folder, [source.name]).convert())
    except Exception as error:  # of TensorFlow's, and the converter's own
        raise CompileFailed(f"TFLite cannot take the model: {words(error)}", detail=str(error)) from error


def _assigns(concrete: Any) -> bool:
    """Whether a function changes a variable, itself or in a function that it calls."""
    graph = concrete.graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return any(node.op.startswith(_ASSIGNING) for node in nodes)
