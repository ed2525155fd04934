"""Find the dispatches of an IREE program, their submissions, and the ONNX nodes that they compute."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hil.controller.analysis.profile.compilation.estimate import SOFTMAX, sum_counts
from hil.controller.backends.compilers.iree import convert_for_iree
from hil.controller.backends.compilers.iree_program import choose_settings
from hil.controller.models.compiling import CachedCall, call_isolated, convert_compiler_errors
from hil.controller.models.conversions import OP_TYPES
from hil.controller.storage.cache import Cache
from hil.core.chips import choose_target_flags, parse_chip, split_flags
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.narrow_integers import is_narrowed
from hil.core.results import Artifact, Model
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FILE = "sites.json"
# Increase this when `build` returns a different result for the same program.
_VERSION = 1

_PHASES = ("dispatch-creation", "flow", "stream")
# Operations in a dispatch that belong to no model node. Their location is the location of their first user.
_SHARED = ("arith.constant", "tensor.empty", "tensor.dim", "linalg.fill", "linalg.index", "linalg.yield")
_FRAME = ("flow.", "affine.", "iree_tensor_ext.", "util.")

# Scalar operations that are not counted: constants, casts, indices.
_FREE = frozenset(
    "arith.constant arith.index_cast arith.extf arith.truncf arith.extsi arith.extui arith.trunci arith.bitcast "
    "linalg.index linalg.yield tensor.extract".split()
)
# Structured operations that only move elements.
_MOVING_STRUCTURED = frozenset(
    "linalg.copy linalg.transpose linalg.broadcast linalg.fill linalg.pack linalg.unpack".split()
)
_LOAD, _STORE = "iree_tensor_ext.dispatch.tensor.load", "iree_tensor_ext.dispatch.tensor.store"

# `"fc1"`, and `"model.mlir":12:3`, a line in a file.
_PART = re.compile(r'"(?P<name>(?:[^"\\]|\\.)*)"(?::(?P<line>\d+):\d+(?: to (?::\d+)?:\d+)?)?')
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|["\\nt])')
_LETTERS = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}


# Reason for uncertain nodes -> dispatch names.
_Doubts: TypeAlias = dict[str, set[str]]
_SEVERAL = "have several call sites: nodes of all call sites are listed"
_TURNS = "are called in several loops, assumed to have equal iteration counts"
_NOWHERE = "have no known call site: the nodes are unknown"


@dataclass(frozen=True)
class DispatchSite:
    """A dispatch call in the program."""

    key: str  # the dispatch's name; multiple sites may call the same dispatch
    nodes: tuple[str, ...]  # model nodes that the dispatch computes or prepares data for, in model order
    shapes: str = ""  # operands and results, as in :class:`~hil.core.timeline.OpRow`
    # flops, bytes: estimates per call, from the fused operations; None if unknown.
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Region:
    """Sites that are submitted to the device's queue together, in order."""

    loop: str  # the enclosing loop in the program, or ""
    sites: tuple[DispatchSite, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Dispatch names."""
        return tuple(site.key for site in self.sites)


@dataclass(frozen=True)
class Sites:
    """All sites in a program."""

    regions: Sequence[Region]  # in the program's order
    op_types: Mapping[str, str]  # node -> type, in the model's order
    notes: Sequence[str] = ()

    def match(self, submissions: Sequence[Sequence[str]]) -> tuple[list[tuple[DispatchSite, ...]], list[str]]:
        """Find a run's sites from every submission's dispatch names, in order.

        The dispatches identify a submission. If multiple regions have the same dispatches, hil uses the order of the
        submissions, provided that the loops around the regions make the order unambiguous. Otherwise the sites name the
        nodes of all these regions.

        Returns:
            The sites of every submission's dispatches, and notes on uncertain matches, one line each.
        """
        positions: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, keys in enumerate(submissions):
            positions[tuple(keys)].append(number)
        found: list[tuple[DispatchSite, ...]] = [()] * len(submissions)
        doubts: _Doubts = {why: set() for why in (_SEVERAL, _TURNS, _NOWHERE)}
        for keys, numbers in positions.items():
            for number, sites in zip(numbers, self._match_regions(keys, len(numbers), doubts), strict=True):
                found[number] = sites
        return found, [f"{len(keys)} dispatches, such as {min(keys)}, {why}" for why, keys in doubts.items() if keys]

    def match_schedule(self, keys: Sequence[str]) -> tuple[tuple[DispatchSite, ...], list[str]]:
        """Find the sites of a static schedule from its dispatch names, as :meth:`match` does for a submission."""
        sites = tuple(site for region in self.regions for site in region.sites)
        if [site.key for site in sites] == list(keys):
            return sites, []
        found, notes = self.match([keys])
        return found[0], notes

    def _match_regions(self, keys: tuple[str, ...], count: int, doubts: _Doubts) -> list[tuple[DispatchSite, ...]]:
        """Return the sites of ``count`` submissions, all of which consist of the dispatches ``keys``."""
        regions = [region for region in self.regions if region.keys == keys]
        if not regions:
            return [tuple(self._find_by_name(key, doubts) for key in keys)] * count
        if len({region.sites for region in regions}) == 1:
            return [regions[0].sites] * count
        if count % len(regions):
            doubts[_SEVERAL].update(keys)
            return [
                tuple(_merge_sites(sites) for sites in zip(*(region.sites for region in regions), strict=True))
            ] * count
        times = count // len(regions)
        if len({region.loop for region in regions}) == 1 and regions[0].loop:
            return [region.sites for region in regions] * times
        if times > 1:
            doubts[_TURNS].update(keys)
        return [region.sites for region in regions for _ in range(times)]

    def _find_by_name(self, key: str, doubts: _Doubts) -> DispatchSite:
        """Return the site of a dispatch, given only its name."""
        sites = [site for region in self.regions for site in region.sites if site.key == key]
        if not sites:
            doubts[_NOWHERE].add(key)
            return DispatchSite(key, ())
        if len({site.nodes for site in sites}) > 1:
            doubts[_SEVERAL].add(key)
        return _merge_sites(sites)


def _merge_sites(sites: Iterable[DispatchSite]) -> DispatchSite:
    listed = list(sites)
    nodes = dict.fromkeys(node for site in listed for node in site.nodes)
    return dataclasses.replace(listed[0], nodes=tuple(nodes))


def dispatch_sites(model: Model, artifact: Artifact, **how: Unpack[CachedCall]) -> Sites:
    """Find a program's sites by recompiling the original model up to an intermediate phase.

    The sites are unknown for programs with multiple models and for precompiled programs.

    Raises:
        UsageError: the artifact is neither an IREE program nor firmware.
    """
    if artifact.runtime not in ("iree", MCU_RUNTIME):
        raise UsageError(f"expected an IREE program, got a program for {artifact.runtime}")
    if artifact.function != model.function:
        return Sites((), {}, ("dispatch nodes are unknown for a program with several models",))
    values, flags = split_flags(artifact.flags)
    if values:
        flags = choose_target_flags(parse_chip(values).core, flags)
    return find_sites(model, flags, **how)


def find_sites(model: Model, flags: Sequence[str], **how: Unpack[CachedCall]) -> Sites:
    """Return the sites in a model's program, compiled with these flags; see :func:`dispatch_sites`."""
    if model.format == "vmfb":
        return Sites((), {}, ("dispatch nodes are unknown for a precompiled program",))
    taken = convert_for_iree(model, flags, {**how, "recompute": False})
    model = taken.model
    recipe = choose_settings(model, taken.flags)
    op_types = model.files.get(OP_TYPES)

    def make(folder: Path) -> None:
        what = "the dispatches' nodes"
        arguments = {
            "model": str(model.path.absolute()),
            "format": model.format,
            "dims": dict(model.dims),
            "op_types": str(op_types.absolute()) if op_types else None,
            "flags": list(recipe.flags),
            "log": str(how["log"].absolute()),
        }
        with convert_compiler_errors(f"finding {what}", died=what, failed=what):
            found = call_isolated(build, arguments, how)
        (folder / _FILE).write_text(json.dumps(found))

    key = Cache.key("sites", program=recipe.key, version=_VERSION)
    entry, _ = how["cache"].get_or_make(key, {**recipe.meta, "what": "dispatch nodes"}, make)
    document = json.loads(read_file(entry / _FILE))
    regions = tuple(
        Region(region["loop"], tuple(DispatchSite(key, tuple(nodes), *rest) for key, nodes, *rest in region["sites"]))
        for region in document["regions"]
    )
    return Sites(regions, document["op_types"], tuple(document["notes"]))


def build(
    model: str, format: str, dims: Mapping[str, int], op_types: str | None, flags: Sequence[str], log: str
) -> dict[str, Any]:
    """Compile to the phase *stream* and read the sites. Runs in an isolated process.

    Args:
        op_types: a JSON file with types for the names in MLIR's locations, in the model's order; or None.

    Returns:
        ``regions``: [{``loop``, ``sites``: [key, nodes, shapes, flops, bytes]}], see :class:`Region`;
        ``op_types``: node -> type; ``notes``.
    """
    from hil.controller.analysis.layers.graph import prepare_model
    from hil.controller.backends.compilers.iree_program import fail, run_compiler
    from hil.controller.models.importers.onnx_nodes import iter_nodes

    with make_temporary_folder("hil-sites-") as scratch:
        folder = Path(scratch)
        source = Path(model)
        if format == "onnx":
            from hil.controller.backends.compilers.onnx_to_mlir import convert

            source = folder / "model.mlirbc"
            convert(Path(model), dims, None, source, folder / "params.irpa", None, narrow=is_narrowed(flags))
        own_flags = [
            *flags,
            "--compile-to=stream",
            f"--dump-compilation-phases-to={folder / 'phases'}",
            "--mlir-print-debuginfo",
            "--mlir-print-local-scope",
            # Omit weights, which are not needed, and are several times larger as text.
            "--mlir-elide-elementsattrs-if-larger=8",
            "--mlir-elide-resource-strings-if-larger=8",
        ]
        code, output = run_compiler(source, folder / "stream.mlir", own_flags, folder, Path(log))
        if code:
            fail(code, output)
        if format == "onnx":
            nodes = iter_nodes(prepare_model(Path(model), dims).graph.node)
            types = {**{node.name: node.op_type for node in nodes}, **_read_imported_types(source)}
        else:
            types = json.loads(read_file(Path(op_types))) if op_types else {}
        modules = {phase: _parse_phase(folder / "phases", phase) for phase in _PHASES}
    return _read_sites(modules, types)


def _read_imported_types(source: Path) -> dict[str, str]:
    """Return node -> type for the imported module. Converting an old opset may have added nodes."""
    from iree.compiler import ir

    module = ir.Module.parse(read_file(source, MAX_MODEL_BYTES), context=ir.Context())
    types: dict[str, str] = {}

    def visit_operation(operation: Any) -> Any:
        if operation.name == "torch.operator":
            kind = ir.StringAttr(operation.attributes["name"]).value.removeprefix("onnx.")
            if kind != "Constant":  # also the model's weights
                types.update(dict.fromkeys(find_names(str(operation.location)), kind))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit_operation)
    return types


def _parse_phase(folder: Path, phase: str) -> Any:
    from iree.compiler import ir

    file = next(folder.glob(f"*.{phase}.mlir"))
    return ir.Module.parse(read_file(file, MAX_MODEL_BYTES), context=ir.Context())


def _read_sites(modules: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    notes: list[str] = []
    # Ignore names of functions: the compiler adds operations around the arguments, with the function's location.
    functions = {name for op in modules["dispatch-creation"].body.operations for name in find_names(str(op.location))}

    order = {name: number for number, name in enumerate(types)}

    def sort_nodes(nodes: Sequence[str]) -> list[str]:
        return sorted(dict.fromkeys(nodes), key=lambda name: order.get(name, 0))

    def list_names(operation: Any) -> list[str]:
        found = find_names(str(operation.location))
        return [name for name in found if (name in types if types else name not in functions)]

    fused = _list_dispatches(modules["dispatch-creation"])
    calls = list(_iter_matches(modules["flow"].operation, lambda op: op.name == "flow.dispatch"))
    if len(fused) != len(calls):
        notes.append("fused operations are identified only by the location of the dispatch")
        fused = calls
    made: dict[tuple[str, str], deque[list[Any]]] = defaultdict(deque)
    for site, call in zip(fused, calls, strict=True):
        found = sort_nodes(
            _list_fused_names(site, list_names) or list_names(site) or _find_nearby_names(site, list_names)
        )
        estimate = _estimate_dispatch(site) if site is not call else (None, None)
        made[read_dispatch_name(call.attributes), str(call.location)].append([found, _format_shapes(call), *estimate])
    regions = []
    for region, loop in _iter_command_regions(modules["stream"]):
        sites = []
        for command in _iter_matches(region, lambda op: op.name == "stream.cmd.dispatch"):
            key = read_dispatch_name(command.attributes)
            known = made[key, str(command.location)]
            # The scheduler may clone dispatches. Use the last known site for the remaining clones.
            facts = known.popleft() if len(known) > 1 else known[0] if known else [sort_nodes(list_names(command))]
            sites.append([key, *facts])
        if sites:
            regions.append({"loop": loop, "sites": sites})
    return {"regions": regions, "op_types": dict(types) or _list_location_kinds(modules, list_names), "notes": notes}


def _iter_matches(operation: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the matching operations in ``operation``, in order, without operations inside a match."""
    for region in operation.regions:
        for block in region:
            yield from _iter_block_matches(block, wanted)


def _iter_block_matches(block: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    for inner in block.operations:
        if wanted(inner.operation):
            yield inner.operation
        else:
            yield from _iter_matches(inner.operation, wanted)


def _list_dispatches(module: Any) -> list[Any]:
    return list(_iter_matches(module.operation, lambda op: op.name == "flow.dispatch.workgroups"))


def _is_fused(operation: Any) -> bool:
    """Return True if an operation in a dispatch corresponds to a model node."""
    return not operation.name.startswith(_FRAME) and operation.name not in _SHARED


def _list_fused_names(dispatch: Any, names: Callable[[Any], list[str]]) -> list[str]:
    """Return the names of the operations that are fused into a dispatch."""
    found: dict[str, None] = {}
    for operation in _iter_matches(dispatch, _is_fused):
        # Use the locations of scalar operations, which are precise. The dispatch's location also names operations that
        # share a constant with the dispatch.
        scalars = [names(inner) for inner in _iter_matches(operation, _is_leaf) if inner.name not in _SHARED]
        if not all(scalars) or not scalars:
            scalars.insert(0, names(operation))
        found.update(dict.fromkeys(name for inner_names in scalars for name in inner_names))
    return list(found)


def _is_leaf(operation: Any) -> bool:
    return not len(operation.regions)


def _find_nearby_names(operation: Any, names: Callable[[Any], list[str]]) -> list[str]:
    """Return the names of model nodes of the nearest operations that have such names.

    Searches the users of the operation's results first, then the producers of the operands.
    """
    for step in (_list_users, _list_producers):
        seen = [operation]
        front = [operation]
        while front:
            front = [near for each in front for near in step(each) if near not in seen]
            seen += front
            if found := [name for near in front for name in names(near)]:
                return found
    return []


def _list_users(operation: Any) -> list[Any]:
    return [use.owner.operation for result in operation.results for use in result.uses]


def _list_producers(operation: Any) -> list[Any]:
    from iree.compiler import ir

    owners = [operand.owner for operand in operation.operands]
    return [owner.operation for owner in owners if not isinstance(owner, ir.Block)]


def read_dispatch_name(attributes: Any) -> str:
    """Return the dispatch's name in ``[@executable::@dispatch]``."""
    return str(attributes["entry_points"]).rpartition("@")[2].rstrip("]").strip('"')


def _format_shapes(call: Any) -> str:
    ins, outs = ([_format_type(value.type) for value in values] for values in (call.operands, call.results))
    return f"{', '.join(filter(None, ins))} -> {', '.join(filter(None, outs))}"


def _format_type(kind: Any) -> str:
    text = str(kind)
    return text.removeprefix("tensor<").removesuffix(">").partition(", ")[0] if text.startswith("tensor<") else ""


def _iter_command_regions(module: Any) -> Iterator[tuple[Any, str]]:
    """Yield every command region with the outermost loop's id, or ""."""
    for number, function in enumerate(module.body.operations):
        for region in function.operation.regions:
            blocks = list(region)
            after = {at: _find_reachable(at, blocks) for at in range(len(blocks))}
            for at, block in enumerate(blocks):
                loop = min((other for other in after[at] if at in after[other]), default=None)
                for execute in _iter_block_matches(block, lambda op: op.name == "stream.cmd.execute"):
                    yield execute, "" if loop is None else f"{number}.{loop}"


def _find_reachable(start: int, blocks: Sequence[Any]) -> set[int]:
    """Return the blocks reachable from a block."""
    found: set[int] = set()
    front = [start]
    while front:
        for successor in list(blocks[front.pop()].operations)[-1].operation.successors:
            at = blocks.index(successor)
            if at not in found:
                found.add(at)
                front.append(at)
    return found


def _list_location_kinds(modules: Mapping[str, Any], names: Callable[[Any], list[str]]) -> dict[str, str]:
    """Return location -> operation kind, for a model without node types."""
    types: dict[str, str] = {}
    for dispatch in _list_dispatches(modules["dispatch-creation"]):
        for operation in _iter_matches(dispatch, _is_fused):
            for name in names(operation):
                types.setdefault(name, operation.name)
    return types


def find_names(location: str) -> list[str]:
    """Return the names in ``loc("fc1")``, ``loc(fused["a", "b"])`` or ``loc("model.mlir":12:3)``, without duplicates.

    A file line is named ``line 12``, if the location contains no other name.
    """
    names: dict[str, None] = {}
    lines: dict[str, None] = {}
    for part in _PART.finditer(location):
        if part["line"]:
            lines[f"line {part['line']}"] = None
        else:
            names[_decode_escapes(part["name"])] = None
    return list(names or lines)


def _decode_escapes(text: str) -> str:
    def decode_letter(match: re.Match[bytes]) -> bytes:
        return _LETTERS.get(match[1]) or bytes.fromhex(match[1].decode())

    return _ESCAPE.sub(decode_letter, text.encode()).decode(errors="replace")


def _estimate_dispatch(dispatch: Any) -> tuple[int | None, int | None]:
    """Return operations and bytes for a ``flow.dispatch.workgroups``; None if a shape or an operation is unknown."""
    moved = sum_counts(
        _count_accessed_bytes(op) for op in _iter_matches(dispatch, lambda op: op.name in (_LOAD, _STORE))
    )
    structured = _iter_matches(dispatch, lambda op: op.name.startswith(("linalg.", "iree_linalg_ext.")))
    return sum_counts(_count_operations(op) for op in structured), moved


def _count_accessed_bytes(operation: Any) -> int | None:
    """Return the byte size for a load's result or a store's first operand, possibly a tensor slice."""
    kind = (operation.results if operation.name == _LOAD else operation.operands)[0].type
    shape, bits = _read_static_shape(kind), _count_bits(kind.element_type)
    return None if shape is None or bits is None else -(-math.prod(shape) * bits // 8)


def _count_operations(operation: Any) -> int | None:
    if operation.name in _MOVING_STRUCTURED:
        return 0
    if operation.name == "linalg.softmax":
        shape = _read_static_shape(operation.operands[0].type)
        return None if shape is None else SOFTMAX * math.prod(shape)
    sizes = _read_trip_counts(operation)
    if sizes is None:
        return None
    scalars = sum(1 for inner in _iter_matches(operation, _is_leaf) if inner.name not in _FREE)
    return math.prod(sizes) * scalars


def _read_trip_counts(operation: Any) -> list[int] | None:
    """Return the trip counts for a structured operation's loops."""
    from iree.compiler import ir

    if not operation.name.startswith("linalg.") or "indexing_maps" not in operation.attributes:
        return None
    maps = [item.value for item in operation.attributes["indexing_maps"]]
    sizes: dict[int, int] = {}
    for map_, operand in zip(maps, operation.operands, strict=False):
        shape = _read_static_shape(operand.type)
        if shape is None:
            return None
        for expression, size in zip(map_.results, shape, strict=True):
            if isinstance(expression, ir.AffineDimExpr):
                sizes[expression.position] = size
    count = maps[0].n_dims if maps else 0
    return [sizes[position] for position in range(count)] if len(sizes) == count else None


def _read_static_shape(kind: Any) -> Sequence[int] | None:
    """Return a tensor's shape, () for a scalar; None if a dimension is dynamic."""
    from iree.compiler import ir

    if not isinstance(kind, ir.RankedTensorType):
        return ()
    return list(kind.shape) if kind.has_static_shape else None


def _count_bits(element: Any) -> int | None:
    from iree.compiler import ir

    if isinstance(element, ir.ComplexType):
        part = _count_bits(element.element_type)
        return None if part is None else 2 * part
    return 64 if isinstance(element, ir.IndexType) else getattr(element, "width", None)
