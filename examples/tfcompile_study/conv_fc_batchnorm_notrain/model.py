"""Convolutions and fully connected layers with batch normalization (not in training), trained by gradient descent."""

from __future__ import annotations

import numpy as np
from common import BatchNorm, GradientDescent, Training, convolutional


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return convolutional(random, GradientDescent, lambda size, name: BatchNorm(size, name, training=False))
