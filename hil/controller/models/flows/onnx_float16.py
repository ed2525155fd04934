"""float32 to float16; called in a process of its own."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.core.scratch import temporary_folder
from hil.errors import ImportFailed


def to_float16(model: str, output: str, external: bool, samples: Sequence[str]) -> None:
    """Convert weights and arithmetic to float16; inputs and outputs stay as they are.

    Operators that have no float16 form keep float32 between casts.

    Args:
        model, output: ONNX files.
        external: whether weights are kept beside the file.
        samples: none.

    Raises:
        ImportFailed: there is no float32 in the model, or what comes out is no valid model.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    plain = _with_shapes(Path(model))
    before = [item.SerializeToString(deterministic=True) for item in (*plain.graph.node, *plain.graph.initializer)]
    converted = convert_float_to_float16(plain, keep_io_types=True, disable_shape_infer=True)
    graph = converted.graph
    _put_in_order(graph)
    if before == [item.SerializeToString(deterministic=True) for item in (*graph.node, *graph.initializer)]:
        raise ImportFailed("there is no float32 in it that could be float16")
    name = f"{Path(output).name}.data"
    onnx.save_model(converted, output, save_as_external_data=external, location=name)
    try:
        onnx.checker.check_model(output, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ImportFailed(f"its float16 form is no valid model: {' '.join(lines)[:400]}", detail=str(error)) from error


def _with_shapes(path: Path) -> Any:
    """The model with every shape that can be inferred (the converter looks at types alone where it finds them)."""
    import onnx

    with temporary_folder("hil-float16-") as folder:
        inferred = Path(folder) / "inferred.onnx"
        # By way of files: in memory a model above 2 GB could not be inferred.
        onnx.shape_inference.infer_shapes_path(path, inferred)
        model = onnx.load(inferred, load_external_data=False)
    onnx.load_external_data_for_model(model, str(path.parent))
    return model


def _put_in_order(graph: Any) -> None:
    """Sort the nodes: the converter appends its casts at the end, and some of them twice."""
    nodes = list({tuple(node.output): node for node in graph.node}.values())
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    taken = {index: {makers[name] for name in _names_taken(node) if name in makers} for index, node in enumerate(nodes)}
    order = list(graphlib.TopologicalSorter(taken).static_order())
    del graph.node[:]
    graph.node.extend(nodes[index] for index in order)


def _names_taken(node: Any) -> Iterator[str]:
    """What a node reads: its inputs, and what its subgraphs take from outside."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            made = {name for inner in graph.node for name in inner.output}
            own = made | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            names = {name for inner in graph.node for name in _names_taken(inner)}
            yield from sorted((names | {value.name for value in graph.output}) - own)
