"""Read a model's graph for drawing. Run this in isolated processes only: the file is untrusted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.graphs.layout import lay_out
from hil.controller.analysis.graphs.model_graph import MAX_NODES, GraphNode, ModelGraph, find_edges
from hil.controller.storage.screen.texts import get_first_line
from hil.core.tensors import type_text
from hil.errors import ImportFailed
from hil.formats.onnx_file import load_onnx

# Maximum file size, which is read into memory with all embedded weights.
MAX_BYTES = 1 << 30
# Maximum JSON text size for a graph. Names may have any length.
_MAX_TEXT = 32 << 20


def read_onnx(path: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read an ONNX file's graph and compute the layout.

    Local functions are inlined, and unnamed nodes get the same names as elsewhere in hil. Constant nodes are
    left out. External data is not read.

    Returns:
        All fields from :meth:`ModelGraph.as_json`, with ``layout`` and ``external``.

    Raises:
        ImportFailed: the file is not an ONNX model, or exceeds a size limit.
    """
    model, own_names = _load_model(Path(path), dims)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    given = [value.name for value in graph.input if value.name not in held]
    kept = [(number, node) for number, node in enumerate(graph.node) if node.op_type != "Constant"]
    if len(kept) > MAX_NODES:
        raise ImportFailed(f"cannot draw {Path(path).name}: {len(kept)} nodes exceed the limit of {MAX_NODES}")
    nodes = [GraphNode(f"input {name}", "input", "input", (), (name,), name) for name in given]
    nodes += [_build_node(number, node, own_names) for number, node in kept]
    nodes += [GraphNode(f"output {value.name}", "output", "output", (value.name,), (), "") for value in graph.output]
    hidden = len(graph.node) - len(kept)
    notes = [f"{hidden} constant nodes are not drawn"] if hidden else []
    found = draw_graph(ModelGraph("onnx", graph.name, nodes, find_edges(nodes), _read_shapes(graph), notes))
    return {**found, "external": list_external_files(model)}


def draw_graph(graph: ModelGraph) -> dict[str, Any]:
    """Return a graph with a layout as JSON.

    Raises:
        ImportFailed: the text exceeds :data:`_MAX_TEXT`, because of long names.
    """
    document = {**graph.as_json(), "layout": lay_out(len(graph.nodes), graph.edges)}
    size = len(json.dumps(document))
    if size > _MAX_TEXT:
        limit = f"the limit of {_MAX_TEXT >> 20} MiB"
        raise ImportFailed(f"cannot draw graph {graph.name[:80]!r}: {size >> 20} MiB of text exceeds {limit}")
    return document


def list_external_files(model: Any) -> list[str]:
    """Return the external data files that a model's tensors refer to."""
    from hil.controller.models.importers.onnx_nodes import iter_tensors

    return sorted(
        {
            entry.value
            for tensor in iter_tensors(model)
            if tensor.data_location == tensor.EXTERNAL
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )


def _load_model(path: Path, dims: Mapping[str, int]) -> tuple[Any, dict[int, str]]:
    """Return the model with all nodes named, and the names in the file: node index -> name."""
    from google.protobuf.message import DecodeError

    from hil.controller.backends.compilers.onnx_to_mlir import infer
    from hil.controller.models.importers.onnx import fix_dims, limit_memory, make_light_copy
    from hil.controller.models.onnx_files.onnx_rewrites import name_nodes
    from hil.formats.onnx_functions import inline_functions

    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ImportFailed(f"cannot draw {path.name}: {size >> 20} MiB exceeds the limit of {MAX_BYTES >> 20} MiB")
    with limit_memory((1 << 30) + 8 * size):
        try:
            model = load_onnx(path)
        except DecodeError as error:
            raise ImportFailed(f"{path.name} is not an ONNX model, or is damaged", detail=str(error)) from error
        if not model.HasField("graph"):
            raise ImportFailed(f"{path.name} is not an ONNX model: missing graph")
        if model.functions:
            model = inline_functions(model)
        own_names = {number: node.name for number, node in enumerate(model.graph.node) if node.name}
        name_nodes(model)
        fix_dims(model.graph.input, dims)
        try:
            infer(model, make_light_copy(model))
        except Exception as error:  # the graph can be drawn without shapes
            print(f"note: shapes are unknown: {get_first_line(error)}", flush=True)
    return model, own_names


def _build_node(number: int, node: Any, own_names: Mapping[int, str]) -> GraphNode:
    from hil.controller.analysis.layers.graph import list_reads, list_subgraphs
    from hil.controller.models.importers.onnx_nodes import iter_nodes

    inner = [one.name for graph in list_subgraphs(node) for one in iter_nodes(graph.node)]
    domain = node.domain if node.domain not in ("", "ai.onnx") else ""
    return GraphNode(
        node.name,
        f"{domain}.{node.op_type}" if domain else node.op_type,
        inputs=tuple(list_reads(node)),
        outputs=tuple(name for name in node.output if name),
        # Model Explorer's ONNX adapter numbers unnamed nodes this way.
        key="" if own_names.get(number) == node.name else own_names.get(number, f"<node_{number}>"),
        within=tuple(inner),
    )


def _read_shapes(graph: Any) -> dict[str, str]:
    return dict(_iter_types(graph))


def _iter_types(graph: Any) -> Iterator[tuple[str, str]]:
    from hil.formats.ort_values import ONNX_TYPES

    names = {number: name for name, number in ONNX_TYPES.items()}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if value.type.WhichOneof("value") == "tensor_type" and kind.elem_type in names:
            sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
            yield value.name, type_text(names[kind.elem_type], tuple(sizes) if kind.HasField("shape") else ("...",))


def list_named_layers(path: str, dims: Mapping[str, int], group: str) -> list[list[Any]]:
    """Return a model's layers as ``[name, nodes]``, named as in :func:`hil.controller.analysis.layers.extract_layers`.

    This function does not run the model. If layers depend on shapes that are known only at run time, the names may
    differ.
    """
    from hil.controller.analysis.layers.extract import list_named_groups
    from hil.controller.analysis.layers.graph import FoldedGraph
    from hil.controller.models.importers.onnx import limit_memory

    with limit_memory((2 << 30) + 8 * Path(path).stat().st_size):
        graph = FoldedGraph(Path(path), dims, {})
    return [
        [name, [graph.nodes[number].name for number in numbers]] for name, numbers in list_named_groups(graph, group)
    ]
