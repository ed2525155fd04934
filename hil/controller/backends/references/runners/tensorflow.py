"""Compute a reference with TensorFlow without XLA, in an isolated process."""

from __future__ import annotations

from collections.abc import Mapping

from hil.controller.models.tensorflow.graphs import error_text, new_value
from hil.controller.models.tensorflow.source import array_of, named_outputs, open_model
from hil.controller.storage.packages import needed_version
from hil.controller.storage.screen.texts import foreign_errors
from hil.core.tensors import Array
from hil.errors import ReferenceFailed


def source() -> str:
    """Return the name and version of the reference."""
    return f"tensorflow {needed_version('tensorflow', 'tensorflow')}"


def run(model: str, given: Mapping[str, Array], function: str, dims: Mapping[str, int]) -> dict[str, Array]:
    """Run a model. Runs in an isolated process. Raises ReferenceFailed if TensorFlow cannot run the model."""
    import tensorflow as tf

    opened = open_model(model, function, dims)
    assigned = opened.assigned
    tensors = [tf.constant(array, spec.dtype) for array, spec in zip(given.values(), opened.specs, strict=True)]
    with foreign_errors(ReferenceFailed, "TensorFlow failed to run the model", error_text=error_text):
        returned = opened.call(tensors)
    names = getattr(opened.model, "output_names", ())
    results = {name: array_of(tf.convert_to_tensor(leaf)) for name, leaf in named_outputs(returned, names)}
    return results | {new_value(name): array_of(variable.read_value()) for name, variable in assigned.items()}
