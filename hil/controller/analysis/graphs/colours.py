"""Node colours by metric, the same for all graphs shown together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hil.controller.analysis.graphs.values import NodeValue
from hil.controller.analysis.tensors.pictures import LIMIT_COLOURS
from hil.controller.storage.screen.texts import format_seconds

# Colours from good to bad. Readers with red-green colour blindness can distinguish the stops, too.
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
# Okabe and Ito's palette, which is safe for colour-blind readers.
_DEVICES = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00")
_DARK, _LIGHT = "#000000", "#ffffff"
# SQNR limits in dB: float32 hardly exceeds the first, and the second is poor for any dtype. Within these limits, a
# colour has the same meaning in all graphs. A graph with lower values extends the scale.
_GOOD, _POOR = 140.0, 40.0
# Minimum and maximum decades on each side of the tolerance.
_LIMIT_DECADES = (2, 4)


@dataclass(frozen=True)
class ColourScale:
    """Mapping from a metric's values to colours."""

    metric: str
    low: float = 0.0
    high: float = 0.0
    devices: tuple[str, ...] = ()  # in palette order

    @classmethod
    def of(cls, metric: str, values: Iterable[NodeValue]) -> ColourScale:
        """Return a scale that covers all these values."""
        listed = list(values)
        if metric == "placement":
            return cls(metric, devices=tuple(sorted({one.placement for one in listed if one.placement})))
        numbers = [value for one in listed if isinstance(value := one.get_metric(metric), float | int)]
        numbers = [value for value in numbers if math.isfinite(value) and (metric != "max_abs" or value > 0)]
        if metric == "tolerance_ratio":
            most = max([1.0, *numbers])
            decades = min(max(math.ceil(math.log10(most)), _LIMIT_DECADES[0]), _LIMIT_DECADES[1])
            return cls(metric, 10.0**-decades, 10.0**decades)
        if metric == "sqnr_db":
            return cls(metric, min([_POOR, *numbers]), _GOOD)
        return cls(metric, min(numbers, default=0.0), max(numbers, default=0.0))

    def level(self, value: float) -> float:
        """Return a number's position on the scale: 0 is the best, 1 the worst.

        Errors are logarithmic from the smallest error up. Errors divided by the tolerance are logarithmic, with the
        limit in the middle. SQNR runs from 140 dB down. Times start at 0.
        """
        if self.metric == "max_abs":
            if value <= 0:
                return 0.0
            return (
                _compute_share(math.log(value), math.log(self.low), math.log(self.high))
                if self._is_on_scale(value)
                else 1.0
            )
        if self.metric == "tolerance_ratio":
            if value <= self.low:
                return 0.0
            return min(1.0, 0.5 + math.log10(value) / (2 * math.log10(self.high))) if value < self.high else 1.0
        if self.metric == "sqnr_db":
            if value == math.inf:
                return 0.0
            return (
                min(1.0, max(0.0, 1 - _compute_share(value, self.low, self.high))) if self._is_on_scale(value) else 1.0
            )
        return _compute_share(value, 0.0, self.high) if math.isfinite(value) else 1.0

    def _is_on_scale(self, value: float) -> bool:
        return math.isfinite(value) and (self.metric != "max_abs" or self.low > 0)

    def choose_colour(self, value: NodeValue | None) -> str:
        """Return a node's colour, or "" without a value."""
        found = value.get_metric(self.metric) if value is not None else None
        if found is None:
            return ""
        if self.metric == "outcome":
            return _OUTCOMES.get(str(found), _ERROR)
        if self.metric == "placement":
            return _DEVICES[self.devices.index(str(found)) % len(_DEVICES)] if found in self.devices else ""
        level = self.level(float(found))
        return _choose_limit_colour(level) if self.metric == "tolerance_ratio" else interpolate_colour(level)

    def legend(self) -> list[tuple[str, str]]:
        """Return (colour, label) pairs."""
        if self.metric == "outcome":
            return [(colour, name) for name, colour in _OUTCOMES.items()] + [(_ERROR, "any error")]
        if self.metric == "placement":
            return [(_DEVICES[number % len(_DEVICES)], name) for number, name in enumerate(self.devices)]
        if self.metric == "tolerance_ratio":
            return [
                (_choose_limit_colour(0.0), f"{self.low:g} and less"),
                (_choose_limit_colour(0.5), "1, the limit"),
                (_choose_limit_colour(0.5000001), "above 1"),
                (_choose_limit_colour(1.0), f"{self.high:g} and more"),
            ]
        if self.metric == "max_abs":
            first, last = ("0", f"{self.high:.3g}") if self.high else ("0", "any")
            middle = (
                [(interpolate_colour(0.5), f"{math.sqrt(self.low * self.high):.3g}")] if self.low < self.high else []
            )
            return [(interpolate_colour(0), first), *middle, (interpolate_colour(1), last)]
        if self.metric == "sqnr_db":
            return [
                (interpolate_colour(0), f"{self.high:.3g} dB and more"),
                (interpolate_colour(0.5), f"{(self.low + self.high) / 2:.3g} dB"),
                (interpolate_colour(1), f"{self.low:.3g} dB"),
            ]
        return [(interpolate_colour(0), "0 s"), (interpolate_colour(1), format_seconds(self.high / 1e9))]


def interpolate_colour(level: float, stops: Sequence[str] = STOPS) -> str:
    """Interpolate the colours of ``stops`` at a level from 0 to 1."""
    place = min(max(level, 0.0), 1.0) * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    pairs = zip(_parse_colour(stops[first]), _parse_colour(stops[first + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in pairs)


def _choose_limit_colour(level: float) -> str:
    """Return the colour of an error divided by the tolerance, as in maps of tensors. Level 0.5 is the limit."""
    within, beyond = (tuple(f"#{colour}" for colour in side) for side in LIMIT_COLOURS)
    return interpolate_colour(2 * level, within) if level <= 0.5 else interpolate_colour(2 * level - 1, beyond)


def choose_text_colour(colour: str) -> str:
    """Return black or white, for a contrast of at least 4.5:1 on this background."""
    light = _compute_luminance(colour)
    return _DARK if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else _LIGHT


def _compute_luminance(colour: str) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (one / 255 for one in _parse_colour(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parse_colour(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _compute_share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 1.0
