"""IREE on a simulated device."""

from __future__ import annotations

from hil.sim.runtime import SimRuntime, real_runtime


class SimIree(SimRuntime):
    """IREE on a simulated device. Half precision comes with the program: the board's compile flags ask for it."""

    real = real_runtime("iree")
