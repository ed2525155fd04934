"""Colours of nodes by a metric, the same for all graphs that are looked at together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hil.controller.analysis.graphs.values import NodeValue
from hil.controller.storage.texts import seconds

# From what is right, or quick, to what is not: also apart where red and green are not.
STOPS = ("#eef3c7", "#f6b352", "#d1495b", "#6a1b4d")
_OUTCOMES = {
    "PASS": "#b7e4c7",
    "FAIL": "#d1495b",
    "UNSTABLE": "#d1495b",
    "SKIP": "#c9ced6",
    "XFAIL": "#c9ced6",
    "BLIND": "#f6e58d",
}
_ERROR = "#6a1b4d"
# Okabe and Ito's, which all readers can tell apart.
_DEVICES = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00")
_DARK, _LIGHT = "#000000", "#ffffff"
# dB: what float32 hardly can be better than, and what is poor for any dtype. Between these, colours mean the same in
# all graphs; one that has worse values has a longer scale.
_GOOD, _POOR = 140.0, 40.0


@dataclass(frozen=True)
class Scale:
    """How a metric's values become colours."""

    metric: str
    low: float = 0.0
    high: float = 0.0
    devices: tuple[str, ...] = ()  # in the order of their colours

    @classmethod
    def of(cls, metric: str, values: Iterable[NodeValue]) -> Scale:
        """The scale that shows all these values."""
        listed = list(values)
        if metric == "placement":
            return cls(metric, devices=tuple(sorted({one.placement for one in listed if one.placement})))
        numbers = [value for one in listed if isinstance(value := one.of(metric), float | int)]
        numbers = [value for value in numbers if math.isfinite(value) and (metric != "max_abs" or value > 0)]
        if metric == "sqnr_db":
            return cls(metric, min([_POOR, *numbers]), _GOOD)
        return cls(metric, min(numbers, default=0.0), max(numbers, default=0.0))

    def level(self, value: float) -> float:
        """Where a number stands on the scale: 0 is right or quick, 1 the worst.

        Errors by their logarithm, from the smallest that there is; SQNR in dB, from 140 downwards; times from 0.
        """
        if self.metric == "max_abs":
            if value <= 0:
                return 0.0
            return _share(math.log(value), math.log(self.low), math.log(self.high)) if self._has(value) else 1.0
        if self.metric == "sqnr_db":
            if value == math.inf:
                return 0.0
            return min(1.0, max(0.0, 1 - _share(value, self.low, self.high))) if self._has(value) else 1.0
        return _share(value, 0.0, self.high) if math.isfinite(value) else 1.0

    def _has(self, value: float) -> bool:
        return math.isfinite(value) and (self.metric != "max_abs" or self.low > 0)

    def colour(self, value: NodeValue | None) -> str:
        """The colour of a node; "" where it has no value."""
        found = value.of(self.metric) if value is not None else None
        if found is None:
            return ""
        if self.metric == "outcome":
            return _OUTCOMES.get(str(found), _ERROR)
        if self.metric == "placement":
            return _DEVICES[self.devices.index(str(found)) % len(_DEVICES)] if found in self.devices else ""
        return between(self.level(float(found)))

    def legend(self) -> list[tuple[str, str]]:
        """Colours, each with what it stands for."""
        if self.metric == "outcome":
            return [(colour, name) for name, colour in _OUTCOMES.items()] + [(_ERROR, "any error")]
        if self.metric == "placement":
            return [(_DEVICES[number % len(_DEVICES)], name) for number, name in enumerate(self.devices)]
        if self.metric == "max_abs":
            first, last = ("0", f"{self.high:.3g}") if self.high else ("0", "any")
            middle = [(between(0.5), f"{math.sqrt(self.low * self.high):.3g}")] if self.low < self.high else []
            return [(between(0), first), *middle, (between(1), last)]
        if self.metric == "sqnr_db":
            return [
                (between(0), f"{self.high:.3g} dB and more"),
                (between(0.5), f"{(self.low + self.high) / 2:.3g} dB"),
                (between(1), f"{self.low:.3g} dB"),
            ]
        return [(between(0), "0 s"), (between(1), seconds(self.high / 1e9))]


def between(level: float) -> str:
    """The colour at a place from 0 to 1 between :data:`STOPS`."""
    place = min(max(level, 0.0), 1.0) * (len(STOPS) - 1)
    first = min(int(place), len(STOPS) - 2)
    pairs = zip(_STOPS[first], _STOPS[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in pairs)


def text_on(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour: at least 4.5:1."""
    light = _luminance(colour)
    return _DARK if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else _LIGHT


def _luminance(colour: str) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (one / 255 for one in _parts(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


_STOPS = tuple(map(_parts, STOPS))


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 1.0
