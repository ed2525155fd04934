"""A simulated device has the same features as the real runtime."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hil.sim.faults import parse
from hil.sim.runtime import SimProgram


def test_sim_program_supports_profile_only_if_runtime_does():
    plain = {"function": "main", "inputs": (), "outputs": ()}
    runtime: Any = SimpleNamespace(profile_fault=lambda: "")
    assert not hasattr(SimProgram(runtime, SimpleNamespace(**plain)), "profile")
    profiled = SimProgram(runtime, SimpleNamespace(**plain, profile=lambda *order: ["out"]))
    assert profiled.profile(1, 2, None, None, None) == ["out"]  # the fake accepts any arguments


@pytest.mark.parametrize(("pace_s", "works_s"), [(0.05, 0.0), (0.05, 0.03), (0.01, 0.03)])
def test_sim_program_run_lasts_at_least_the_pace(pace_s, works_s, monkeypatch):
    def work() -> None:
        end = time.perf_counter() + works_s
        while time.perf_counter() < end:
            pass

    slept: list[float] = []
    # A separate clock: threads left by other tests sleep with the module's clock.
    clock = SimpleNamespace(perf_counter_ns=time.perf_counter_ns, sleep=slept.append)
    monkeypatch.setattr("hil.sim.runtime.time", clock)
    runtime: Any = SimpleNamespace(trigger_at=lambda *at: None, compute_next_factor=lambda: 1.0)
    faults = [parse(f"pace:seconds={pace_s}")]
    start = time.perf_counter()
    SimProgram(runtime, SimpleNamespace(function="main", inputs=(), outputs=(), run=work), faults).run()
    took = time.perf_counter() - start
    assert slept[0] <= max(pace_s - works_s, 0.0) + 1e-6
    assert took + slept[0] >= max(pace_s, works_s) - 1e-6


@pytest.mark.parametrize(("faults", "count"), [("counter:each=10", 1000), ("counter:each=10 slowdown:factor=2", 2000)])
def test_sim_program_counts_by_size_and_slowdown(faults, count):
    program = SimProgram(None, SimpleNamespace(), [parse(fault) for fault in faults.split()], size=100)
    assert [program.count_instructions() for _ in range(2)] == [count, count]
    assert program.instruction_counter == "simulated"


def test_sim_program_varies_counts_by_share():
    program = SimProgram(None, SimpleNamespace(), [parse("counter:each=10,share=0.1")], size=100)
    counts = [program.count_instructions() for _ in range(50)]
    assert len(set(counts)) > 10 and all(900 <= count <= 1100 for count in counts)


def test_sim_program_without_counter_does_not_count():
    assert not hasattr(SimProgram(None, SimpleNamespace(), [], size=100), "count_instructions")
