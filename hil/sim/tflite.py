"""LiteRT on a simulated device."""

from __future__ import annotations

from hil.sim.runtime import SimRuntime, real_runtime


class SimTfLite(SimRuntime):
    """LiteRT on a simulated device."""

    real = real_runtime("tflite")
