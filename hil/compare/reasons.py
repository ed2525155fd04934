"""Format comparison reasons, indices and values for messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from hil.compare.stats import Stats
from hil.compare.values import make_reader
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import get_dtype_name, shape_text


def explain_with_types(values: str, actual: Tensor, reference: Tensor, *, compared: bool) -> str:
    """Return why two tensors do not agree, most serious cause first; "" if they agree.

    Args:
        values: why their values differ; "" if they agree.
        compared: True if the values could be compared.
    """
    if actual.shape != reference.shape:
        return f"shape {shape_text(actual.shape)}, the reference has {shape_text(reference.shape)}"
    dtype, reference_dtype = get_dtype_name(actual.dtype), get_dtype_name(reference.dtype)
    if dtype == reference_dtype:
        return values
    reason = f"dtype {dtype}, the reference has {reference_dtype}"
    return f"{reason}; {values or 'the values agree'}" if compared else reason


def explain_values(actual: Tensor, reference: Tensor, tolerance: Tolerance | None, stats: Stats) -> str:
    """Return why the values of two tensors do not agree; "" if they agree."""
    if stats.zeroed:
        return "every value is 0, but the reference has other values"
    if not stats.mismatches:
        return ""
    a, b = read_values(actual, reference, stats.worst) or ("?", "?")
    where = f"at {list(index_of(stats.worst, actual.shape) or ())}: {_show(a)}, the reference has {_show(b)}"
    if stats.nonfinite:
        return f"{count(stats.nonfinite, 'value')} NaN or infinite on one side only, first {where}"
    share = f"{stats.mismatches} of {count(stats.elements, 'value')}"
    if tolerance is None:
        return f"{share} {'differs' if stats.mismatches == 1 else 'differ'}, worst {where}"
    masked = f"; SQNR, cosine and RMSE exclude {count(stats.masked, 'masked value')}" if stats.masked else ""
    return f"{share} out of tolerance (rtol {tolerance.rtol:g}, atol {tolerance.atol:g}), worst {where}{masked}"


def count(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 value``, ``2 values``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def index_of(flat: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Convert a flat index to an index into a tensor of the given shape."""
    return None if flat is None else tuple(int(place) for place in np.unravel_index(flat, shape))


def read_values(actual: Tensor, reference: Tensor, flat: int | None) -> tuple[Any, Any] | None:
    """Return both values at a flat index as Python bool, int, float, complex or str."""
    if flat is None:
        return None
    a, b = (make_reader(array)(flat, flat + 1)[0] for array in (actual, reference))
    return _to_python(a), _to_python(b)


def _to_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _show(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, (float, complex)) else repr(value)
