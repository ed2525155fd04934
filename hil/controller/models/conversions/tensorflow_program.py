"""TensorFlow's models made into StableHLO and TFLite. Called in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.models.tensorflow.lower import lower, named_outputs
from hil.controller.models.tensorflow.program import freeze
from hil.controller.models.tensorflow.source import Source, open_model
from hil.controller.models.tensorflow.tflite import convert
from hil.controller.models.tensorflow.words import words
from hil.errors import CompileFailed


def to_mlir(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as StableHLO, in MLIR's bytecode: every call finds its variables as they were saved.

    It returns the new values of those that it assigns after its outputs.

    Raises:
        UsageError: a dimension is open.
        CompileFailed: the function uses what XLA has no translation for.
    """
    source = open_model(path, function, dims)

    def flat(*tensors: object) -> object:
        return source.call(list(tensors))

    live = lower(flat, source.sized())
    Path(output).write_bytes(freeze(live.function, live.values(), function, list(source.assigned)))


def to_tflite(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as TFLite; dimensions may stay open.

    Raises:
        CompileFailed: TFLite has no such operators.
    """
    Path(output).write_bytes(tflite_of(open_model(path, function, dims)))


def tflite_of(source: Source) -> bytes:
    """A function as a TFLite file with one signature, of the function's name.

    Raises:
        CompileFailed: it assigns variables, or TFLite has no such operators.
    """
    import tensorflow as tf

    if source.assigned:
        raise CompileFailed(
            f"the function assigns variables ({', '.join(list(source.assigned)[:4])}), whose new values a TFLite "
            "program does not show",
            hint="the runtimes iree and xla-aot return them",
        )
    # TFLite sorts by name what a signature takes and gives: numbers keep our order.
    specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input{number:03}") for number, spec in enumerate(source.specs)]

    def flat(*tensors: object) -> dict[str, object]:
        results = named_outputs(source.call(list(tensors)))
        return {f"output{number:03}": tf.identity(leaf) for number, (_, leaf) in enumerate(results)}

    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # whatever the function itself raises
        raise CompileFailed(f"TensorFlow cannot trace {source.name}: {words(error)}", detail=str(error)) from error
    return convert(concrete, source.name)
