"""Keras's SimpleRNNCell in its RNN layer, trained by gradient descent."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from common import CLASSES, SIDE, Dense, GradientDescent, Training
from recurrent import UNITS


class KerasRnn(tf.Module):
    """``keras.layers.RNN`` of a ``SimpleRNNCell``; gives the last output."""

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__(name="rnn")
        seed = int(random.integers(1 << 31))
        cell = keras.layers.SimpleRNNCell(
            UNITS,
            kernel_initializer=keras.initializers.GlorotUniform(seed),
            recurrent_initializer=keras.initializers.Orthogonal(seed=seed),
        )
        self.layer = keras.layers.RNN(cell)
        self.layer.build((None, SIDE, SIDE))

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """TensorFlow's variables in Keras's."""
        return [variable.value for variable in self.layer.trainable_variables]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The output of the last step."""
        return self.layer(x)


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    layers = [KerasRnn(random), Dense(random, UNITS, CLASSES, "logits")]
    return Training(layers, GradientDescent, (SIDE, SIDE))
