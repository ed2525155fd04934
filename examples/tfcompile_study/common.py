"""What the experiments share: layers, optimizers, data and the training step itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

CLASSES = 10
BATCH = 16
# Images of handwriting's size, small: 8x8 pixels, which an RNN reads as 8 steps of 8 features.
SIDE = 8


class Dense(tf.Module):
    """A fully connected layer; one that is normalized needs no bias."""

    def __init__(self, random: np.random.Generator, inputs: int, outputs: int, name: str, bias: bool = True) -> None:
        super().__init__(name=name)
        with self.name_scope:
            self.kernel = tf.Variable(glorot(random, (inputs, outputs)), name="kernel")
            self.bias = tf.Variable(tf.zeros(outputs), name="bias") if bias else None

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The products, and the bias."""
        product = x @ self.kernel
        return product if self.bias is None else product + self.bias


class Conv(tf.Module):
    """A 3x3 convolution, padded to the same size; one that is normalized needs no bias."""

    def __init__(self, random: np.random.Generator, inputs: int, outputs: int, name: str, bias: bool = True) -> None:
        super().__init__(name=name)
        with self.name_scope:
            self.kernel = tf.Variable(glorot(random, (3, 3, inputs, outputs)), name="kernel")
            self.bias = tf.Variable(tf.zeros(outputs), name="bias") if bias else None

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The convolution, and the bias."""
        product = tf.nn.conv2d(x, self.kernel, strides=1, padding="SAME")
        return product if self.bias is None else product + self.bias


class BatchNorm(tf.Module):
    """Batch normalization over the last axis, as ``tf.layers.batch_normalization(training=...)`` was.

    In training it normalizes by the batch and keeps moving averages; otherwise it normalizes by those and leaves them.
    """

    def __init__(self, channels: int, name: str, training: bool, momentum: float = 0.9) -> None:
        super().__init__(name=name)
        self._training, self._momentum = training, momentum
        with self.name_scope:
            self.gamma = tf.Variable(tf.ones(channels), name="gamma")
            self.beta = tf.Variable(tf.zeros(channels), name="beta")
            self.moving_mean = tf.Variable(tf.zeros(channels), trainable=False, name="moving_mean")
            self.moving_variance = tf.Variable(tf.ones(channels), trainable=False, name="moving_variance")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The same shape, normalized."""
        if x.shape.rank == 4:  # the fused kernel is for images
            moving = {} if self._training else {"mean": self.moving_mean, "variance": self.moving_variance}
            normal, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                x, self.gamma, self.beta, **moving, epsilon=1e-3, is_training=self._training
            )
        else:
            mean, variance = tf.nn.moments(x, [0]) if self._training else (self.moving_mean, self.moving_variance)
            normal = tf.nn.batch_normalization(x, mean, variance, self.beta, self.gamma, 1e-3)
        if self._training:
            for moved, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                moved.assign_sub((moved - value) * (1 - self._momentum))
        return normal


class GradientDescent(tf.Module):
    """What ``GradientDescentOptimizer`` did, by the same kernel."""

    def __init__(self, variables: list[tf.Variable], rate: float = 0.1) -> None:
        super().__init__(name="sgd")
        self._variables, self._rate = variables, rate

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Change the variables."""
        for variable, gradient in zip(self._variables, gradients, strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=self._rate, delta=gradient)


class Adam(tf.Module):
    """What ``AdamOptimizer`` did, step for step."""

    def __init__(self, variables: list[tf.Variable], rate: float = 0.01) -> None:
        super().__init__(name="adam")
        self._variables, self._rate, self._betas = variables, rate, (0.9, 0.999)
        with self.name_scope:
            self.powers = [tf.Variable(beta, name=f"beta{i}_power") for i, beta in enumerate(self._betas, 1)]
            self.slots = [
                tuple(tf.Variable(tf.zeros_like(variable), name=f"{path_of(variable)}/{slot}") for slot in ("m", "v"))
                for variable in variables
            ]

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Change the variables."""
        first, second = self._betas
        rate = self._rate * tf.sqrt(1 - self.powers[1]) / (1 - self.powers[0])
        for variable, (m, v), gradient in zip(self._variables, self.slots, gradients, strict=True):
            m.assign(first * m + (1 - first) * gradient)
            v.assign(second * v + (1 - second) * gradient * gradient)
            variable.assign_sub(rate * m / (tf.sqrt(v) + 1e-8))
        for power, beta in zip(self.powers, self._betas, strict=True):
            power.assign(power * beta)


class AdamV1(tf.Module):
    """``AdamOptimizer`` itself, as TensorFlow still has it: it reaches its variables through their handles alone."""

    def __init__(self, variables: list[tf.Variable], rate: float = 0.01) -> None:
        super().__init__(name="adam")
        self._variables = variables
        optimizer = tf.compat.v1.train.AdamOptimizer(rate)
        # What it would make in the first step, which cannot make variables once it is a graph: powers and slots.
        optimizer._create_slots(variables)
        # No SavedModel brings back the optimizer itself: it is kept out of it, and its variables are ours.
        self.state = optimizer.variables()
        self._apply = optimizer.apply_gradients

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Change the variables."""
        self._apply(zip(gradients, self._variables, strict=True))


class Training(tf.Module):
    """A model in training.

    Args:
        layers: the model, logits at the end; layers hold the variables.
        optimizer: made of the trainable variables.
        shape: of one input.
        lengths: whether the model is also given how long each sequence is.
    """

    def __init__(
        self,
        layers: list[Callable[..., tf.Tensor]],
        optimizer: Callable[[list[tf.Variable]], tf.Module],
        shape: tuple[int, ...],
        lengths: bool = False,
    ) -> None:
        super().__init__(name="training")
        self.layers = layers
        parts = [layer for layer in layers if hasattr(layer, "trainable_variables")]
        self.trainable = [variable for part in parts for variable in part.trainable_variables]
        self.optimizer = optimizer(self.trainable)
        self._shape, self._lengths = shape, lengths
        specs = {"x": tf.TensorSpec((BATCH, *shape), tf.float32, name="x")}
        if lengths:
            specs["lengths"] = tf.TensorSpec((BATCH,), tf.int32, name="lengths")
        specs["labels"] = tf.TensorSpec((BATCH,), tf.int32, name="labels")
        # What one call of the program does; its signature is the program's.
        self.step = tf.function(self._step, input_signature=list(specs.values()))

    def _step(self, x: tf.Tensor, *rest: tf.Tensor) -> dict[str, tf.Tensor]:
        *lengths, labels = rest
        with tf.GradientTape() as tape:
            for position, layer in enumerate(self.layers):
                x = layer(x, *lengths) if position == 0 else layer(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x)
            loss = tf.reduce_mean(losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable))
        return {"loss": loss}

    def batches(self, random: np.random.Generator) -> Iterator[list[np.ndarray]]:
        """The arguments of one call of ``step`` after another: classes that differ in their mean, and noise."""
        means = random.normal(size=(CLASSES, *self._shape))
        while True:
            labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
            x = (means[labels] + 0.5 * random.normal(size=(BATCH, *self._shape))).astype(np.float32)
            lengths = [random.integers(1, self._shape[0] + 1, BATCH).astype(np.int32)] if self._lengths else []
            yield [x, *lengths, labels]


def fully_connected(
    random: np.random.Generator,
    optimizer: Callable[[list[tf.Variable]], tf.Module],
    norm: Callable[[int, str], Callable[..., tf.Tensor]] | None = None,
) -> Training:
    """64 pixels, two hidden layers, 10 classes; with ``norm`` a normalization after each hidden layer."""
    layers: list[Callable[..., tf.Tensor]] = []
    sizes = (SIDE * SIDE, 32, 16)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers.append(Dense(random, inputs, outputs, f"fc{number}", bias=norm is None))
        layers += [norm(outputs, f"norm{number}")] if norm else []
        layers.append(tf.nn.relu)
    return Training([*layers, Dense(random, sizes[-1], CLASSES, "logits")], optimizer, (SIDE * SIDE,))


def convolutional(
    random: np.random.Generator,
    optimizer: Callable[[list[tf.Variable]], tf.Module],
    norm: Callable[[int, str], Callable[..., tf.Tensor]] | None = None,
) -> Training:
    """Two convolutions with pooling, one hidden layer, 10 classes; with ``norm`` a normalization after each of them."""
    layers: list[Callable[..., tf.Tensor]] = []
    sizes = (1, 8, 16)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers.append(Conv(random, inputs, outputs, f"conv{number}", bias=norm is None))
        layers += [norm(outputs, f"conv_norm{number}")] if norm else []
        layers += [tf.nn.relu, pool]
    layers += [flatten, Dense(random, sizes[-1] * (SIDE // 4) ** 2, 32, "fc1", bias=norm is None)]
    layers += [norm(32, "fc_norm1")] if norm else []
    layers += [tf.nn.relu, Dense(random, 32, CLASSES, "logits")]
    return Training(layers, optimizer, (SIDE, SIDE, 1))


def pool(x: tf.Tensor) -> tf.Tensor:
    """Halve a picture."""
    return tf.nn.max_pool2d(x, 2, 2, "VALID")


def flatten(x: tf.Tensor) -> tf.Tensor:
    """All values of each example in a row."""
    return tf.reshape(x, (BATCH, -1))


def glorot(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """First values of a kernel."""
    fan = int(np.prod(shape[:-2])) * (shape[-2] + shape[-1])
    return random.normal(scale=np.sqrt(2 / fan), size=shape).astype(np.float32)


def path_of(variable: tf.Variable) -> str:
    """A variable's name with its scopes: ``fc1/kernel``."""
    return str(variable.name).split(":")[0]
