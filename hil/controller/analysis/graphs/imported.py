"""A model's imported program, IREE's MLIR, as a graph. Run this in isolated processes only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.graphs.model_graph import MAX_NODES, GraphNode, ModelGraph, find_edges
from hil.controller.analysis.graphs.onnx_graph import MAX_BYTES, draw_graph
from hil.core.files import read_file
from hil.core.scratch import make_temporary_folder
from hil.errors import ImportFailed

# Operations that only provide constants for other operations.
_HELD = ("torch.constant", "torch.vtensor.literal", "torch.prim.ListConstruct", "util.global.load", "arith.constant")
_OPERATOR = "torch.operator"


def read_imported(text: str, model: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Return an imported program's graph, like :func:`hil.controller.analysis.graphs.onnx_graph.read_onnx`.

    Args:
        text: path of a program stored by a run; "" imports the model.
        model, dims: the ONNX file, and the symbolic dimensions' sizes.

    Raises:
        ImportFailed: the file is not MLIR or exceeds the size limit, or the model cannot be imported.
    """
    from iree.compiler import ir

    from hil.controller.models.importers.onnx import limit_memory

    with make_temporary_folder("hil-graph-") as scratch:
        path = Path(text) if text else _convert_model(Path(model), dims, Path(scratch))
        if path.stat().st_size > MAX_BYTES >> 2:
            raise ImportFailed(
                f"cannot draw {path.name}: {path.stat().st_size >> 20} MiB exceeds the limit of {MAX_BYTES >> 22} MiB"
            )
        try:
            with limit_memory((4 << 30) + 20 * path.stat().st_size):
                module = ir.Module.parse(read_file(path), context=ir.Context())
        except ir.MLIRError as error:
            raise ImportFailed(f"IREE cannot parse {path.name} as MLIR", detail=str(error)) from error
        return draw_graph(_build_graph(module))


def _convert_model(model: Path, dims: Mapping[str, int], scratch: Path) -> Path:
    from hil.controller.backends.compilers.onnx_to_mlir import convert
    from hil.controller.models.importers.onnx import limit_memory

    size = sum(one.stat().st_size for one in model.parent.glob(f"{model.name}*") if one.is_file())
    if size > MAX_BYTES >> 2:
        raise ImportFailed(
            f"cannot import {model.name}: {size >> 20} MiB with weights exceeds the limit of {MAX_BYTES >> 22} MiB",
            hint="store the imported program with hil run --debug-ir DIR",
        )
    out = scratch / "imported.mlirbc"
    with limit_memory((4 << 30) + 8 * size):
        convert(model, dims, None, out, scratch / "params.irpa", None)
    return out


def _build_graph(module: Any) -> ModelGraph:
    function = max(_iter_functions(module), key=lambda one: len(list(_iter_operations(one))), default=None)
    if function is None:
        raise ImportFailed("the imported program has no function")
    names: dict[Any, str] = {}
    nodes: list[GraphNode] = []
    block = function.regions[0].blocks[0]
    for number, argument in enumerate(block.arguments):
        names[argument] = f"%arg{number}"
        nodes.append(GraphNode(f"argument {number}", "input", "input", (), (f"%arg{number}",)))
    taken: dict[str, int] = {}
    for operation in _iter_operations(function):
        if len(nodes) >= MAX_NODES:
            raise ImportFailed(f"cannot draw the imported program: more than {MAX_NODES} operations")
        nodes.append(_build_node(operation, names, taken))
    symbol = str(function.attributes["sym_name"]).strip('"')
    return ModelGraph("imported", symbol, nodes, find_edges(nodes))


def _iter_functions(module: Any) -> Iterator[Any]:
    for operation in module.body.operations:
        if operation.operation.name in ("func.func", "util.func") and len(operation.regions[0].blocks):
            yield operation.operation


def _iter_operations(function: Any) -> Iterator[Any]:
    for operation in function.regions[0].blocks[0].operations:
        one = operation.operation
        if not one.name.startswith(_HELD) and _read_kind(one) != "onnx.Constant":
            yield one


def _read_kind(operation: Any) -> str:
    from iree.compiler import ir

    name = operation.name
    return str(ir.StringAttr(operation.attributes["name"]).value if name == _OPERATOR else name)


def _build_node(operation: Any, names: dict[Any, str], taken: dict[str, int]) -> GraphNode:
    from hil.controller.analysis.profile.sites import find_names

    results = []
    for result in operation.results:
        names[result] = f"%{len(names)}"
        results.append(names[result])
    kind = _read_kind(operation)
    if kind in ("func.return", "util.return"):
        return GraphNode("return", "output", "output", tuple(names[one] for one in operation.operands if one in names))
    whole = find_names(str(operation.location))
    label = (whole[0] if whole else kind)[:200]
    taken[label] = taken.get(label, 0) + 1
    unique = label if taken[label] == 1 else f"{label} #{taken[label]}"
    # Constants are not nodes, and their results are not drawn as tensors.
    operands = tuple(names[one] for one in operation.operands if one in names)
    return GraphNode(unique, kind, "node", operands, tuple(results), within=tuple(whole))
