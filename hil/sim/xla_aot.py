"""Programs compiled ahead of time by XLA on a simulated device."""

from __future__ import annotations

from hil.sim.runtime import SimRuntime, real_runtime


class SimXlaAot(SimRuntime):
    """XLA's programs on a simulated device: they compute in the types that they were compiled with."""

    real = real_runtime("xla-aot")
