"""The worker: a process of its own for one program, so that a crash or a hang is nobody else's.

It is forked by :mod:`hil.agent.forkserver`, gets its orders as JSON over a socket, reads inputs from one shared
arena and writes outputs into another. It trusts nothing it runs: when the program dies, so does only this process.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent import framing
from hil.agent.runtimes import resolve
from hil.agent.shm import Arena, aligned
from hil.core import tensors
from hil.core.clock import now_ns
from hil.core.placement import Placement
from hil.core.tensors import Array, TensorSpec
from hil.errors import HilError, LoadFailed, RunFailed, UsageError

# Three such texts fit into a message, whatever they are made of.
_MOST_TEXT = 1 << 16


def serve(channel: framing.Channel, inputs: Arena, outputs: Arena) -> None:
    """Answer orders until the agent hangs up."""
    worker = _Worker(inputs, outputs)
    while True:
        try:
            order = channel.receive()
        except framing.Closed:
            return
        try:
            reply = {"ok": getattr(worker, f"do_{order['op']}")(order)}
        except HilError as error:
            reply = _error(type(error), error.message, error.hint, error.detail)
        except Exception as error:
            failed = RunFailed if worker.program else LoadFailed
            reply = _error(failed, f"{type(error).__name__}: {error}", "", traceback.format_exc())
        try:
            channel.send(reply)
        except framing.Closed:
            return


def _error(kind: type[HilError], message: str, hint: str, detail: str) -> dict[str, Any]:
    """The answer that tells an error: of a text that is too long for one the beginning, of a detail the end."""
    return {"error": [kind.__name__, message[:_MOST_TEXT], hint[:_MOST_TEXT], detail[-_MOST_TEXT:]]}


class _Worker:
    def __init__(self, inputs: Arena, outputs: Arena) -> None:
        self._in = inputs
        self._out = outputs
        self._runtime: Any = None
        self.program: Any = None
        self._folder = Path()
        self._sandboxed = False
        self._entries: list[dict[str, Any]] | None = None
        self._arrays: list[Array] = []
        self._placed: Placement | None = None

    def do_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the runtime and open its device ahead of the load."""
        self._sandboxed = "sandbox" in order["options"]
        if self._sandboxed:
            # Before the device is opened: that starts threads.
            from hil.agent import sandbox

            sandbox.enter([Path(one) for one in order["options"]["sandbox"]])
        self._runtime = resolve(order["runtime"])(order["options"])
        self._runtime.prepare(order["device"])
        return {}

    def do_load(self, order: dict[str, Any]) -> dict[str, Any]:
        start = now_ns()
        self._folder = Path(order["folder"]).absolute()
        self.program = self._runtime.load(self._folder, order["main"], order["device"], order["function"])
        return {
            "inputs": [_spec_to_json(spec) for spec in self.program.inputs],
            "outputs": [_spec_to_json(spec) for spec in self.program.outputs],
            "function": self.program.function,
            "load_ns": now_ns() - start,
        }

    def do_invoke(self, order: dict[str, Any]) -> dict[str, Any]:
        program = self.program
        program.bind(self._given(order["inputs"], order["bytes"]))
        renew = getattr(program, "renew", _nothing)
        warm_start = now_ns()
        for _ in range(order["warmup"]):
            renew()
            program.run()
        warm_end = now_ns()
        starts: list[int] = []
        ends: list[int] = []
        cpu_start = time.process_time_ns()
        for _ in range(order["iterations"]):
            renew()
            starts.append(now_ns())
            program.run()
            ends.append(now_ns())
        cpu_ns = time.process_time_ns() - cpu_start
        return {
            "outputs": self._store(program.outputs, program.fetch()),
            "start_ns": starts,
            "end_ns": ends,
            "warmup_ns": warm_end - warm_start,
            "cpu_ns": cpu_ns,
            "peak": _peak_memory(),
            "placement": self._news_of_placement(),
        }

    def do_profile(self, order: dict[str, Any]) -> dict[str, Any]:
        """A pass under the runtime's profiler: what it wrote goes where outputs do."""
        profile = getattr(self.program, "profile", None)
        if profile is None:
            raise RunFailed(
                "this runtime cannot profile", hint="one that can has a method for it: see hil.agent.runtimes.Program"
            )
        self.program.bind(self._given(order["inputs"], order["bytes"]))
        # In the program's folder, or a sandbox's own: they go with the program, whatever becomes of this process.
        where = None if self._sandboxed else self._folder
        with tempfile.TemporaryDirectory(dir=where, prefix="profile-") as place:
            tool = Path(order["tool"]) if order["tool"] else None
            files = profile(order["warmup"], order["iterations"], Path(place), tool)
            size = sum(file.stat().st_size for file in files)
            if size > order["limit"]:
                raise RunFailed(
                    f"the profile has {size} bytes and the board {order['limit']} of memory", hint="fewer iterations"
                )
            specs = tuple(TensorSpec(file.name, "uint8", (file.stat().st_size,)) for file in files)
            outputs = self._store(specs, [_mapped(file) for file in files])
        return {"outputs": outputs, "start_ns": [], "end_ns": [], "warmup_ns": 0, "cpu_ns": 0, "peak": _peak_memory()}

    def _news_of_placement(self) -> list[dict[str, Any]] | None:
        """Where the program ran; None where that is not known, or has been told."""
        tell = getattr(self.program, "placement", None)
        try:
            placed = tell() if tell is not None else None
        except Exception:  # of a library: the answer itself is there, and that this is not known is told as well
            traceback.print_exc()
            placed = None
        if placed is None or placed == self._placed:
            return None
        self._placed = placed
        return [part.to_json() for part in placed]

    def _given(self, entries: list[dict[str, Any]], size: int) -> list[Array]:
        """The inputs as views of the shared arena, made and checked once for calls that differ in content only."""
        if entries != self._entries or any(entry["dtype"] == "string" for entry in entries):
            view = self._in.view(size, grow=False)
            arrays = [
                tensors.from_bytes(view[entry["at"] : entry["at"] + entry["bytes"]], entry["dtype"], entry["shape"])
                for entry in entries
            ]
            _check(self.program.inputs, entries, arrays)
            self._entries, self._arrays = entries, arrays
        return self._arrays

    def _store(self, specs: tuple[TensorSpec, ...], arrays: list[Array]) -> list[dict[str, Any]]:
        """Lay the outputs out in the shared arena."""
        datas = [tensors.to_bytes(array) for array in arrays]
        view = self._out.view(sum(aligned(data.nbytes) for data in datas), grow=True)
        entries = []
        at = 0
        for spec, array, data in zip(specs, arrays, datas, strict=True):
            view[at : at + data.nbytes] = data
            entry = {"name": spec.name, "dtype": tensors.dtype_name(array.dtype), "shape": list(array.shape)}
            entries.append({**entry, "at": at, "bytes": data.nbytes})
            at += aligned(data.nbytes)
        return entries


def _check(specs: tuple[TensorSpec, ...], entries: list[dict[str, Any]], given: list[Array]) -> None:
    if len(specs) != len(given):
        raise UsageError(f"the program takes {len(specs)} inputs, got {len(given)}")
    for spec, entry in zip(specs, entries, strict=True):
        if not spec.accepts(entry["dtype"], entry["shape"]):
            given_type = tensors.type_text(entry["dtype"], entry["shape"])
            raise UsageError(f"input {spec} does not take a {given_type} tensor")


def _mapped(file: Path) -> Array:
    """A file's bytes."""
    if not file.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(file, np.uint8, "r")


def _nothing() -> None:
    """What a program without state does between its runs."""


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
