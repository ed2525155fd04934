"""BasicRNNCell with dynamic_rnn."""

from __future__ import annotations

import numpy as np
from common import Training
from recurrent import recurrent


def training(random: np.random.Generator) -> Training:
    """The model and its training step, with first values drawn from ``random``."""
    return recurrent(random, lengths=False)
