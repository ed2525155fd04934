"""Random inputs that are the same in every trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import Array


def set_random_seed(seed: int = 0) -> None:
    """Seed Python's random numbers, numpy's and, where it is loaded, TensorFlow's: before each module and trace."""
    random.seed(seed)
    np.random.seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def uniform(shape: Sequence[int] = (), dtype: Any = np.float32, low: float = -1.0, high: float = 1.0) -> Array:
    """Uniform random values of a shape, from numpy's seeded generator; integers and bools are truncated ones."""
    return np.random.uniform(low, high, tuple(shape)).astype(dtype)


def ndarange(shape: Sequence[int], dtype: Any = np.float32) -> Array:
    """0, 1, 2, ... in a shape."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
