"""Convert controls to and from JSON, for the cache, bundles and records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from hil.core.results import Control, Deviation

# JSON cannot represent these numbers.
_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode_control(control: Control) -> dict[str, Any]:
    """Return a control as JSON values."""
    return {
        "arithmetic": control.arithmetic,
        "source": control.source,
        "whole": _encode_deviation(control.whole),
        "axes": {str(axis): list(map(_encode_deviation, along)) for axis, along in control.axes.items()},
        "sizes": {str(exponent): _encode_deviation(one) for exponent, one in control.sizes.items()},
        "jumps": {str(place): [_number_json(one) for one in values] for place, values in control.jumps.items()},
        "jumping": control.jumping,
        "clipped": list(control.clipped),
    }


def decode_control(value: Mapping[str, Any]) -> Control:
    """Parse the result of :func:`encode_control`. Raises TypeError, ValueError or KeyError if it is damaged."""
    arithmetic, source, jumping = value["arithmetic"], value["source"], value["jumping"]
    if not isinstance(arithmetic, str) or not isinstance(source, str) or type(jumping) is not int:
        raise TypeError("a control needs the fields arithmetic, source and jumping")
    clipped = value.get("clipped", [])  # missing in bundles from earlier versions
    if not isinstance(clipped, list) or not all(isinstance(name, str) for name in clipped):
        raise TypeError("clipped weights must be a list of names")
    whole = _decode_deviation(value["whole"])
    if whole is None:
        raise ValueError("a control needs a deviation of all elements")
    return Control(
        arithmetic,
        source,
        whole,
        {int(axis): tuple(map(_decode_deviation, along)) for axis, along in value["axes"].items()},
        {
            int(exponent): one
            for exponent, item in value["sizes"].items()
            if (one := _decode_deviation(item)) is not None
        },
        {int(place): tuple(map(_number, values)) for place, values in value["jumps"].items()},
        jumping,
        tuple(clipped),
    )


def _encode_deviation(deviation: Deviation | None) -> list[float | str] | None:
    return None if deviation is None else [_number_json(one) for one in astuple(deviation)]


def _decode_deviation(value: Any) -> Deviation | None:
    if value is None:
        return None
    rms, largest = map(_number, value)
    if not (rms >= 0 and largest >= 0):
        raise ValueError("a deviation must not be negative")
    return Deviation(rms, largest)


def _number_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _SPECIAL[value]
    return float(value)
