"""ExecuTorch on a simulated device."""

from __future__ import annotations

from hil.sim.runtime import SimRuntime, real_runtime


class SimExecuTorch(SimRuntime):
    """ExecuTorch on a simulated device."""

    real = real_runtime("executorch")
