"""Read ONNX Runtime's profiles: kernel calls, and the model nodes that they compute."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.layers.graph import list_reads, prepare_model
from hil.controller.models.compiling import IsolatedCall, call_isolated
from hil.controller.models.importers.onnx_nodes import iter_nodes
from hil.controller.storage.isolation.isolated import convert_errors
from hil.core.bounded_json import parse_json
from hil.core.clock import convert_by_pairs
from hil.core.files import open_file
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, RunFailed, UsageError
from hil.formats.iree_values import format_mlir_type
from hil.formats.onnx_file import load_onnx
from hil.formats.ort_values import parse_type

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KERNEL = "_kernel_time"
_EVENT = {"name": str, "cat": str, "ts": int, "dur": int, "args": dict}
_RUN = "model_run"
# Kernels that run other kernels. Their time includes the inner kernels, which have separate rows.
HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})

# Separators and suffixes that the optimiser adds to names.
_JOINT = re.compile(r"^fused |[/ ]")
_ENDING = re.compile(r"(?:_token_\d+|_nchwc|_new_reshape|_nhwc|_\d+)$")
# Maximum length of a suffix, and of a name. Searching for every suffix takes quadratic time.
_MAX_ENDING, _MAX_NAME = 40, 4096
# Maximum line length. ONNX Runtime writes an event in a few hundred bytes, so a longer line is damaged.
_MAX_LINE, _MAX_LINE_VALUES = 1 << 20, 100_000
_MAX_INDEX_DIGITS = 9
_MAX_TIME_US = 1 << 52
# Kernels that only change a value's layout or type, if the optimiser added them.
LAYOUT = frozenset("ReorderInput ReorderOutput Reshape Transpose Cast Unsqueeze Squeeze Identity MemcpyToHost".split())
# Operators that start a fusion: the optimiser fuses operators that follow them, never operators that precede them.
_HEAVY = frozenset(
    "Conv ConvTranspose ConvInteger QLinearConv Gemm MatMul MatMulInteger QLinearMatMul MaxPool AveragePool LpPool "
    "GlobalMaxPool GlobalAveragePool GlobalLpPool LSTM GRU RNN Attention".split()
)


@dataclass(frozen=True)
class KernelEvent:
    """A kernel call."""

    iteration: int
    name: str
    op_type: str  # the kernel's operator, possibly fused, such as ``FusedConv``
    nodes: tuple[str, ...]  # model nodes that the kernel computes, or whose results it copies to another layout
    computes: bool  # False if the kernel only copies the results of nodes
    # start_ns, duration_ns: on the board's clock; ONNX Runtime reports whole microseconds.
    start_ns: int
    duration_ns: int
    shapes: str  # as in :class:`~hil.core.timeline.OpRow`


@dataclass(frozen=True)
class KernelNodes:
    """A model's nodes by kernel name."""

    kernels: Mapping[str, Sequence[str]]  # kernel in the optimised model -> nodes
    named: Mapping[str, str]  # node or value name in the model -> producing node
    top: Sequence[Sequence[str]]  # main graph nodes as (name, type), in order
    note: str = ""  # why ``kernels`` is empty, or ""

    def find_nodes(self, name: str, op_type: str, index: str) -> tuple[str, ...]:
        """Return a kernel's nodes. Return () for a kernel that the optimiser added and that computes nothing.

        Args:
            index: the kernel's index. If the optimiser did not change the node, the index is the index of the model
                node.
        """
        if name in self.kernels:
            return tuple(self.kernels[name])
        is_number = index.isdecimal() and len(index) <= _MAX_INDEX_DIGITS
        if is_number and name == f"{op_type}_{index}" and int(index) < len(self.top):
            own, own_type = self.top[int(index)]
            if own_type == op_type:
                return (own,)
        found = tuple(find_by_name(name, self.named))
        return () if op_type in LAYOUT and name not in self.named else found


@dataclass(frozen=True)
class OnnxRuntimeEvents:
    """An ONNX Runtime profile, read from the file at every pass, run by run."""

    path: Path
    nodes: KernelNodes
    warmup: int  # warm-up runs to skip
    iterations: int  # runs after them
    windows: Sequence[tuple[int, int]]  # (start, end) per run
    clock: Sequence[tuple[int, int]]  # (profile's time, board's time) pairs, ns
    notes: Sequence[str] = ()  # omitted and uncertain data, one line each

    def events(self) -> Iterator[KernelEvent]:
        """Yield every kernel call by start, without warm-up."""
        run = -self.warmup
        kernels: list[Mapping[str, Any]] = []
        for record in _read_records(self.path):
            if record["cat"] == "Node" and record["name"].endswith(_KERNEL):
                kernels.append(record)
            elif record["name"] == _RUN:
                if 0 <= run < self.iterations:
                    kernels.sort(key=lambda one: one["ts"])
                    yield from self._assign_layouts([self._build_event(run, kernel) for kernel in kernels])
                kernels.clear()
                run += 1

    def _build_event(self, run: int, record: Mapping[str, Any]) -> KernelEvent:
        args = record["args"]
        name = record["name"].removesuffix(_KERNEL)
        op_type = str(args.get("op_name", ""))
        start, end = (
            convert_by_pairs(time * 1000, self.clock) for time in (record["ts"], record["ts"] + record["dur"])
        )
        nodes = self.nodes.find_nodes(name, op_type, str(args.get("node_index")))
        ins, outs = (_format_types(args.get(key, ())) for key in ("input_type_shape", "output_type_shape"))
        return KernelEvent(run, name, op_type, nodes, bool(nodes), start, end - start, f"{ins} -> {outs}")

    @staticmethod
    def _assign_layouts(run: Sequence[KernelEvent]) -> Iterator[KernelEvent]:
        """Yield a run's kernels. A kernel that only changes a layout gets the nodes of the producer.

        Value names differ in every session, so the last kernel with a matching output type counts as the producer.
        """
        made: dict[str, tuple[str, ...]] = {}
        following: list[tuple[str, ...]] = [()]
        for kernel in reversed(run):
            following.append(kernel.nodes or following[-1])
        for kernel in run:
            following.pop()
            ins, _, outs = kernel.shapes.partition(" -> ")
            nodes = kernel.nodes
            if not nodes:
                nodes = made.get(ins.partition(", ")[0]) or following[-1]
                kernel = dataclasses.replace(kernel, nodes=nodes)
            made.update(dict.fromkeys(outs.split(", "), nodes))
            yield kernel


def _format_types(listed: Any) -> str:
    items = listed if isinstance(listed, list) else []
    pairs = [pair for item in items if isinstance(item, dict) for pair in item.items()]
    return ", ".join(_format_type(kind, tuple(shape)) for kind, shape in pairs if isinstance(shape, list))


def _format_type(kind: str, shape: tuple[int, ...]) -> str:
    dtype = parse_type(f"tensor({kind})")
    try:
        return format_mlir_type(TensorSpec("", dtype or kind, shape)).removeprefix("tensor<").removesuffix(">")
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
    """Read a profile. If the file is truncated, read the complete runs.

    Args:
        warmup: number of warm-up runs to skip.
        iterations: number of runs after them; None for all.
        clock: (profile's time, board's time) pairs in ns, see :func:`hil.core.clock.convert_by_pairs`.

    Raises:
        RunFailed: the file is not an ONNX Runtime profile, or contains no complete run.
    """
    if not path.is_file():
        raise RunFailed(f"profile {path.name} not found", hint="see the error of the run that should have written it")
    windows = []
    for record in _read_records(path, only=f'"{_RUN}"'):
        begin, end = record["ts"], record["ts"] + record["dur"]
        windows.append((convert_by_pairs(begin * 1000, clock), convert_by_pairs(end * 1000, clock)))
    runs = len(windows)
    windows = windows[warmup : None if iterations is None else warmup + iterations]
    if not windows:
        raise RunFailed(
            f"ONNX Runtime's profile {path.name} has no complete run"
            + (f" after the warm-up (it has {runs} runs in total)" if runs else ""),
            hint="the run ended before the file was complete, or the file has a different format",
        )
    notes = []
    with open_file(path) as file:
        file.seek(-min(16, path.stat().st_size), os.SEEK_END)
        is_whole = file.read().rstrip().endswith(b"]")
    if not is_whole or (iterations is not None and len(windows) < iterations):
        notes.append(f"ONNX Runtime's profile is truncated: {len(windows)} complete runs")
    arguments = {"model": str(model.path.absolute()), "dims": dict(model.dims)}
    try:
        with convert_errors("", "finding the kernels' nodes", ImportFailed, "the model's nodes cannot be read"):
            nodes = KernelNodes(**call_isolated(find_kernel_nodes, arguments, how))
    except ImportFailed as error:
        nodes = KernelNodes({}, {}, (), error.message)
    notes += [nodes.note] if nodes.note else []
    return OnnxRuntimeEvents(path, nodes, warmup, len(windows), windows, tuple(clock), tuple(notes))


def _read_records(path: Path, only: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield the events. ONNX Runtime writes an event per line. Incomplete events are skipped."""
    with open_file(path) as file:
        while line := file.readline(_MAX_LINE):
            if only and only.encode() not in line:
                continue
            try:
                record = parse_json(line.strip().rstrip(b","), _MAX_LINE_VALUES)
            except ValueError:
                continue
            if _is_event(record):
                yield record


def _is_event(record: Any) -> bool:
    is_typed = isinstance(record, dict) and all(type(record.get(name)) is kind for name, kind in _EVENT.items())
    # Times in nanoseconds must fit in 64 bits.
    return is_typed and all(abs(record[name]) < _MAX_TIME_US for name in ("ts", "dur"))


def find_kernel_nodes(model: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Find the nodes for a session's kernels on this machine; return the fields of :class:`KernelNodes`.

    The optimiser fuses nodes, adds layout changes, and renames nodes. Model values that still exist in the optimised
    model delimit the fused nodes. Runs in an isolated process.
    """
    graph = prepare_model(Path(model), dims).graph
    named = {value: node.name for node in iter_nodes(graph.node) for value in node.output if value}
    named.update({node.name: node.name for node in iter_nodes(graph.node)})
    note = ""
    kernels: dict[str, list[str]] = {}
    try:
        left = _load_optimised_graph(model)
    except Exception as error:  # without the optimised model, kernel names still identify some nodes
        note = f"kernels are matched to nodes by name only: {str(error).strip().splitlines()[0][:200]}"
    else:
        kernels = _Fusions(graph, left).map_kernels()
    top = [[node.name, node.op_type] for node in graph.node]
    return {"kernels": kernels, "named": named, "top": top, "note": note}


def _load_optimised_graph(model: str) -> Any:
    import onnxruntime

    with make_temporary_folder("hil-ort-") as scratch:
        path = Path(scratch) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path)
        # Write the weights to a separate file, because a protobuf file is limited to 2 GB. The weights are not needed.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return load_onnx(path).graph


def find_by_name(name: str, named: Mapping[str, str]) -> list[str]:
    """Return the nodes that a kernel's name contains, such as ``fused Gemm_1`` or ``MatMul_2/MatMulAddFusion``."""
    found: dict[str, None] = {}
    if len(name) > _MAX_NAME:
        return []
    for part in (name, *_JOINT.split(name)):
        while part and part not in named and (shorter := _strip_ending(part)) != part:
            part = shorter
        if part in named:
            found[named[part]] = None
            if part == name:
                break
    return list(found)


def _strip_ending(name: str) -> str:
    return name[:-_MAX_ENDING] + _ENDING.sub("", name[-_MAX_ENDING:])


class _Fusions:
    """Matches the optimised graph with the model's graph."""

    def __init__(self, graph: Any, left: Any) -> None:
        self._nodes = {node.name: node for node in graph.node}
        self._order = {name: number for number, name in enumerate(self._nodes)}
        self._maker = {value: node.name for node in graph.node for value in node.output if value}
        self._users = _map_users(graph.node)
        self._left = list(left.node)
        for node in self._left:
            # In the profile, unnamed nodes are named by type and index, as in a prepared model.
            node.name = node.name or next((self._maker[value] for value in node.output if value in self._maker), "")
        self._left_users = _map_users(self._left)
        self._ends = {id(node): self._find_ends(node) for node in self._left}
        # Values that still exist end a fusion, because a kernel produces each of them.
        there = {
            own for node in self._left for value in (*node.input, *node.output) if (own := self._resolve_value(value))
        }
        self._there = there.union(*self._ends.values())
        self._constant = self._find_constant_nodes(graph)

    def map_kernels(self) -> dict[str, list[str]]:
        """Return node of the optimised graph -> model nodes that it computes, in order."""
        own = {name: name for name in self._nodes}
        named = [node for node in self._left if node.name and not self._is_layout_change(node)]
        found = {node.name: set(find_by_name(node.name, own)) for node in named}
        taken = set().union(*found.values())
        for node in named:
            was = self._nodes.get(node.name)
            if was is None or was.op_type != node.op_type or list(was.output) != list(node.output):
                found[node.name] |= {inner for end in self._ends[id(node)] for inner in self._collect_cone(end)} - taken
                taken |= found[node.name]
        self._assign_fused_nodes(found, taken)
        return {kernel: sorted(nodes, key=self._order.__getitem__) for kernel, nodes in found.items() if nodes}

    def _is_layout_change(self, node: Any) -> bool:
        return node.op_type in LAYOUT and node.name not in self._nodes

    def _resolve_value(self, value: str) -> str:
        """Return the model value in an optimised value's name, or ""."""
        while value not in self._maker and (shorter := _strip_ending(value)) != value:
            value = shorter
        return value if value in self._maker else ""

    def _find_ends(self, node: Any) -> set[str]:
        """Return the model values that a kernel produces, directly or through layout changes."""
        if node.name not in self._nodes and (own := self._resolve_value(node.name)):
            return {own}  # such as relu1.out_nchwc: a node named after a value
        ends: set[str] = set()
        front = [value for value in node.output if value]
        while front:
            value = front.pop()
            if own := self._resolve_value(value):
                ends.add(own)
            else:
                after = [user for user in self._left_users.get(value, ()) if self._is_layout_change(user)]
                front += [made for user in after for made in user.output if made]
        return ends

    def _collect_cone(self, end: str) -> list[str]:
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

    def _find_constant_nodes(self, graph: Any) -> set[str]:
        """Return the nodes that do not depend on inputs. The optimiser has already computed these nodes."""
        changing = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            if any(value in changing for value in list_reads(node)):
                changing.update(node.output)
        return {node.name for node in graph.node if not any(value in changing for value in node.output)}

    def _assign_fused_nodes(self, found: dict[str, set[str]], taken: set[str]) -> None:
        """Assign a node without a known kernel to the kernel that computes a neighbouring node.

        The optimiser fused such nodes.
        """
        kernel_of = {node: kernel for kernel, nodes in found.items() for node in nodes}
        rest = [name for name in self._nodes if name not in taken and name not in self._constant]
        # Process dequantisations last, from the end, because a dequantisation is fused into its users.
        undoing = dict.fromkeys(name for name in rest if self._nodes[name].op_type == "DequantizeLinear")
        for name in [*(name for name in rest if name not in undoing), *reversed(undoing)]:
            node = self._nodes[name]
            before = [self._maker[value] for value in node.input if value in self._maker]
            after = [user.name for value in node.output for user in self._users.get(value, ())]
            near = [*after, *before] if name in undoing else [*before, *after]
            kernel = next((kernel_of[other] for other in near if other in kernel_of), None)
            if kernel is not None:
                kernel_of[name] = kernel
                found[kernel].add(name)


def _map_users(nodes: Iterable[Any]) -> dict[str, list[Any]]:
    users: dict[str, list[Any]] = {}
    for node in nodes:
        for value in node.input:
            users.setdefault(value, []).append(node)
    return users
