"""TensorFlow modules for tests of traces. Tests that import them are skipped without TensorFlow."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")


class Empty(tf.Module):
    """Module without methods."""


class Edges(tf.Module):
    """Methods without a signature, whose outputs depend on the structure of their inputs."""

    @tf.function
    def none_of(self, x):
        return x[:0]

    @tf.function
    def reshaped(self, x, rows):
        return tf.reshape(x, tf.stack([rows, 2]))


class Counter(tf.Module):
    """Module that stores a count, and returns it in every kind of structure."""

    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0.0, name="count")

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def add(self, by):
        self.count.assign_add(by)
        now = self.count.read_value()
        return {"now": now, "parts": [now * 2, (now, tf.cast(now, tf.int32))]}

    @tf.function(input_signature=[])
    def get(self):
        return self.count.read_value()


class Register(tf.Module):
    """Methods that return nothing and only assign variables."""

    def __init__(self):
        super().__init__()
        self.held = tf.Variable(tf.zeros([4]), name="held")

    @tf.function(input_signature=[tf.TensorSpec([4], tf.float32)])
    def hold(self, x):
        self.held.assign(x)

    @tf.function(input_signature=[])
    def clear(self):
        self.held.assign(tf.zeros([4]))


class Global(tf.Module):
    """Methods that assign a variable which is older than the module. TensorFlow can trace only one of them."""

    older = tf.Variable(1.0, name="older")

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def put(self, x):
        Global.older.assign(x)

    def put_in_python(self, x):
        Global.older.assign(x)


class Classifier(tf.Module):
    """A training step on random weights."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.random.normal([4, 3]), name="weights")
        self.bias = tf.Variable(tf.zeros([3]), name="bias")

    @tf.function(input_signature=[{"x": tf.TensorSpec([8, 4], tf.float32), "y": tf.TensorSpec([8], tf.int32)}])
    def train(self, batch):
        with tf.GradientTape() as tape:
            logits = tf.matmul(batch["x"], self.weights) + self.bias
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["y"], logits=logits)
            loss = tf.reduce_mean(losses)
        variables = [self.weights, self.bias]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss, logits


class ByHandles(tf.Module):
    """Training step with an optimizer of TensorFlow 1, which refers to the variables only by their handles."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.random.normal([4, 3]), name="weights")
        self.optimizer = tf.compat.v1.train.AdamOptimizer(0.01)

    @tf.function(input_signature=[tf.TensorSpec([8, 4])])
    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, self.weights) ** 2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.weights), self.weights)])
        return loss


class Scaled(tf.Module):
    """Weights that no method assigns, and variables that methods with and without a signature assign."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.random.normal([4, 3]), name="weights")
        self.offset = tf.Variable(tf.zeros([3]), name="offset")
        self.bias = tf.Variable(tf.zeros([3]), name="bias")
        self.scale = tf.random.uniform([3])

    @tf.function(input_signature=[tf.TensorSpec([2, 4])])
    def predict(self, x):
        return (x @ self.weights + self.bias) * self.scale + self.offset

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def move(self, by):
        self.offset.assign_add(by)

    @tf.function
    def learn(self, x):
        self.bias.assign_add(tf.reduce_sum(x) * self.scale)


class Large(tf.Module):
    """One megabyte of weights, which two methods use."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.random.normal([512, 513]), name="weights")

    @tf.function(input_signature=[tf.TensorSpec([1, 512])])
    def large(self, x):
        return x @ self.weights

    @tf.function(input_signature=[tf.TensorSpec([1, 512])])
    def larger(self, x):
        return x @ self.weights * 2.0


class Recurrent(tf.Module):
    """Keras layers, trained by an optimizer of Keras."""

    def __init__(self):
        super().__init__()
        layers = tf.keras.layers
        self.model = tf.keras.Sequential([tf.keras.Input([6, 4]), layers.LSTM(5, return_sequences=True), layers.GRU(3)])
        self.optimizer = tf.keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        self.predict = tf.function(input_signature=[tf.TensorSpec([2, 6, 4])])(lambda x: self.model(x, training=False))

    @tf.function(input_signature=[tf.TensorSpec([2, 6, 4])])
    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(x, training=True) ** 2)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


class Sums(tf.Module):
    """Methods without a signature, and with dtypes other than float32."""

    def __init__(self):
        super().__init__()
        self.table = tf.random.uniform([5])

    @tf.function
    def total(self, values):
        return tf.reduce_sum(values) + tf.reduce_sum(self.table)

    @tf.function
    def joined(self, left, right):
        return tf.matmul(left, right)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.uint8), tf.TensorSpec([2], tf.bool)])
    def kinds(self, small, flags):
        return small + tf.cast(flags, tf.uint8), tf.logical_not(flags)


class Refused(tf.Module):
    """One method that IREE's compiler rejects, and one method that it accepts."""

    @tf.function(input_signature=[tf.TensorSpec([3, 3], tf.float32)])
    def factor(self, matrix):
        return tf.linalg.qr(matrix)

    @tf.function(input_signature=[tf.TensorSpec([3, 3], tf.float32)])
    def double(self, matrix):
        return matrix * 2
