"""Which runtime runs what: the tables that name hil's runtimes agree."""

from __future__ import annotations

from hil.agent.runtimes import BUILT_IN
from hil.controller.backends.compilers import compilers
from hil.controller.backends.runtime_registry import RUNTIMES, compiler_for
from hil.controller.devices.deploy import wheels
from hil.sim.__main__ import _RUNTIMES as SIMULATED


def test_every_runtime_of_the_agent_can_be_asked_for_simulated_and_brought_to_a_board():
    assert set(RUNTIMES) == set(BUILT_IN) == set(SIMULATED)
    assert {name for name, one in BUILT_IN.items() if one.package} == {name for name in wheels._RUNTIMES}


def test_every_runtime_has_a_compiler():
    for runtime in RUNTIMES:
        assert compiler_for("any", runtime) in compilers(), runtime
