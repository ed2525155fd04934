"""TensorFlow itself, without XLA, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from hil.controller.models.tensorflow.graphs import new_value, words
from hil.controller.models.tensorflow.source import array_of, named_outputs, open_model
from hil.controller.storage.packages import needed_version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.errors import ReferenceFailed


def source() -> str:
    """Who speaks."""
    return f"tensorflow {needed_version('tensorflow', 'tensorflow')}"


def run(model: str, function: str, dims: dict[str, int], inputs: str, outputs: str) -> None:
    """Run a model on the tensors of one folder, into another; called in the isolated process.

    Raises:
        ReferenceFailed: TensorFlow cannot run it.
    """
    import tensorflow as tf

    opened = open_model(model, function, dims)
    assigned = opened.assigned
    arrays = load_tensors(Path(inputs)).values()
    tensors = [tf.constant(array, spec.dtype) for array, spec in zip(arrays, opened.specs, strict=True)]
    try:
        returned = opened.call(tensors)
    except Exception as error:
        raise ReferenceFailed(f"TensorFlow failed to run the model: {words(error)}", detail=str(error)) from error
    names = getattr(opened.model, "output_names", ())
    results = {name: array_of(tf.convert_to_tensor(leaf)) for name, leaf in named_outputs(returned, names)}
    state = {new_value(name): array_of(variable.read_value()) for name, variable in assigned.items()}
    save_tensors(Path(outputs), results | state)
