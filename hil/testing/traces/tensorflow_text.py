"""A method in TensorFlow's own dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.models.tensorflow.words import words


def in_tf_dialect(function: Any, name: str, args: Sequence[Any]) -> str:
    """A method as MLIR in TensorFlow's dialect, for people and its own tools.

    Args:
        function: the method.
        name: its name.
        args: what it is called with: arrays or ``tf.TensorSpec``, nested or not.
    """
    import tensorflow as tf

    from hil.controller.models.tensorflow.structure import replace_leaves

    specs = replace_leaves(
        list(args), lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
    )
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    try:
        text: str = tf.mlir.experimental.convert_function(traced.get_concrete_function(*specs))
    except Exception as error:  # it is a by-product: what is wrong is said where the method is lowered
        return f"// {name}: {words(error)}\n"
    return f"// {name}\n{text.strip()}\n"
