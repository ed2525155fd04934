"""ONNX Runtime's profile of a run: its kernels, with the nodes of the model that they compute."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.clock_pairs import mapped
from hil.controller.analysis.profile.onnxruntime_names import LAYOUT, by_name, kernel_nodes
from hil.controller.storage.isolated import Isolated, IsolatedError, IsolatedTimeout
from hil.core.artifacts import Model
from hil.core.tensors import TensorSpec
from hil.errors import RunFailed, StageTimeout, UsageError
from hil.formats.iree_values import mlir_type
from hil.formats.ort_values import dtype_of_type

_KERNEL = "_kernel_time"
_EVENT = {"name": str, "cat": str, "ts": int, "dur": int, "args": dict}
_RUN = "model_run"
# Kernels that hold others: their time is that of the kernels inside, which have rows of their own.
HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class KernelEvent:
    """One call of a kernel.

    Attributes:
        iteration: which run, from 0.
        name: the node's, as ONNX Runtime's optimiser left it.
        op_type: the kernel's operator, ``FusedConv`` and the like included.
        provider: the execution provider.
        nodes: the model's own nodes that it computes, or whose results it brings into another order.
        computes: whether it computes them.
        start_ns, duration_ns: by the clock that the pairs lead to; ONNX Runtime tells whole microseconds.
        shapes: as in :class:`~hil.core.timeline.OpRow`.
    """

    iteration: int
    name: str
    op_type: str
    provider: str
    nodes: tuple[str, ...]
    computes: bool
    start_ns: int
    duration_ns: int
    shapes: str


@dataclass(frozen=True)
class KernelNodes:
    """Which nodes of a model kernels compute, by the kernels' names.

    Attributes:
        kernels: of the model as it was optimised: name -> nodes.
        named: every node and every value of the model -> the node that makes it.
        top: (name, type) of the main graph's nodes, in order.
        note: why ``kernels`` is empty, or "".
    """

    kernels: Mapping[str, Sequence[str]]
    named: Mapping[str, str]
    top: Sequence[Sequence[str]]
    note: str = ""

    def of(self, name: str, op_type: str, index: str) -> tuple[str, ...]:
        """The nodes of a kernel; () of one that is of the optimiser's making and computes nothing.

        Args:
            name: its node's name; ONNX Runtime makes one up where the model has none.
            op_type: its operator.
            index: its number, which is the place of a node that was in the model from the start.
        """
        if name in self.kernels:
            return tuple(self.kernels[name])
        if name == f"{op_type}_{index}" and index.isdecimal() and self.top[int(index) :][:1]:
            own, own_type = self.top[int(index)]
            if own_type == op_type:
                return (own,)
        found = tuple(by_name(name, self.named))
        return () if op_type in LAYOUT and name not in self.named else found


@dataclass(frozen=True)
class OnnxRuntimeEvents:
    """A profile of ONNX Runtime's, read from its file whenever it is gone through: a run at a time is in memory.

    Attributes:
        path: the file.
        nodes: which nodes its kernels compute.
        warmup: so many of its first runs are left out.
        iterations: how many runs follow them.
        windows: (start, end) of each of these.
        clock: pairs of (profile's time, board's time), ns.
        notes: what is missing or uncertain, a line each.
    """

    path: Path
    nodes: KernelNodes
    warmup: int
    iterations: int
    windows: Sequence[tuple[int, int]]
    clock: Sequence[tuple[int, int]]
    notes: Sequence[str] = ()

    def events(self) -> Iterator[KernelEvent]:
        """Every kernel's call in the order of its start; those of warm-up are left out."""
        run = -self.warmup
        kernels: list[Mapping[str, Any]] = []
        for record in _records(self.path):
            if record["cat"] == "Node" and record["name"].endswith(_KERNEL):
                kernels.append(record)
            elif record["name"] == _RUN:
                if 0 <= run < self.iterations:
                    kernels.sort(key=lambda one: one["ts"])
                    yield from self._with_layouts([self._event(run, kernel) for kernel in kernels])
                kernels.clear()
                run += 1

    def _event(self, run: int, record: Mapping[str, Any]) -> KernelEvent:
        args = record["args"]
        name = record["name"].removesuffix(_KERNEL)
        op_type = str(args.get("op_name", ""))
        start, end = (mapped(time * 1000, self.clock) for time in (record["ts"], record["ts"] + record["dur"]))
        nodes = self.nodes.of(name, op_type, str(args.get("node_index")))
        ins, outs = (_types(args.get(key, ())) for key in ("input_type_shape", "output_type_shape"))
        provider = str(args.get("provider", ""))
        return KernelEvent(run, name, op_type, provider, nodes, bool(nodes), start, end - start, f"{ins} -> {outs}")

    @staticmethod
    def _with_layouts(run: Sequence[KernelEvent]) -> Iterator[KernelEvent]:
        """A run's kernels; those that only bring a value into another order with the nodes of who made it.

        Their names do not tell, and are others in every session: it is the last one that made a value of that type.
        """
        made: dict[str, tuple[str, ...]] = {}
        for number, kernel in enumerate(run):
            ins, _, outs = kernel.shapes.partition(" -> ")
            nodes = kernel.nodes
            if not nodes:
                following = (later.nodes for later in run[number + 1 :] if later.nodes)
                nodes = made.get(ins.partition(", ")[0]) or next(following, ())
                kernel = dataclasses.replace(kernel, nodes=nodes)
            made.update(dict.fromkeys(outs.split(", "), nodes))
            yield kernel


def _types(listed: Sequence[Mapping[str, Sequence[int]]]) -> str:
    pairs = [pair for item in listed if isinstance(item, dict) for pair in item.items()]
    return ", ".join(_type(kind, tuple(shape)) for kind, shape in pairs if isinstance(shape, list))


def _type(kind: str, shape: tuple[int, ...]) -> str:
    dtype = dtype_of_type(f"tensor({kind})")
    try:
        return mlir_type(TensorSpec("", dtype or kind, shape)).removeprefix("tensor<").removesuffix(">")
    except UsageError:  # strings
        return "x".join((*map(str, shape), kind))


def read_onnxruntime(
    path: Path,
    model: Model,
    *,
    isolated: Isolated,
    timeout: float | None,
    log: Path,
    optimized: Path | None = None,
    warmup: int = 0,
    iterations: int | None = None,
    clock: Sequence[tuple[int, int]] = (),
) -> OnnxRuntimeEvents:
    """Read a profile.

    Args:
        path: the JSON file; of one that is cut off, the runs that are whole are taken.
        model: the one that was run.
        isolated: where the model is read and optimised.
        timeout: seconds that it may take.
        log: what it prints is appended here.
        optimized: the model as ONNX Runtime's optimiser left it (``SessionOptions.optimized_model_filepath``); None:
            as it does on this machine.
        warmup: so many of the first runs are left out.
        iterations: so many follow them; None: all that do.
        clock: pairs of (profile's time, board's time), ns; linear, through the first and the last.

    Raises:
        RunFailed: it is no profile of ONNX Runtime's, or holds no whole run.
        StageTimeout: the limit was reached.
    """
    if not path.is_file():
        raise RunFailed(f"there is no profile {path.name}", hint="the run that was to write it says why")
    windows = []
    for record in _records(path, only=f'"{_RUN}"'):
        begin, end = record["ts"], record["ts"] + record["dur"]
        windows.append((mapped(begin * 1000, clock), mapped(end * 1000, clock)))
    runs = len(windows)
    windows = windows[warmup : None if iterations is None else warmup + iterations]
    if not windows:
        raise RunFailed(
            f"ONNX Runtime's profile {path.name} holds no whole run" + (f" after {runs} of warm-up" if runs else ""),
            hint="its run was ended before it was written out, or it is another kind of file",
        )
    notes = []
    if not _is_whole(path) or (iterations is not None and len(windows) < iterations):
        notes.append(f"ONNX Runtime's profile is cut off: {len(windows)} runs of it are whole")
    nodes = _kernel_nodes(model, isolated=isolated, timeout=timeout, log=log, optimized=optimized)
    notes += [nodes.note] if nodes.note else []
    return OnnxRuntimeEvents(path, nodes, warmup, len(windows), windows, tuple(clock), tuple(notes))


def _kernel_nodes(
    model: Model, *, isolated: Isolated, timeout: float | None, log: Path, optimized: Path | None
) -> KernelNodes:
    arguments = {
        "model": str(model.path.absolute()),
        "dims": dict(model.dims),
        "optimized": str(optimized.absolute()) if optimized else None,
    }
    try:
        found = isolated.call(kernel_nodes, arguments, timeout=timeout, log=log)
    except IsolatedTimeout as error:
        raise StageTimeout(f"finding the kernels' nodes {error.message}", detail=error.detail) from error
    except IsolatedError as error:
        return KernelNodes({}, {}, (), f"the model's nodes cannot be read: {error.message}")
    return KernelNodes(found["kernels"], found["named"], found["top"], found["note"])


def _records(path: Path, only: str = "") -> Iterator[Mapping[str, Any]]:
    """The events, each of which ONNX Runtime writes on a line of its own; what is no whole event is passed over."""
    with path.open("rb") as file:
        for line in file:
            if only and only.encode() not in line:
                continue
            try:
                record = json.loads(line.strip().rstrip(b","))
            except ValueError:
                continue
            if isinstance(record, dict) and all(type(record.get(name)) is kind for name, kind in _EVENT.items()):
                yield record


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(16, path.stat().st_size), 2)
        return file.read().rstrip().endswith(b"]")
