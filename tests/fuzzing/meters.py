"""Fuzzers of power meters: the CSV lines of a meter's program or file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.controller.devices.metering.csv_samples import CsvParser
from hil.controller.devices.metering.energy import EnergyWindow, evaluate_energy
from hil.controller.devices.metering.sample_buffer import SampleBuffer
from hil.core.meter_config import METER_CLOCKS

_MAX_BYTES = 1 << 14


def _change(data: bytes, rng: Random) -> bytes:
    changed = mutate.lines(data, rng) if rng.random() < 0.5 else mutate.havoc(data, rng)
    return changed[:_MAX_BYTES]


def _read_lines(data: bytes) -> Tried:
    """Parse lines. The first byte chooses the clock."""
    clock = METER_CLOCKS[(data[0] if data else 0) % len(METER_CLOCKS)]
    buffer = SampleBuffer(clock)
    parser = CsvParser((), buffer)
    lines = data[1:].split(b"\n")
    for number, line in enumerate(lines):
        parser.feed(line.decode("utf-8", errors="replace"), 10**12 + number * 1_000_000)
    samples = buffer.read(has_time=parser.has_time, problem="")
    if (
        parser.samples + parser.garbage > len(lines)
        or samples.times_ns.size + samples.lost + samples.unordered != parser.samples
    ):
        raise Broken("the samples do not add up")
    if not (np.diff(samples.times_ns) > 0).all() or not np.isfinite(samples.watts).all():
        raise Broken("the samples are not in order, or not finite")
    if samples.gpio.size not in (0, samples.watts.size):
        raise Broken("the gpio has another length than the power")
    if samples.times_ns.size > 3:
        first, last = int(samples.times_ns[0]), int(samples.times_ns[-1])
        parts = np.linspace(first, last, 4).astype(np.int64).tolist()
        window = EnergyWindow(((parts[1], parts[2]),), 1)
        found = evaluate_energy(samples, [window], ((first, parts[1]), (parts[2], last)), meter="file")
        return Tried(1, (clock, str(found.refused)))
    return Tried(1, (clock, f"garbage {bool(parser.garbage)}"))


@contextlib.contextmanager
def _open_lines(folder: Path) -> Iterator[Attempt]:
    yield _read_lines


def _make_lines() -> bytes:
    rows = "".join(f"{at / 100:.2f},5,{0.4 + at % 3 / 1000},{at // 30 % 2}\n" for at in range(90))
    return f"\0time,volts,amps,gpio\n{rows}".encode()


FUZZERS = (
    Fuzzer(
        "meter",
        "the CSV lines of a power meter",
        _open_lines,
        lambda: [_make_lines(), b"\x01# log\n0.1,2.5\n0.2,2.5\n", b"\x02time_ms,milliwatts\n1,2500\n2,2501\n"],
        _change,
        limit_mib=64,
    ),
)
