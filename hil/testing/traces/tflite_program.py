"""A TensorFlow method as a TFLite program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.lower import spec_of
from hil.controller.models.tensorflow.structure import Structure, leaves, numbered, replace_leaves, restore
from hil.controller.models.tensorflow.tflite import convert
from hil.controller.models.tensorflow.variables import assigned
from hil.controller.models.tensorflow.words import words
from hil.controller.pipeline.case import Workshop
from hil.controller.storage.runs import write_file
from hil.core.artifacts import Artifact
from hil.core.results import Stage
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed
from hil.testing.traces.runners import Inputs
from hil.testing.traces.target import Target
from hil.testing.traces.tensorflow_text import in_tf_dialect


@dataclass(frozen=True)
class TfLiteProgram:
    """A method as a TFLite program.

    Attributes:
        artifact: the program.
        outputs: the tensors that it returns.
        structure: of what the method returns, see :func:`hil.controller.models.tensorflow.structure.numbered`.
    """

    artifact: Artifact
    outputs: tuple[TensorSpec, ...]
    structure: Structure

    def returned(self, outputs: list[Any]) -> Structure:
        """Outputs as the method itself returns them."""
        return restore(self.structure, outputs)


def make_tflite(function: Any, inputs: Inputs, place: Path, target: Target, shop: Workshop) -> TfLiteProgram:
    """Convert a method for the dtypes and shapes of some inputs; variables that it reads become constants.

    Args:
        function: the method.
        inputs: what it is called with.
        place: the file to write.
        target: the board that it is for.
        shop: the cache and the isolated processes.

    Raises:
        CompileFailed: TensorFlow cannot trace it, it assigns variables, or the converter refuses it.
    """
    import tensorflow as tf

    returned: list[Any] = []

    def flat(*tensors: Any) -> dict[str, Any]:
        given = iter(tensors)
        args = replace_leaves(list(inputs), lambda leaf: next(given) if hasattr(leaf, "dtype") else leaf)
        returned[:] = [function(*args)]
        present = (leaf for _, leaf in leaves(returned[0]) if leaf is not None)
        return {f"output_{number:04}": tf.identity(leaf) for number, leaf in enumerate(present)}

    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype if leaf.dtype != object else tf.string, name=f"input_{number:04}")
        for number, leaf in enumerate(leaf for _, leaf in leaves(inputs) if hasattr(leaf, "dtype"))
    ]
    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # whatever the method itself raises
        raise CompileFailed(
            f"TensorFlow cannot trace the method: {words(error)}", stage=Stage.COMPILE.value, detail=str(error)
        ) from error
    if names := ", ".join(assigned(concrete)):
        raise CompileFailed(
            f"the method changes variables ({names}), which a TFLite program cannot hand back",
            stage=Stage.COMPILE.value,
            hint="run it on IREE; for tflite list it in expected.toml",
        )
    try:
        content = convert(concrete, place.stem)
    except CompileFailed as error:
        kept = place.with_suffix(".mlir")
        write_file(kept, in_tf_dialect(function, place.stem, inputs).encode(), option="", make_folder=True)
        error.hint = f"what it was given is in {kept}"
        error.located(stage=Stage.COMPILE.value)
        raise
    write_file(place, content, option="", make_folder=True)
    model = import_model(place, isolated=shop.isolated, cache=shop.cache)
    artifact = target.compile(model, place)
    outputs = concrete.structured_outputs
    return TfLiteProgram(
        artifact, tuple(spec_of(name, outputs[name]) for name in sorted(outputs)), numbered(returned[0])
    )
