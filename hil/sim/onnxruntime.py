"""ONNX Runtime on a simulated device."""

from __future__ import annotations

import os
from pathlib import Path

from hil.sim.runtime import SimRuntime, real_runtime


class SimOnnxRuntime(SimRuntime):
    """ONNX Runtime on a simulated device; half precision is made by converting the model when it is loaded."""

    real = real_runtime("onnxruntime")

    def to_half(self, folder: Path, main: str) -> str:
        """Convert the model's arithmetic to float16 as ONNX Runtime's own tool does; inputs and outputs stay.

        The new model is in memory, as long as this process lives: a sandboxed worker cannot write beside the old one.
        """
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        converted = convert_float_to_float16(onnx.load(folder / main), keep_io_types=True)
        fd = os.memfd_create(f"half-{main}"[:200], os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(converted.SerializeToString())
        return f"/proc/self/fd/{fd}"
