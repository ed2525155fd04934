"""Fully connected layers, trained by TensorFlow 1's Adam."""

from __future__ import annotations

import numpy as np
from common import AdamV1, Training, fully_connected


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return fully_connected(random, AdamV1)
