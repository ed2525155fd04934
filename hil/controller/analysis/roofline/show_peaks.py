"""Print the peaks of a board."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hil.controller.analysis.profile.show import format_si
from hil.controller.records.measurements.roofline import BoardPeaks, PeakValue
from hil.controller.storage.screen.texts import make_plain


def list_peak_lines(peaks: BoardPeaks) -> list[str]:
    """Return the lines that describe the peaks of a board."""
    lines = [f"{make_plain(peaks.board)}, {describe_origin(peaks)}"]
    for name, value in peaks.compute.items():
        lines.append(f"  {name:7} {format_peak(peaks, value, 'op')}")
    if peaks.memory is not None:
        lines.append(f"  memory  {format_peak(peaks, peaks.memory, 'B')}")
    for name, value in peaks.compute.items():
        if peaks.memory is not None:
            lines.append(f"  ridge   {value.rate / peaks.memory.rate:.3g} op/byte for {name}")
    if peaks.parallelism is not None:
        lines.append(f"  cores   {peaks.parallelism:.2f} busy in the fastest matmul of f32; {make_plain(peaks.cpu)}")
    for part in peaks.stack:
        if part.name in ("kernel", "driver", "governor") and part.version:
            lines.append(f"  {part.name:7} {make_plain(part.version)[:100]}")
    if peaks.flags:
        lines.append(f"  flags   {' '.join(map(make_plain, peaks.flags))}")
    lines += [f"  note    {make_plain(note)}" for note in peaks.notes]
    return lines


def describe_origin(peaks: BoardPeaks) -> str:
    """Return how and when the peaks were measured."""
    if peaks.source == "data sheet":
        return "values of a data sheet"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(peaks.created))
    how = " ".join(filter(None, map(make_plain, (peaks.runtime, peaks.runtime_version, peaks.device))))
    software = f", software ({make_plain(peaks.software)})" if peaks.software else ""
    clock = {"device": ", device times", "instructions": ", instructions instead of times"}.get(peaks.clock, "")
    return f"measured {when} with {how}{software}{clock}"


def format_peak(peaks: BoardPeaks, value: PeakValue, unit: str) -> str:
    """Return a peak with its interval, spread and kernel."""
    if peaks.clock == "instructions":
        return f"{value.rate:.3g} {unit} per instruction ({value.kernel})"
    parts = [format_si(value.rate, f"{unit}/s")]
    if peaks.tick_hz:
        parts.append(f"= {value.rate / peaks.tick_hz:.3g} {unit} per tick")
    if value.interval is not None:
        low, high = (format_si(one, f"{unit}/s") for one in (value.interval.low, value.interval.high))
        parts.append(f"({value.interval.level:.0%}: {low} to {high})")
    if value.spread is not None:
        parts.append(f"spread {value.spread:.1%}")
    if value.kernel:
        parts.append(f"with {value.kernel}")
    return "  ".join(parts)


def list_all_lines(found: Sequence[BoardPeaks]) -> list[str]:
    """Return the lines for multiple measurements."""
    return [line for peaks in found for line in list_peak_lines(peaks)]
