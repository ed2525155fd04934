"""Compute a reference with TensorFlow without XLA, in an isolated process."""

from __future__ import annotations

from collections.abc import Mapping

from hil.controller.models.tensorflow.graphs import format_error, name_new_value
from hil.controller.models.tensorflow.source import name_outputs, open_model, read_array
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.controller.storage.sources.packages import require_version
from hil.core.tensors import Array
from hil.errors import ReferenceFailed


def describe_source() -> str:
    """Return the name and version of the reference."""
    return f"tensorflow {require_version('tensorflow', 'tensorflow')}"


def run(model: str, given: Mapping[str, Array], function: str, dims: Mapping[str, int]) -> dict[str, Array]:
    """Run a model. Runs in an isolated process. Raises ReferenceFailed if TensorFlow cannot run the model."""
    import tensorflow as tf

    opened = open_model(model, function, dims)
    assigned = opened.assigned
    tensors = [tf.constant(array, spec.dtype) for array, spec in zip(given.values(), opened.specs, strict=True)]
    with convert_foreign_errors(ReferenceFailed, "TensorFlow failed to run the model", error_text=format_error):
        returned = opened.call(tensors)
    names = getattr(opened.model, "output_names", ())
    results = {name: read_array(tf.convert_to_tensor(leaf)) for name, leaf in name_outputs(returned, names)}
    return results | {name_new_value(name): read_array(variable.read_value()) for name, variable in assigned.items()}
