"""Check that a control matches its output. Controls may come from untrusted files."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hil.compare.control import MAX_JUMPS, find_channel_axes
from hil.core.arithmetic import FLOATS, INT8
from hil.core.results import Control, Deviation
from hil.core.tensors import Array, get_dtype_name, type_text

# Base-16 exponents of the smallest and the largest float64.
_EXPONENTS = (-269, 255)


def find_misfit(control: Control, output: Array) -> str:
    """Return a reason if a control does not match an output; otherwise ""."""
    what = type_text(get_dtype_name(output.dtype), output.shape)
    if output.dtype.kind in "OUSc" or not output.size:
        return f"an output of {what} cannot have a control"
    if control.arithmetic not in (*FLOATS, INT8):
        return f"unknown arithmetic {control.arithmetic[:80]!r}"
    if any(not (math.isfinite(one.rms) and math.isfinite(one.largest)) for one in _iter_deviations(control)):
        return "a deviation is not finite"
    axes = find_channel_axes(output.shape)
    for axis, along in control.axes.items():
        if axis not in axes:
            return f"the control has channels along axis {axis}, which is not a channel axis of the output {what}"
        if len(along) != output.shape[axis]:
            return (
                f"the control has {len(along)} channels along axis {axis}, the output {what} has {output.shape[axis]}"
            )
    if unknown := [one for one in control.sizes if not _EXPONENTS[0] <= one <= _EXPONENTS[1]]:
        return f"base-16 exponent {str(unknown[0])[:20]} is out of range"
    return _find_jump_misfit(control, output)


def _find_jump_misfit(control: Control, output: Array) -> str:
    jumps, jumping = control.jumps, control.jumping
    if not (0 <= jumping <= output.size and len(jumps) == min(jumping, MAX_JUMPS)):
        return f"the control has values for {len(jumps)} jumping elements, but counts {str(jumping)[:20]}"
    if any(not 0 <= place < output.size for place in jumps):
        return f"index of a jumping element is out of range for {output.size} elements"
    if len({len(values) for values in jumps.values()}) > 1:
        return "jumping elements have different numbers of values"
    return ""


def _iter_deviations(control: Control) -> Iterator[Deviation]:
    yield control.whole
    yield from control.sizes.values()
    for along in control.axes.values():
        yield from (one for one in along if one is not None)
