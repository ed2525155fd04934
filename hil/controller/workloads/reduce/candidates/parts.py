"""Write parts of an ONNX model as separate models. Run these functions in isolated processes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.layers.extract import group_nodes
from hil.controller.analysis.layers.graph import FoldedGraph
from hil.formats.onnx_file import load_onnx

MODEL = "model.onnx"


def write_base(
    path: str, dims: Mapping[str, int], observed: Mapping[str, Sequence[Any]], folding: bool, folder: str
) -> dict[str, Any]:
    """Write the base model for the parts: the nodes that the outputs need, with known types.

    Args:
        observed: tensor -> [dtype, shape] from a run of the reference; empty without a run.
        folding: whether to replace nodes that compute constants by the constants.

    Returns:
        ``parts``: node numbers of every part that cannot be split, in topological order; ``nodes``: number of nodes of
        the given model.
    """
    graph = FoldedGraph(Path(path), dims, observed, folding=folding)
    numbers = graph.add_constants(graph.live)
    places = {number: place for place, number in enumerate(numbers)}
    graph.save(numbers, graph.inputs, graph.outputs, Path(folder) / MODEL)
    parts = [[places[number] for number in group.nodes] for group in group_nodes(graph, fused=False)]
    return {"parts": parts, "nodes": len(load_onnx(Path(path)).graph.node)}


def write_part(base: str, numbers: Sequence[int], folder: str) -> dict[str, Any]:
    """Write nodes of a base model as a model.

    Values of other nodes become inputs. A value of these nodes becomes an output if it is an output of the base model,
    or if none of these nodes uses it.

    Returns:
        ``inputs``: [name, dtype, shape] of every input; empty if an input or output is not a tensor;
        ``nodes``: number of nodes, including nodes that compute constants.
    """
    graph = FoldedGraph(Path(base), {}, {}, folding=False)
    chosen = graph.add_constants(numbers)
    used = {name for number in chosen for name in graph.list_reads(number)}
    needed = {*graph.users, *graph.outputs}
    made = [name for number in sorted(numbers) for name in graph.nodes[number].output if name in needed]
    outputs = [name for name in made if name in graph.outputs or name not in used]
    inputs = graph.list_inputs(chosen)
    types = [graph.type_of(name) for name in inputs]
    if not outputs or None in types or any(graph.type_of(name) is None for name in outputs):
        return {"inputs": [], "nodes": 0}
    graph.save(chosen, inputs, outputs, Path(folder) / MODEL)
    specs = [[name, *kind] for name, kind in zip(inputs, types, strict=True) if kind is not None]
    return {"inputs": specs, "nodes": len(chosen)}
