"""Convolutions and fully connected layers with batch normalization (in training), trained by Adam."""

from __future__ import annotations

import numpy as np
from common import Adam, BatchNorm, Training, convolutional


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return convolutional(random, Adam, lambda size, name: BatchNorm(size, name, training=True))
