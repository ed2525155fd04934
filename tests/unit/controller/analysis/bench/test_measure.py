"""Number and order of the runs in a measurement."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench_boards import PacedBoard, side_on

from hil.controller.analysis.bench.measure import (
    MIN_ROUNDS,
    ROUNDS,
    compare_sides,
    count_batches,
    count_instructions,
    measure,
)
from hil.controller.analysis.bench.stats import Batch, BenchJob
from hil.controller.analysis.bench.store import select_under_load
from hil.controller.pipeline.settings.options import Job
from hil.core.board_config import BoardConfig
from hil.core.instructions import InstructionCounts
from hil.core.results import Outcome
from hil.core.tensors import TensorSpec
from hil.errors import RunCrashed

JOB = Job(models=(Path("a"), Path("b")))


def bench(**settings: object) -> BenchJob:
    return BenchJob(JOB, **settings)


def noisy(seed: int, level_ns: float, spread: float):
    rng = random.Random(seed)
    return lambda: round(level_ns * rng.lognormvariate(0, spread))


@given(st.integers(1, 300), st.sampled_from([10_000, 3_000_000, 700_000_000]))
@settings(max_examples=25)
def test_measure_runs_requested_iterations_for_single_side(iterations, each_ns):
    board = PacedBoard({"a": lambda: each_ns})
    side = side_on(board, "A", "a")
    measure([side], bench(iterations=iterations), lambda *_: None, random.Random(1))
    assert sum(batch.duration_ns.size for batch in side.batches) == iterations
    assert all((batch.duration_ns == each_ns).all() for batch in side.batches)
    assert max(batch.duration_ns.size for batch in side.batches) * each_ns <= max(500_000_000, each_ns)
    assert (board.loads, board.loaded) == (["a"], [])


@given(st.integers(20, 400), st.integers(0, 5))
@settings(max_examples=25)
def test_measure_runs_requested_iterations_for_both_sides(iterations, seed):
    board = PacedBoard({"a": lambda: 3_000_000, "b": lambda: 5_000_000})
    sides = [side_on(board, "A", "a"), side_on(board, "B", "b")]
    measure(sides, bench(iterations=iterations), lambda *_: None, random.Random(seed))
    for side in sides:
        assert sum(batch.duration_ns.size for batch in side.batches) == iterations
    assert board.loaded == []


def test_measure_runs_for_requested_time():
    side = side_on(PacedBoard({"a": lambda: 50_000}), "A", "a")
    shares = []
    measure([side], bench(min_time_s=1.5), lambda side, batch, share: shares.append(share), random.Random(1))
    assert sum(int(batch.duration_ns.sum()) for batch in side.batches) == pytest.approx(1.5e9, rel=0.01)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_measure_alternates_sides_and_reloads_each_round():
    board = PacedBoard({"a": lambda: 50_000, "b": lambda: 50_000})
    sides, order = [side_on(board, "A", "a"), side_on(board, "B", "b")], []
    measure(
        sides, bench(min_time_s=2.0), lambda side, batch, _: order.append((batch.round, side.label)), random.Random(1)
    )
    assert len(board.loads) == 2 * ROUNDS
    assert {board.loads[number] for number in range(0, 2 * ROUNDS, 2)} == {"a", "b"}
    first = set()
    for _, turns in groupby(order, key=lambda one: one[0]):
        labels = "".join(label for _, label in turns)
        assert len(labels) % 4 == 0
        for at in range(0, len(labels), 4):
            assert labels[at : at + 4] in ("ABBA", "BAAB")
            first.add(labels[at])
    assert first == {"A", "B"}


def test_measure_uses_equal_batch_sizes_for_similar_speeds():
    board = PacedBoard({"a": lambda: 50_000, "b": lambda: 60_000})
    sides = [side_on(board, "A", "a"), side_on(board, "B", "b")]
    measure(sides, bench(), lambda *_: None, random.Random(1))
    assert [b.duration_ns.size for b in sides[0].batches] == [b.duration_ns.size for b in sides[1].batches]


def test_measure_warms_up_after_each_load():
    board = PacedBoard({"a": lambda: 1_000_000, "b": lambda: 1_000_000})
    sides = [side_on(board, "A", "a"), side_on(board, "B", "b")]
    measure(sides, bench(warmup=7, iterations=40), lambda *_: None, random.Random(1))
    assert [count for _, _, count in board.calls].count(7) == 2 * ROUNDS
    cold = PacedBoard({"a": lambda: 1_000_000})
    side = side_on(cold, "A", "a")
    measure([side], bench(warmup=0, iterations=40), lambda *_: None, random.Random(1))
    assert {warmup for _, warmup, _ in cold.calls} == {0}


def test_measure_ignores_burst_during_speed_estimate():
    slow = [400_000_000] * 3
    board = PacedBoard({"a": lambda: slow.pop() if slow else 50_000})
    side = side_on(board, "A", "a")
    measure([side], bench(min_time_s=1.0), lambda *_: None, random.Random(1))
    assert sum(batch.duration_ns.size for batch in side.batches) == 20_000


def test_measure_adds_rounds_until_limit_for_noisy_ratio():
    wild = PacedBoard({"a": noisy(1, 3e7, 0.5), "b": noisy(2, 3e7, 0.5)})
    sides = [side_on(wild, "A", "a"), side_on(wild, "B", "b")]
    measure(sides, bench(min_time_s=0.1), lambda *_: None, random.Random(1))
    assert len(wild.loads) == 3 * 2 * ROUNDS
    assert compare_sides(sides, bench()).verdict == "no difference"


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "no difference"), (1.1, "slower"), (1 / 1.1, "faster")])
def test_measure_detects_injected_slowdown(factor, verdict):
    board = PacedBoard({"a": noisy(3, 2e6, 0.05), "b": noisy(4, 2e6 * factor, 0.05)})
    sides = [side_on(board, "A", "a"), side_on(board, "B", "b")]
    measure(sides, bench(), lambda *_: None, random.Random(1))
    found = compare_sides(sides, bench())
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor, rel=0.02)


def test_measure_preserves_batches_before_crash():
    board = PacedBoard({"a": lambda: 1_000_000}, fail_at=20, failure=RunCrashed("gone"))
    side = side_on(board, "A", "a")
    with pytest.raises(RunCrashed):
        measure([side], bench(iterations=100), lambda *_: None, random.Random(1))
    assert side.batches
    assert (side.case.outcome, side.case.stage) == (Outcome.RUN_CRASH, "run")
    assert board.loaded == []


def test_under_load_counts_runs_while_all_copies_run():
    def batch(copy: int, starts: list[int]) -> Batch:
        return Batch("A", 0, copy, np.array(starts), np.full(len(starts), 10))

    starts, durations, rate = select_under_load([batch(0, [0, 10, 20, 30]), batch(1, [15, 25, 35, 45])], 2)
    assert starts.tolist() == [15, 20, 25, 30]
    assert durations.tolist() == [10] * 4
    assert rate == pytest.approx(4 / 25 * 1e9)


def test_measure_names_outputs_as_the_model_does():
    side = side_on(PacedBoard({"m": lambda: 10**6}), "A", "m")
    assert side.case.artifact is not None
    artifact = replace(side.case.artifact, outputs=(TensorSpec("y", "float64", (1,)),))
    side.case = replace(side.case, artifact=artifact)
    measure([side], bench(iterations=5), lambda *_: None, random.Random(0))
    assert side.result is not None and list(side.result.outputs) == ["y"]


def test_count_instructions_loads_each_program_several_times():
    board = PacedBoard({"a": lambda: 5, "b": lambda: 5})
    sides = [side_on(board, label, name) for label, name in (("A", "a"), ("B", "b"))]
    count_instructions(sides, loads=3, iterations=4)
    assert (board.loads, board.loaded) == (["a", "b"] * 3, [])
    assert board.calls == [("a", 0, 5), ("a", 0, 4), ("b", 0, 5), ("b", 0, 4)] * 3
    assert count_batches(sides[0], sides[0].batches) is None  # not requested


def test_counts_of_batches_are_joined():
    side = side_on(PacedBoard({"a": lambda: 5}), "A", "a")
    side.counter, side.counter_problem = "perf_event", ""
    times = np.array([1, 2])
    batches = [Batch("A", 0, 0, times, times, instructions=counts) for counts in ((7, 8), (9, 10))]
    assert count_batches(side, batches) == InstructionCounts("perf_event", (7, 8, 9, 10))
    side.counter_problem = "the counter was shared"
    uncounted = Batch("A", 0, 0, times, times)
    assert count_batches(side, [*batches, uncounted]) == InstructionCounts("perf_event", (7, 8, 9, 10))
    assert count_batches(side, [uncounted]) == InstructionCounts(problem="the counter was shared")


class OneProgramBoard(PacedBoard):
    """Microcontroller: a second program does not load."""

    def load(self, artifact, **options):
        assert not self.loaded, "the serial line is busy"
        return super().load(artifact, **options)


@pytest.mark.parametrize(("has_time", "rounds"), [(True, MIN_ROUNDS), (False, 1)])
def test_measure_loads_one_program_after_the_other_on_microcontroller(has_time, rounds):
    board = OneProgramBoard({"a": lambda: 3_000_000, "b": lambda: 6_000_000})
    board.config = BoardConfig("m4", "m4", icount_shift=-1 if has_time else 5)
    sides = [side_on(board, "A", "a"), side_on(board, "B", "b")]
    for side in sides:
        side.case = replace(side.case, artifact=replace(side.case.artifact, runtime="mcu"))
    shares = []
    measure(sides, bench(iterations=100), lambda *kept: shares.append(kept[2]), random.Random(1))
    assert len(board.loads) == 2 * rounds
    assert board.loaded == []
    for side in sides:
        assert sum(batch.duration_ns.size for batch in side.batches) == 100
        assert {batch.round for batch in side.batches} == set(range(rounds))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    if has_time:
        assert compare_sides(sides, bench()).ratio == pytest.approx(2)
