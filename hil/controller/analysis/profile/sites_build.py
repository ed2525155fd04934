"""What happens in the isolated process: a model compiled half way, and its dispatches' call sites read out of that.

Nothing here is called by the controller. Three of the compiler's phases are looked into:

- *dispatch-creation*: a dispatch still holds the operations that were fused, each with its node's name as location;
- *flow*: the same dispatches, in the same order, each now a call of an executable that equal ones may share;
- *stream*: those calls as commands, in the order in which they are handed to the device.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.estimate_mlir import dispatch_estimate
from hil.controller.analysis.profile.locations import names_in
from hil.core.scratch import temporary_folder

_PHASES = ("dispatch-creation", "flow", "stream")
# Operations of a dispatch that stand for none of the model's: they carry the location of whoever needed one first.
_SHARED = ("arith.constant", "tensor.empty", "tensor.dim", "linalg.fill", "linalg.index", "linalg.yield")
_FRAME = ("flow.", "affine.", "iree_tensor_ext.", "util.")


def build(
    model: str, format: str, dims: Mapping[str, int], op_types: str | None, flags: Sequence[str], log: str
) -> dict[str, Any]:
    """Compile as far as *stream* and read the sites.

    Args:
        model: the ONNX or MLIR file.
        format: ``onnx`` or ``mlir``.
        dims: sizes of symbolic dimensions (ONNX).
        op_types: a JSON file that says what the names in the locations of MLIR are, in the model's order; or None.
        flags: those of the program itself.
        log: the file that standard error goes to.

    Returns:
        ``regions``: a list of {``loop``, ``sites``: [key, nodes, shapes, flops, bytes]}, see
        :class:`hil.controller.analysis.profile.sites.Region`; ``op_types``: node -> type; ``notes``.

    Raises:
        UsageError, CompileFailed, CompileCrashed: as for compiling.
    """
    from hil.controller.backends.compilers.iree_build import fail, run_compiler

    with temporary_folder("hil-sites-") as scratch:
        folder = Path(scratch)
        source = Path(model)
        if format == "onnx":
            from hil.controller.backends.compilers.onnx_to_mlir import convert

            source = folder / "model.mlirbc"
            convert(Path(model), dims, None, source, folder / "params.irpa", None)
        own_flags = [
            *flags,
            "--compile-to=stream",
            f"--dump-compilation-phases-to={folder / 'phases'}",
            "--mlir-print-debuginfo",
            "--mlir-print-local-scope",
            # Weights are of no interest here, and as text they take several times their bytes.
            "--mlir-elide-elementsattrs-if-larger=8",
            "--mlir-elide-resource-strings-if-larger=8",
        ]
        code, said = run_compiler(source, folder / "stream.mlir", own_flags, folder, Path(log))
        if code:
            fail(code, said)
        if format == "onnx":
            types = {**_onnx_types(Path(model), dims), **_imported_types(source)}
        else:
            types = json.loads(Path(op_types).read_text()) if op_types else {}
        modules = {phase: _parsed(folder / "phases", phase) for phase in _PHASES}
    return _read(modules, types)


def _onnx_types(path: Path, dims: Mapping[str, int]) -> dict[str, str]:
    """Node -> its type, in the model's order."""
    from hil.controller.analysis.layers.prepare import prepared
    from hil.controller.models.importers.onnx import nodes_of

    return {node.name: node.op_type for node in nodes_of(prepared(path, dims).graph.node)}


def _imported_types(source: Path) -> dict[str, str]:
    """The same of the imported module: of an old model it has nodes that the conversion to a newer opset made."""
    from iree.compiler import ir

    module = ir.Module.parse(source.read_bytes(), context=ir.Context())
    types: dict[str, str] = {}

    def look(operation: Any) -> Any:
        if operation.name == "torch.operator":
            kind = ir.StringAttr(operation.attributes["name"]).value.removeprefix("onnx.")
            if kind != "Constant":  # the model's weights are such, too
                types.update(dict.fromkeys(names_in(str(operation.location)), kind))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return types


def _parsed(folder: Path, phase: str) -> Any:
    from iree.compiler import ir

    file = next(folder.glob(f"*.{phase}.mlir"))
    return ir.Module.parse(file.read_text(), context=ir.Context())


def _read(modules: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    notes: list[str] = []
    # What the compiler puts around the arguments is at the function's own place.
    functions = {name for op in modules["dispatch-creation"].body.operations for name in names_in(str(op.location))}

    order = {name: number for number, name in enumerate(types)}

    def ordered(nodes: Sequence[str]) -> list[str]:
        return sorted(dict.fromkeys(nodes), key=lambda name: order.get(name, 0))

    def names(operation: Any) -> list[str]:
        found = names_in(str(operation.location))
        return [name for name in found if (name in types if types else name not in functions)]

    fused = list(_all(modules["dispatch-creation"], _is_workgroups))
    calls = list(_all(modules["flow"], lambda op: op.name == "flow.dispatch"))
    if len(fused) != len(calls):
        notes.append("what was fused into a dispatch is told by its own location alone")
        fused = calls
    made: dict[tuple[str, str], deque[list[Any]]] = defaultdict(deque)
    for site, call in zip(fused, calls, strict=True):
        found = ordered(_own_nodes(site, names) or names(site) or _around(site, names))
        estimate = dispatch_estimate(site, _within) if site is not call else (None, None)
        made[_leaf(call.attributes), str(call.location)].append([found, _shapes(call), *estimate])
    regions = []
    for region, loop in _executed(modules["stream"]):
        sites = []
        for command in _within(region, lambda op: op.name == "stream.cmd.dispatch"):
            key = _leaf(command.attributes)
            known = made[key, str(command.location)]
            # Some are cloned by the scheduler: the last one then stands for all the rest.
            told = known.popleft() if len(known) > 1 else known[0] if known else [ordered(names(command))]
            sites.append([key, *told])
        if sites:
            regions.append({"loop": loop, "sites": sites})
    return {"regions": regions, "op_types": dict(types) or _other_types(modules, names), "notes": notes}


def _all(module: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    yield from _within(module.operation, wanted)


def _within(operation: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """The wanted operations inside one, in order; not those inside of wanted ones."""
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _self_or_within(inner.operation, wanted)


def _is_workgroups(operation: Any) -> bool:
    return bool(operation.name == "flow.dispatch.workgroups")


def _own_nodes(dispatch: Any, names: Callable[[Any], list[str]]) -> list[str]:
    """Names of the operations that were fused into a dispatch."""
    found: dict[str, None] = {}
    for operation in _within(dispatch, lambda op: not op.name.startswith(_FRAME) and op.name not in _SHARED):
        # The scalar operations inside tell it best: the whole's location also names who only shares a constant with it.
        scalars = [names(inner) for inner in _within(operation, _is_leaf) if inner.name not in _SHARED]
        if not all(scalars) or not scalars:
            found.update(dict.fromkeys(names(operation)))
        for inner_names in scalars:
            found.update(dict.fromkeys(inner_names))
    return list(found)


def _is_leaf(operation: Any) -> bool:
    return not len(operation.regions)


def _around(operation: Any, names: Callable[[Any], list[str]]) -> list[str]:
    """Names of the nearest operations that use what this one makes, else of those that make what it uses."""
    for step in (_users, _makers):
        seen = [operation]
        front = [operation]
        while front:
            front = [near for each in front for near in step(each) if near not in seen]
            seen += front
            if found := [name for near in front for name in names(near)]:
                return found
    return []


def _users(operation: Any) -> list[Any]:
    return [use.owner.operation for result in operation.results for use in result.uses]


def _makers(operation: Any) -> list[Any]:
    from iree.compiler import ir

    owners = [operand.owner for operand in operation.operands]
    return [owner.operation for owner in owners if not isinstance(owner, ir.Block)]


def _leaf(attributes: Any) -> str:
    """The dispatch's name in ``[@executable::@dispatch]``."""
    return str(attributes["entry_points"]).rpartition("@")[2].rstrip("]").strip('"')


def _shapes(call: Any) -> str:
    ins, outs = ([_short(value.type) for value in values] for values in (call.operands, call.results))
    return f"{', '.join(filter(None, ins))} -> {', '.join(filter(None, outs))}"


def _short(kind: Any) -> str:
    text = str(kind)
    return text.removeprefix("tensor<").removesuffix(">").partition(", ")[0] if text.startswith("tensor<") else ""


def _executed(module: Any) -> Iterator[tuple[Any, str]]:
    """Each region of commands, and the loop it is in: equal words for the same (outermost) one, "" for none."""
    for number, function in enumerate(module.body.operations):
        for region in function.operation.regions:
            blocks = list(region)
            after = {at: _reached(at, blocks) for at in range(len(blocks))}
            for at, block in enumerate(blocks):
                loop = min((other for other in after[at] if at in after[other]), default=None)
                for operation in block.operations:
                    for execute in _self_or_within(operation.operation, lambda op: op.name == "stream.cmd.execute"):
                        yield execute, "" if loop is None else f"{number}.{loop}"


def _self_or_within(operation: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    if wanted(operation):
        yield operation
    else:
        yield from _within(operation, wanted)


def _reached(start: int, blocks: Sequence[Any]) -> set[int]:
    """The blocks that can come after one."""
    found: set[int] = set()
    front = [start]
    while front:
        for successor in list(blocks[front.pop()].operations)[-1].operation.successors:
            at = blocks.index(successor)
            if at not in found:
                found.add(at)
                front.append(at)
    return found


def _other_types(modules: Mapping[str, Any], names: Callable[[Any], list[str]]) -> dict[str, str]:
    """Location -> the kind of operation that was made of it, where the model itself has no types for its nodes."""
    types: dict[str, str] = {}
    for dispatch in _all(modules["dispatch-creation"], _is_workgroups):
        for operation in _within(dispatch, lambda op: not op.name.startswith(_FRAME) and op.name not in _SHARED):
            for name in names(operation):
                types.setdefault(name, operation.name)
    return types
