"""TensorFlow functions made into TFLite, by TensorFlow's own converter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from hil.controller.tensorflow.words import converter_words
from hil.errors import CompileFailed

# How TensorFlow calls operations that change a variable.
_ASSIGNING = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStridedSliceAssign")


def assignments(concrete: Any) -> Iterator[str]:
    """The operations of a concrete function, and of the functions that it calls, that change a variable."""
    graph = concrete.graph.as_graph_def()
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        yield from (node.op for node in nodes if node.op.startswith(_ASSIGNING))


def convert(concrete: Any, name: str, model: Any = None) -> bytes:
    """A TFLite file with one signature; variables that never change become constants.

    Args:
        concrete: the function; what it takes and returns has names, by which TFLite sorts it.
        name: of the signature.
        model: what holds the variables, of a function that assigns some.

    Raises:
        CompileFailed: TFLite has no such operators.
    """
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    try:
        holder = tf.Module()
        if any(assignments(concrete)):
            holder.model = model
        else:
            # The converter leaves some variables that never change without a value.
            concrete = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
        with tempfile.TemporaryDirectory(prefix="hil-tflite-") as folder:
            # By way of a file: the converter is to drop its way without one.
            tf.saved_model.save(holder, folder, {name: concrete})
            return bytes(tf.lite.TFLiteConverter.from_saved_model(folder, [name]).convert())
    except Exception as error:  # of TensorFlow's, and the converter's own
        raise CompileFailed(f"TFLite cannot take {name}: {converter_words(error)}", detail=str(error)) from error
