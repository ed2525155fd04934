"""Fully connected layers with Keras's own batch normalization (in training), trained by gradient descent."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from common import GradientDescent, Training, fully_connected


class KerasBatchNorm(tf.Module):
    """``keras.layers.BatchNormalization``, called as in training."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__(name=name)
        self.layer = keras.layers.BatchNormalization(momentum=0.9, name=name)
        self.layer.build((None, size))

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """TensorFlow's variables in Keras's."""
        return [variable.value for variable in self.layer.trainable_variables]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The same shape, normalized."""
        return self.layer(x, training=True)


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return fully_connected(random, GradientDescent, KerasBatchNorm)
