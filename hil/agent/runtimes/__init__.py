"""Runtimes: what loads and runs a program inside a worker process.

A runtime is a class with the methods of :class:`Runtime`. Those that come with hil are listed in ``BUILT_IN``; others
register under the entry-point group ``hil.runtimes``. A class is named as ``module:Class`` and imported in the worker
only, so the agent itself never loads a vendor's library.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from hil.tensors import Array, TensorSpec

BUILT_IN = {
    "iree": "hil.agent.runtimes.iree:IreeRuntime",
    "onnxruntime": "hil.agent.runtimes.onnxruntime:OnnxRuntime",
    "tflite": "hil.agent.runtimes.tflite:TfLiteRuntime",
    "executorch": "hil.agent.runtimes.executorch:ExecuTorchRuntime",
    "xla-aot": "hil.agent.runtimes.xla_aot:XlaAotRuntime",
}


class Program(Protocol):
    """A loaded program.

    One that can be profiled has one more method::

        def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None) -> list[Path]

    It runs what is bound ``warmup`` and then ``iterations`` times under the runtime's profiler, writes into ``folder``
    and returns the files, among them one of :class:`hil.agent.runtimes.profiling.ClockPairs`; ``tool`` is the command
    that its ``describe`` asked for. It raises :class:`hil.errors.RunFailed` where that fails, and the program itself
    can be run on.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str

    def bind(self, inputs: list[Array]) -> None:
        """Take the inputs of the runs that follow (views of shared memory, valid until the next bind)."""

    def run(self) -> None:
        """Run once and wait until the device is done. The timed part: nothing else belongs in here."""

    def fetch(self) -> list[Array]:
        """The outputs of the last run, in order."""


class Runtime(Protocol):
    """A way to run programs. Made in the worker, after the fork."""

    def __init__(self, options: dict[str, Any]) -> None: ...

    @staticmethod
    def describe() -> dict[str, Any]:
        """``{"version": ..., "devices": [default first, ...]}``.

        With ``"profile_tool"``, the name of a command, where profiling needs one that is not here.
        """

    def prepare(self, device: str) -> None:
        """Open the device, so that loading is quick. Never raises for an unknown device: loading does."""

    def load(self, folder: Path, main: str, device: str, function: str) -> Program:
        """Load a program from its folder.

        Raises:
            LoadFailed: the program, the device or the function is none that this runtime takes.
        """


def known() -> dict[str, str]:
    """Name -> ``module:Class`` of every runtime that is installed here, usable or not."""
    found = dict(BUILT_IN)
    for entry in entry_points(group="hil.runtimes"):
        found[entry.name] = entry.value
    return found


def resolve(reference: str) -> Any:
    """The class that a ``module:Class`` reference names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
