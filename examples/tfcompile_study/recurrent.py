"""What the recurrent experiments share: a plain RNN cell, and the layer that takes its last output."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from common import BATCH, CLASSES, SIDE, Dense, GradientDescent, Training, glorot

UNITS = 16


class BasicRNNCell(tf.Module):
    """``tf.nn.rnn_cell.BasicRNNCell`` as it was, which came with Keras 2: tanh of a product and a bias."""

    state_size = UNITS
    output_size = UNITS

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__(name="basic_rnn_cell")
        with self.name_scope:
            self.kernel = tf.Variable(glorot(random, (SIDE + UNITS, UNITS)), name="kernel")
            self.bias = tf.Variable(tf.zeros(UNITS), name="bias")

    def zero_state(self, batch: int, dtype: tf.DType) -> tf.Tensor:
        """What the first step is given."""
        return tf.zeros((batch, UNITS), dtype)

    def __call__(self, x: tf.Tensor, state: tf.Tensor, scope: object = None) -> tuple[tf.Tensor, tf.Tensor]:
        """One step: its output, which is the new state as well."""
        state = tf.tanh(tf.concat([x, state], 1) @ self.kernel + self.bias)
        return state, state


class DynamicRnn(tf.Module):
    """``tf.nn.dynamic_rnn``: a while loop over the steps; gives the state after the last one."""

    def __init__(self, cell: BasicRNNCell) -> None:
        super().__init__(name="dynamic_rnn")
        self.cell = cell

    def __call__(self, x: tf.Tensor, lengths: tf.Tensor | None = None) -> tf.Tensor:
        """The state after the last step."""
        start = self.cell.zero_state(BATCH, x.dtype)
        return tf.compat.v1.nn.dynamic_rnn(self.cell, x, sequence_length=lengths, initial_state=start)[1]


def recurrent(random: np.random.Generator, *, lengths: bool) -> Training:
    """8 steps of 8 features through a cell, then 10 classes."""
    layers = [DynamicRnn(BasicRNNCell(random)), Dense(random, UNITS, CLASSES, "logits")]
    return Training(layers, GradientDescent, (SIDE, SIDE), lengths)
