"""A simulated device has what the real runtime has, and nothing more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hil.sim.runtime import SimProgram


def test_a_program_can_be_profiled_where_the_real_one_can():
    plain = {"function": "main", "inputs": (), "outputs": ()}
    runtime: Any = SimpleNamespace(profile_fault=lambda: "")
    assert not hasattr(SimProgram(runtime, SimpleNamespace(**plain)), "profile")
    profiled = SimProgram(runtime, SimpleNamespace(**plain, profile=lambda *order: ["out"]))
    assert profiled.profile(1, 2, None, None) == ["out"]  # type: ignore[arg-type]  # the fake takes anything
