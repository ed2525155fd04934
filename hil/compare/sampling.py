"""Sample a large output. Criteria that reject a wrong output on a sample also reject it on the whole output."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from hil.compare.values import CHUNK, make_reader
from hil.core.tensors import Array

# Minimum sample size. Outputs with up to LARGE elements are not sampled.
SAMPLE = 1 << 17
LARGE = 1 << 18
_SEED = 33


def sample_of(array: Array, axes: Collection[int]) -> Array | None:
    """Return a reproducible random sample that includes the output's largest and smallest values.

    Args:
        axes: axes to keep complete, counted from 0. The sample has the output's rank.

    Returns:
        The sample, or None if the output is small or the sample would be at least half of the output.
    """
    split = [axis for axis in range(array.ndim) if axis not in axes]
    kept = [axis for axis in range(array.ndim) if axis in axes]
    shape = [array.shape[axis] for axis in split]
    size = math.prod(array.shape[axis] for axis in kept)
    count = -(-SAMPLE // max(size, 1))
    if array.size <= LARGE or 2 * count >= math.prod(shape):
        return None
    chosen = np.random.default_rng(_SEED).integers(0, math.prod(shape), count)
    extremes = np.unravel_index(_find_extremes(array), array.shape)
    found = np.ravel_multi_index([extremes[axis] for axis in split], shape)
    rows = np.unravel_index(np.unique(np.concatenate([chosen, found])), shape)
    sample = np.moveaxis(array, split, range(len(split)))[rows]
    first, *others = split
    sample = np.moveaxis(sample, 0, sum(axis < first for axis in kept))
    return np.expand_dims(sample, others)


def _find_extremes(array: Array) -> list[int]:
    """Return the flat indices of the largest and the smallest finite value, by magnitude for complex values."""
    read, high, low = make_reader(array), (-math.inf, 0), (math.inf, 0)
    for start in range(0, array.size, CHUNK):
        chunk = read(start, start + CHUNK)
        with np.errstate(all="ignore"):  # casting a signalling NaN warns
            values = np.abs(chunk) if chunk.dtype.kind == "c" else chunk.astype(np.float64)
        finite = np.isfinite(values)
        for_high, for_low = (np.where(finite, values, one) for one in (-np.inf, np.inf))
        largest, least = int(np.argmax(for_high)), int(np.argmin(for_low))
        high = max(high, (float(for_high[largest]), start + largest))
        low = min(low, (float(for_low[least]), start + least))
    return [high[1], low[1]]
