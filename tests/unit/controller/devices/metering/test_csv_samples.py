"""CSV lines of meters, and the conversion of their times."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hil.controller.devices.metering.csv_samples import CsvParser
from hil.controller.devices.metering.sample_buffer import SampleBuffer, align_by_arrival
from hil.controller.devices.metering.samples import PowerSamples
from hil.core.clock import get_time_ns


def parse(lines: list[str], columns: tuple[str, ...] = (), clock: str = "monotonic"):
    buffer = SampleBuffer(clock)
    parser = CsvParser(columns, buffer)
    for number, line in enumerate(lines):
        parser.feed(line, 1000 + number)
    return parser, buffer.read(has_time=parser.has_time, problem="")


def test_parser_reads_time_and_watts_by_default():
    _, samples = parse(["0.5,2.25", "1.5, 3"])
    assert samples.times_ns.tolist() == [500_000_000, 1_500_000_000]
    assert samples.watts.tolist() == [2.25, 3.0]


def test_parser_takes_columns_from_the_header():
    _, samples = parse(["# log", '"Time_ms",Volts,Milliamps,note,gpio', "100,5,200,x,0", "200,5,400,x,1"])
    assert samples.times_ns.tolist() == [100_000_000, 200_000_000]
    assert samples.watts == pytest.approx([1.0, 2.0])
    assert samples.gpio.tolist() == [False, True]


def test_parser_takes_columns_from_the_config():
    _, samples = parse(["x,1500,7"], ("-", "milliwatts", "time"))
    assert (samples.times_ns.tolist(), samples.watts.tolist()) == ([7_000_000_000], [1.5])


def test_parser_without_time_uses_the_arrival():
    parser, samples = parse(["3.5", "4.5"], ("watts",))
    assert not parser.has_time
    assert samples.times_ns.tolist() == [1000, 1001]


@pytest.mark.parametrize(
    "line", ["garbage", "1", "1,2,3", "1,x", "nan,1", "1,inf", "1e30,1", "1,1e30", "1_0,1", "1,\0", "," * 100]
)
def test_parser_skips_garbage(line):
    parser, samples = parse(["0,1", line, "1,1"])
    assert parser.garbage == 1
    assert parser.last_garbage == line[:100]
    assert samples.times_ns.size == 2


def test_parser_ignores_comments_and_empty_lines():
    parser, samples = parse(["", "# comment", "  ", "1,1"])
    assert (parser.garbage, samples.times_ns.size) == (0, 1)


def test_samples_whose_time_does_not_increase_are_left_out():
    _, samples = parse(["1,1", "3,1", "2,1", "3,1", "4,1"])
    assert samples.times_ns.tolist() == [1_000_000_000, 3_000_000_000, 4_000_000_000]
    assert (samples.unordered, samples.lost) == (2, 0)


def test_epoch_times_become_times_of_this_machine():
    _, samples = parse([f"{time.time():.6f},1"], clock="epoch")
    assert abs(int(samples.times_ns[0]) - get_time_ns()) < 60e9


@pytest.mark.parametrize("drift", [0.0, 2e-4, -2e-4])
def test_alignment_finds_offset_and_drift_of_the_meter(drift):
    random = np.random.default_rng(1)
    true_ns = 10**15 + (np.arange(20_000) * 1_000_000)
    times_s = 77.0 + (true_ns - true_ns[0]) / 1e9 * (1 - drift)
    arrived = true_ns + 200_000 + random.exponential(5e6, true_ns.size).astype(np.int64)
    # A program that buffers delays many samples.
    arrived = np.maximum.accumulate(np.where(random.random(true_ns.size) < 0.01, arrived + 50_000_000, arrived))
    times_ns, problem = align_by_arrival(times_s, arrived)
    assert problem == ""
    error = times_ns - true_ns
    assert np.abs(error).max() < 1_000_000


def read_lines(clock: str, lines: list[tuple[str, int]]) -> PowerSamples:
    buffer = SampleBuffer(clock)
    parser = CsvParser((), buffer)
    for line, arrived_ns in lines:
        parser.feed(line, arrived_ns)
    return buffer.read(has_time=parser.has_time, problem="")


def test_samples_without_numbers_are_counted():
    found = read_lines("monotonic", [("1,nan", 10**9), ("1.1,2", 11 * 10**8), ("1.2,inf", 12 * 10**8), ("x", 0)])
    assert (found.invalid, found.watts.tolist()) == (2, [2.0])


@pytest.mark.parametrize(
    ("shift_s", "problem"),
    [(0.0, ""), (0.5, ""), (-0.2, "0.2 s ahead of this"), (3.0, "at least 3 s after their time")],
)
@pytest.mark.parametrize("clock", ["monotonic", "epoch"])
def test_clock_of_another_machine_is_a_problem(clock, shift_s, problem):
    begun = time.monotonic_ns()
    offset = (time.time_ns() - begun) / 1e9 if clock == "epoch" else 0.0
    lines = [(f"{begun / 1e9 + offset + at / 100 - shift_s:.6f},2", begun + at * 10**7) for at in range(300)]
    assert problem in read_lines(clock, lines).clock_problem
    assert bool(problem) == bool(read_lines(clock, lines).clock_problem)


def test_time_in_another_unit_is_a_problem():
    lines = [(f"{at * 10},2", at * 10**7) for at in range(300)]
    assert "2.62e+03 s of the meter's clock are" in read_lines("meter", lines).clock_problem
