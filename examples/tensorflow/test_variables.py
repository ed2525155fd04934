"""Modules with state: what one call leaves behind the next one finds; and training steps."""

import numpy as np
import tensorflow as tf

from hil.testing import TracedModuleTestCase, compile_module, main, uniform

IMAGES, LABELS = tf.TensorSpec([8, 6]), tf.TensorSpec([8], tf.int32)


class Counter(tf.Module):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0, name="count")
        self.seen = tf.Variable(tf.zeros([3]), name="seen")

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def add(self, x):
        self.count.assign_add(1)
        self.seen.assign_add(x)
        return {"count": self.count.read_value(), "mean": self.seen / tf.cast(self.count, tf.float32)}

    @tf.function(input_signature=[])
    def reset(self):
        self.count.assign(0)
        self.seen.assign(tf.zeros([3]))

    @tf.function(input_signature=[])
    def value(self):
        return self.count.read_value(), self.seen.read_value()


@compile_module(Counter)
class CounterTest(TracedModuleTestCase):
    def test_count(self):
        def count(module):
            for _ in range(3):
                module.add(uniform([3]))
            module.value()

        self.compare_backends(count)

    def test_reset(self):
        def reset(module):
            module.add(uniform([3]))
            module.reset()
            module.value()

        self.compare_backends(reset)


class Perceptron(tf.Module):
    """Two layers, cross entropy, and gradient descent with momentum."""

    def __init__(self):
        super().__init__()
        self.weights = [tf.Variable(tf.random.normal([6, 5]) / 3), tf.Variable(tf.random.normal([5, 4]) / 3)]
        self.biases = [tf.Variable(tf.zeros([5])), tf.Variable(tf.zeros([4]))]
        self.speeds = [tf.Variable(tf.zeros_like(one)) for one in (*self.weights, *self.biases)]

    def logits(self, images):
        hidden = tf.nn.relu(images @ self.weights[0] + self.biases[0])
        return hidden @ self.weights[1] + self.biases[1]

    @tf.function(input_signature=[IMAGES])
    def predict(self, images):
        return tf.nn.softmax(self.logits(images))

    @tf.function(input_signature=[IMAGES, LABELS])
    def train_step(self, images, labels):
        variables = [*self.weights, *self.biases]
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.logits(images))
            loss = tf.reduce_mean(losses)
        for variable, speed, gradient in zip(variables, self.speeds, tape.gradient(loss, variables), strict=True):
            speed.assign(0.9 * speed - 0.1 * gradient)
            variable.assign_add(speed)
        return loss


@compile_module(Perceptron)
class PerceptronTest(TracedModuleTestCase):
    def test_predict(self):
        def predict(module):
            module.predict(uniform([8, 6]))

        self.compare_backends(predict)

    def test_train(self):
        def train(module):
            images, labels = uniform([8, 6]), np.arange(8, dtype=np.int32) % 4
            losses = [module.train_step(images, labels, atol=1e-4) for _ in range(5)]
            module.predict(images, atol=1e-4)
            assert losses[-1] < losses[0]

        self.compare_backends(train)


class KerasTraining(tf.Module):
    """A Keras model, its optimiser and batch normalisation, all of it state."""

    def __init__(self):
        super().__init__()
        layers = tf.keras.layers
        # No bias before the normalisation: its gradient is 0 but for rounding, of which Adam makes whole steps.
        hidden = [layers.Dense(8, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        self.model = tf.keras.Sequential([tf.keras.Input([6]), *hidden, layers.Dense(4)])
        self.optimizer = tf.keras.optimizers.Adam(0.05)
        self.optimizer.build(self.model.trainable_variables)

    @tf.function(input_signature=[IMAGES, LABELS])
    def train_step(self, images, labels):
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


@compile_module(KerasTraining)
class KerasTrainingTest(TracedModuleTestCase):
    def test_adam(self):
        def adam(module):
            images, labels = uniform([8, 6]), np.arange(8, dtype=np.int32) % 4
            losses = [module.train_step(images, labels, rtol=1e-3, atol=1e-3) for _ in range(4)]
            assert losses[-1] < losses[0]

        self.compare_backends(adam)


if __name__ == "__main__":
    main()
