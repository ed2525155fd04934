"""Read ONNX model files and their graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hil.core.files import MAX_MODEL_BYTES, read_file


def load_onnx(path: str | Path) -> Any:
    """Return the model in a file, without its external data.

    Raises:
        google.protobuf.message.DecodeError: the file is not an ONNX model.
        UnreadableFile, OSError: see :func:`hil.core.files.read_file`.
    """
    import onnx

    return onnx.load_model_from_string(read_file(Path(path), MAX_MODEL_BYTES))


def iter_subgraphs(node: Any) -> Iterator[Any]:
    """Yield the graphs in a node's attributes, such as the branches of If."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def set_nodes(graph: Any, nodes: Iterable[Any]) -> None:
    """Replace the nodes of a graph by copies of ``nodes``, which may be nodes of the same graph."""
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
