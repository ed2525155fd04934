"""Fully connected layers with batch normalization (in training), trained by TensorFlow 1's Adam."""

from __future__ import annotations

import numpy as np
from common import AdamV1, BatchNorm, Training, fully_connected


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return fully_connected(random, AdamV1, lambda size, name: BatchNorm(size, name, training=True))
