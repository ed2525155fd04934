"""Fully connected layers, trained by Adam."""

from __future__ import annotations

import numpy as np
from common import Adam, Training, fully_connected


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return fully_connected(random, Adam)
