"""How large values are, for tolerances that must not swallow a mismatch that another tool finds."""

from __future__ import annotations

import numpy as np

from hil.core.tensors import Array


def largest(array: Array) -> float:
    """The largest finite magnitude; 0 where there is none, and of texts."""
    if array.dtype.kind == "O":
        return 0.0
    with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is cast
        magnitudes = np.abs(array.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))
