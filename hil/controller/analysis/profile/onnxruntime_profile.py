"""Read ONNX Runtime's profiles: which kernels ran, and which nodes of the model they compute."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.layers.graph import prepared, reads
from hil.controller.models.compiling import IsolatedCall, call_isolated
from hil.controller.models.importers.onnx_nodes import nodes_of
from hil.controller.storage.isolated import naming_errors
from hil.core.clock import by_pairs
from hil.core.results import Model
from hil.core.scratch import temporary_folder
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, RunFailed, UsageError
from hil.formats.iree_values import mlir_type
from hil.formats.ort_values import dtype_of_type

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KERNEL = "_kernel_time"
_EVENT = {"name": str, "cat": str, "ts": int, "dur": int, "args": dict}
_RUN = "model_run"
# Kernels that hold others: their time is that of the kernels within, which have rows of their own.
HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})

# What the optimiser adds to names: separators and suffixes.
_JOINT = re.compile(r"^fused |[/ ]")
_ENDING = re.compile(r"(?:_token_\d+|_nchwc|_new_reshape|_nhwc|_\d+)$")
# Kernels that only change the layout or type of a value, if the optimiser added them.
LAYOUT = frozenset("ReorderInput ReorderOutput Reshape Transpose Cast Unsqueeze Squeeze Identity MemcpyToHost".split())
# Operators after which the optimiser fuses others, never before.
_HEAVY = frozenset(
    "Conv ConvTranspose ConvInteger QLinearConv Gemm MatMul MatMulInteger QLinearMatMul MaxPool AveragePool LpPool "
    "GlobalMaxPool GlobalAveragePool GlobalLpPool LSTM GRU RNN Attention".split()
)


@dataclass(frozen=True)
class KernelEvent:
    """A call of a kernel."""

    iteration: int
    name: str
    op_type: str  # the kernel's operator, possibly a fused one such as ``FusedConv``
    nodes: tuple[str, ...]  # the model's nodes that it computes, or whose results it copies to another layout
    computes: bool  # whether it computes them
    # start_ns, duration_ns: on the board's clock; ONNX Runtime reports whole microseconds.
    start_ns: int
    duration_ns: int
    shapes: str  # as in :class:`~hil.core.timeline.OpRow`


@dataclass(frozen=True)
class KernelNodes:
    """The nodes of a model by the kernels' names."""

    kernels: Mapping[str, Sequence[str]]  # kernel of the optimised model -> nodes
    named: Mapping[str, str]  # every node and every value of the model -> the node that makes it
    top: Sequence[Sequence[str]]  # (name, type) of the main graph's nodes, in order
    note: str = ""  # why ``kernels`` is empty, or ""

    def of(self, name: str, op_type: str, index: str) -> tuple[str, ...]:
        """Return the nodes of a kernel; () if the optimiser added it and it computes nothing.

        Args:
            index: its number, which is that of the model's node if the optimiser did not change it.
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
    """A profile of ONNX Runtime, read from its file at each pass, one run at a time."""

    path: Path
    nodes: KernelNodes
    warmup: int  # number of first runs that are left out
    iterations: int  # number of runs after them
    windows: Sequence[tuple[int, int]]  # (start, end) of each
    clock: Sequence[tuple[int, int]]  # pairs of (profile's time, board's time), ns
    notes: Sequence[str] = ()  # on what is missing or uncertain, a line each

    def events(self) -> Iterator[KernelEvent]:
        """Yield every kernel's call by start, without warm-up."""
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
        start, end = (by_pairs(time * 1000, self.clock) for time in (record["ts"], record["ts"] + record["dur"]))
        nodes = self.nodes.of(name, op_type, str(args.get("node_index")))
        ins, outs = (_types(args.get(key, ())) for key in ("input_type_shape", "output_type_shape"))
        return KernelEvent(run, name, op_type, nodes, bool(nodes), start, end - start, f"{ins} -> {outs}")

    @staticmethod
    def _with_layouts(run: Sequence[KernelEvent]) -> Iterator[KernelEvent]:
        """Yield a run's kernels; those that only change a layout get the nodes of the kernel that made the value.

        Their names differ in every session: the last kernel that made a value of the same type is taken.
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
    warmup: int = 0,
    iterations: int | None = None,
    clock: Sequence[tuple[int, int]] = (),
    **how: Unpack[IsolatedCall],
) -> OnnxRuntimeEvents:
    """Read a profile; of one that is cut off, the complete runs.

    Args:
        warmup: number of first runs to leave out.
        iterations: number of runs after them; None for all.
        clock: pairs of (profile's time, board's time) in ns, see :func:`hil.core.clock.by_pairs`.

    Raises:
        RunFailed: the file is no profile of ONNX Runtime, or holds no complete run.
    """
    if not path.is_file():
        raise RunFailed(f"there is no profile {path.name}", hint="the run that was to write it says why")
    windows = []
    for record in _records(path, only=f'"{_RUN}"'):
        begin, end = record["ts"], record["ts"] + record["dur"]
        windows.append((by_pairs(begin * 1000, clock), by_pairs(end * 1000, clock)))
    runs = len(windows)
    windows = windows[warmup : None if iterations is None else warmup + iterations]
    if not windows:
        raise RunFailed(
            f"ONNX Runtime's profile {path.name} holds no whole run" + (f" after {runs} of warm-up" if runs else ""),
            hint="its run was ended before it was written out, or it is another kind of file",
        )
    notes = []
    with path.open("rb") as file:
        file.seek(-min(16, path.stat().st_size), os.SEEK_END)
        is_whole = file.read().rstrip().endswith(b"]")
    if not is_whole or (iterations is not None and len(windows) < iterations):
        notes.append(f"ONNX Runtime's profile is cut off: {len(windows)} runs of it are whole")
    arguments = {"model": str(model.path.absolute()), "dims": dict(model.dims)}
    try:
        with naming_errors("", "finding the kernels' nodes", ImportFailed, "the model's nodes cannot be read"):
            nodes = KernelNodes(**call_isolated(kernel_nodes, arguments, how))
    except ImportFailed as error:
        nodes = KernelNodes({}, {}, (), error.message)
    notes += [nodes.note] if nodes.note else []
    return OnnxRuntimeEvents(path, nodes, warmup, len(windows), windows, tuple(clock), tuple(notes))


def _records(path: Path, only: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield the events; ONNX Runtime writes each on a line. Incomplete ones are skipped."""
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


def kernel_nodes(model: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Find the nodes of the kernels of a session on this machine; the fields of :class:`KernelNodes`.

    The optimiser fuses nodes, adds some that change a layout, and renames all. Values of the model that are still there
    delimit the fused nodes. Runs in an isolated process.
    """
    graph = prepared(Path(model), dims).graph
    named = {value: node.name for node in nodes_of(graph.node) for value in node.output if value}
    named.update({node.name: node.name for node in nodes_of(graph.node)})
    note = ""
    kernels: dict[str, list[str]] = {}
    try:
        left = _optimized(model)
    except Exception as error:  # without the optimised model, names still tell some nodes
        note = f"kernels are known by their names alone: {str(error).strip().splitlines()[0][:200]}"
    else:
        kernels = _Fusions(graph, left).kernels()
    top = [[node.name, node.op_type] for node in graph.node]
    return {"kernels": kernels, "named": named, "top": top, "note": note}


def _optimized(model: str) -> Any:
    import onnx
    import onnxruntime

    with temporary_folder("hil-ort-") as scratch:
        path = Path(scratch) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path)
        # Weights go to a file of their own: a protobuf file ends at 2 GB, and they are not needed.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return onnx.load(path, load_external_data=False).graph


def by_name(name: str, named: Mapping[str, str]) -> list[str]:
    """Return the nodes in a kernel's name: ``fused Gemm_1``, ``MatMul_2/MatMulAddFusion``, ``relu1.out_nchwc``."""
    found: dict[str, None] = {}
    for part in (name, *_JOINT.split(name)):
        while part and part not in named and (shorter := _ENDING.sub("", part)) != part:
            part = shorter
        if part in named:
            found[named[part]] = None
            if part == name:
                break
    return list(found)


class _Fusions:
    """Matches the optimised graph with the model's own."""

    def __init__(self, graph: Any, left: Any) -> None:
        self._nodes = {node.name: node for node in graph.node}
        self._order = {name: number for number, name in enumerate(self._nodes)}
        self._maker = {value: node.name for node in graph.node for value in node.output if value}
        self._users = _users(graph.node)
        self._left = list(left.node)
        for node in self._left:
            # In the profile, unnamed nodes are named by type and index, as in a prepared model.
            node.name = node.name or next((self._maker[value] for value in node.output if value in self._maker), "")
        self._left_users = _users(self._left)
        self._ends = {id(node): self._ends_of(node) for node in self._left}
        # A value that still exists ends a fusion: its users read what another kernel made.
        there = {own for node in self._left for value in (*node.input, *node.output) if (own := self._own(value))}
        self._there = there.union(*self._ends.values())
        self._constant = self._constants(graph)

    def kernels(self) -> dict[str, list[str]]:
        """Return computing node of the optimised graph -> nodes of the model, in order."""
        own = {name: name for name in self._nodes}
        named = [node for node in self._left if node.name and not self._only_moves(node)]
        found = {node.name: set(by_name(node.name, own)) for node in named}
        taken = set().union(*found.values())
        for node in named:
            was = self._nodes.get(node.name)
            if was is None or was.op_type != node.op_type or list(was.output) != list(node.output):
                found[node.name] |= {inner for end in self._ends[id(node)] for inner in self._cone(end)} - taken
                taken |= found[node.name]
        self._share_out(found, taken)
        return {kernel: sorted(nodes, key=self._order.__getitem__) for kernel, nodes in found.items() if nodes}

    def _only_moves(self, node: Any) -> bool:
        return node.op_type in LAYOUT and node.name not in self._nodes

    def _own(self, value: str) -> str:
        """Return the model's value in the name of an optimised value; "" if there is none."""
        while value not in self._maker and (shorter := _ENDING.sub("", value)) != value:
            value = shorter
        return value if value in self._maker else ""

    def _ends_of(self, node: Any) -> set[str]:
        """Return the model's values that a kernel makes, directly or through changes of layout."""
        if node.name not in self._nodes and (own := self._own(node.name)):
            return {own}  # such as relu1.out_nchwc: a node named after its value
        ends: set[str] = set()
        front = [value for value in node.output if value]
        while front:
            value = front.pop()
            if own := self._own(value):
                ends.add(own)
            else:
                after = [user for user in self._left_users.get(value, ()) if self._only_moves(user)]
                front += [made for user in after for made in user.output if made]
        return ends

    def _cone(self, end: str) -> list[str]:
        """Return the nodes that compute a value from other values that still exist."""
        found: dict[str, None] = {}
        front = [self._maker[end]]
        while front:
            name = front.pop()
            if name not in found:
                found[name] = None
                if self._nodes[name].op_type not in _HEAVY:
                    read = [value for value in self._nodes[name].input if value in self._maker]
                    front += [self._maker[value] for value in read if value not in self._there]
        return [name for name in found if name not in self._constant]

    def _constants(self, graph: Any) -> set[str]:
        """Return the nodes whose results do not depend on inputs: the optimiser computes them."""
        changing = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            if any(value in changing for value in reads(node)):
                changing.update(node.output)
        return {node.name for node in graph.node if not any(value in changing for value in node.output)}

    def _share_out(self, found: dict[str, set[str]], taken: set[str]) -> None:
        """Give nodes without a kernel, fused without a trace, to the kernel that makes their inputs."""
        kernel_of = {node: kernel for kernel, nodes in found.items() for node in nodes}
        rest = [name for name in self._nodes if name not in taken and name not in self._constant]
        # A dequantisation is fused into its users: go through these at last, from the end.
        undoing = [name for name in rest if self._nodes[name].op_type == "DequantizeLinear"]
        for name in [*(name for name in rest if name not in undoing), *reversed(undoing)]:
            node = self._nodes[name]
            before = [self._maker[value] for value in node.input if value in self._maker]
            after = [user.name for value in node.output for user in self._users.get(value, ())]
            near = [*after, *before] if name in undoing else [*before, *after]
            kernel = next((kernel_of[other] for other in near if other in kernel_of), None)
            if kernel is not None:
                kernel_of[name] = kernel
                found[kernel].add(name)


def _users(nodes: Iterable[Any]) -> dict[str, list[Any]]:
    users: dict[str, list[Any]] = {}
    for node in nodes:
        for value in node.input:
            users.setdefault(value, []).append(node)
    return users
