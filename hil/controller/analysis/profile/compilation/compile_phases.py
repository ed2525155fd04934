"""Run IREE's compiler phase by phase through its library, with a report on the passes of every phase.

This is a separate program (``python -m hil...compilation.compile_phases SOURCE OUT REPORTS FLAG...``), because the
library accepts flags only once per process. The MLIR module stays in memory between phases, as in iree-compile. Every
phase prints a JSON line: the name, and the start and end on this machine's monotonic clock. The report on the passes is
written to ``REPORTS/<phase>``. The exit code is 1 if a phase fails; the report then contains the message.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import IREE_PHASES, find_native_compiler
from hil.core.clock import get_time_ns


class _Compiler:
    """Wrapper for the library's C functions, without their prefix ``ireeCompiler``; pointers are opaque."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._library = ctypes.CDLL(str(find_native_compiler().parent / "libIREECompiler.so"))
        self("GlobalInitialize")
        arguments = ["iree-compile", *flags]
        texts = (ctypes.c_char_p * len(arguments))(*(text.encode() for text in arguments))
        self("SetupGlobalCL", ctypes.c_int(len(arguments)), texts, b"iree-compile", ctypes.c_bool(False))
        self._session = self.call_for_pointer("SessionCreate")
        self._invocation = self.call_for_pointer("InvocationCreate", self._session)
        self("InvocationEnableConsoleDiagnostics", self._invocation)

    def __call__(self, name: str, *arguments: Any, result: Any = None) -> Any:
        function = self._library[f"ireeCompiler{name}"]
        function.restype = result
        return function(*arguments)

    def call_for_pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self(name, *arguments, result=ctypes.c_void_p))

    def _open_handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        opened = ctypes.c_void_p()
        if error := self.call_for_pointer(name, *arguments, ctypes.byref(opened)):
            raise OSError(f"{name} failed: {self('ErrorGetMessage', error, result=ctypes.c_char_p).decode()}")
        return opened

    def read(self, path: str) -> bool:
        source = self._open_handle("SourceOpenFile", self._session, path.encode())
        return bool(self("InvocationParseSource", self._invocation, source, result=ctypes.c_bool))

    def run(self, before: str, phase: str) -> bool:
        self("InvocationSetCompileFromPhase", self._invocation, before.encode())
        self("InvocationSetCompileToPhase", self._invocation, phase.encode())
        standard = ctypes.c_int(0)
        return bool(self("InvocationPipeline", self._invocation, standard, result=ctypes.c_bool))

    def write(self, path: str) -> bool:
        out = self._open_handle("OutputOpenFile", path.encode())
        error = self.call_for_pointer("InvocationOutputVMBytecode", self._invocation, out)
        self("OutputKeep", out)
        self("OutputDestroy", out)
        return not error


def main(source: str, out: str, reports: str, flags: Sequence[str]) -> int:
    """Compile a file to a program; return the exit code."""
    compiler = _Compiler([*flags, "--mlir-timing", "--mlir-timing-display=tree", "--mlir-output-format=json"])
    steps: list[tuple[str, Callable[[], bool]]] = [("read", functools.partial(compiler.read, source))]
    steps += [
        (phase, functools.partial(compiler.run, before, phase)) for before, phase in itertools.pairwise(IREE_PHASES)
    ]
    steps.append(("write", functools.partial(compiler.write, out)))
    for name, step in steps:
        with (Path(reports) / name).open("wb") as report:
            os.dup2(report.fileno(), 2)
            begin = get_time_ns()
            done = step()
            print(json.dumps([name, begin, get_time_ns()]), flush=True)
        if not done:
            return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
    # Exit without the compiler's clean-up, which can take longer than the compilation.
    os._exit(code)
