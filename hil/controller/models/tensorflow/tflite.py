"""TensorFlow functions made into TFLite, by TensorFlow's own converter."""

from __future__ import annotations

from typing import Any

from hil.controller.models.tensorflow.words import converter_words
from hil.core.scratch import temporary_folder
from hil.errors import CompileFailed


def convert(concrete: Any, name: str) -> bytes:
    """A TFLite file with one signature, its variables as constants.

    Args:
        concrete: the function, which assigns none; what it takes and returns has names, by which TFLite sorts it.
        name: of the signature.

    Raises:
        CompileFailed: TFLite has no such operators.
    """
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    try:
        # The converter leaves some variables that never change without a value.
        concrete = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
        with temporary_folder("hil-tflite-") as folder:
            # By way of a file: the converter is to drop its way without one.
            tf.saved_model.save(tf.Module(), folder, {name: concrete})
            return bytes(tf.lite.TFLiteConverter.from_saved_model(folder, [name]).convert())
    except Exception as error:  # of TensorFlow's, and the converter's own
        raise CompileFailed(f"TFLite cannot take {name}: {converter_words(error)}", detail=str(error)) from error
