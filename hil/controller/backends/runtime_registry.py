"""Which runtime runs a model of which format, and who makes the program of it."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from hil.errors import UsageError

# Runtime -> the format that it loads as it is. A vendor's runtime, which is not here, takes what its compiler makes.
TAKES = MappingProxyType({"iree": "vmfb", "onnxruntime": "onnx", "tflite": "tflite", "executorch": "pte"})
# The runtimes that come with hil; a vendor's has a name of its own.
RUNTIMES = (*TAKES, "xla-aot")
# Runtime -> its compiler, where that is not of the runtime's own name.
_COMPILERS = MappingProxyType({"xla-aot": "tfcompile", "onnxruntime": "none", "tflite": "none"})
# Format -> the one runtime that takes it, whatever the board's own is.
_BOUND = MappingProxyType({"vmfb": "iree", "tflite": "tflite", "pte": "executorch"})


def runtime_for(model_format: str, asked: str) -> str:
    """The runtime for a model: what the user asked for, or the only one that takes this format, or "": the board's."""
    return asked or _BOUND.get(model_format, "")


def compiler_for(model_format: str, runtime: str) -> str:
    """The compiler that makes a runtime's program; ``none`` takes the model as it is, or converted."""
    return "none" if TAKES.get(runtime) == model_format else _COMPILERS.get(runtime, runtime)


def common_runtime(runtimes: Iterable[str], asked: str) -> str:
    """The one runtime that a connection is opened for; "" is the board's own.

    Args:
        runtimes: of the cases, as :func:`runtime_for` says.
        asked: what the user said; of no cases it is the answer.

    Raises:
        UsageError: they need several.
    """
    needed = sorted(set(runtimes))
    if len(needed) > 1:
        told = " and ".join(name or "the board's own" for name in needed)
        raise UsageError(f"these models need several runtimes: {told}", hint="run them apart, each with its runtime")
    return needed[0] if needed else asked
