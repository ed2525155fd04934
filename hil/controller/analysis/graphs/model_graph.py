"""A graph for drawing: nodes linked by tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Maximum nodes to draw. Pictures of larger graphs would be slow and unreadable.
MAX_NODES = 20_000


class GraphNode(NamedTuple):
    """A graph node. The model's inputs and outputs are also nodes."""

    name: str  # unique within the graph, as in layers, bisections and profiles
    op: str
    kind: str = "node"  # "node", "input", "output"
    # inputs, outputs: tensor names.
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    key: str = ""  # Model Explorer's node id, if it differs from ``name``
    within: Sequence[str] = ()  # names of model nodes in subgraphs, or computed by this dispatch
    label: str = ""  # text in the picture, if it differs from ``name``


@dataclass(frozen=True)
class ModelGraph:
    """Nodes and edges for a model or program."""

    kind: str  # "onnx", "imported", "dispatches"
    name: str  # from the file
    nodes: Sequence[GraphNode]
    edges: Sequence[tuple[int, int]]  # pairs of indices in ``nodes``: producer, consumer
    shapes: Mapping[str, str] = field(default_factory=dict)  # tensor -> dtype and shape, if known
    notes: Sequence[str] = ()  # omitted and uncertain data, one line each

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelGraph:
        """Return the graph of a document from :meth:`as_json`."""
        return cls(
            document["kind"],
            document["name"],
            tuple(GraphNode(*one) for one in document["nodes"]),
            tuple((first, last) for first, last in document["edges"]),
            document["shapes"],
            tuple(document["notes"]),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the graph as a JSON-compatible document."""
        return {
            "kind": self.kind,
            "name": self.name,
            "nodes": [list(one) for one in self.nodes],
            "edges": [list(one) for one in self.edges],
            "shapes": dict(self.shapes),
            "notes": list(self.notes),
        }

    def holders(self) -> dict[str, int]:
        """Return model node -> index of the graph node that is this node or contains it."""
        found = {name: place for place, node in enumerate(self.nodes) for name in node.within}
        return found | {node.name: place for place, node in enumerate(self.nodes)}


def find_edges(nodes: Sequence[GraphNode]) -> list[tuple[int, int]]:
    """Return the edges from every tensor's producer to the consumers, without duplicates."""
    makers = {tensor: place for place, node in enumerate(nodes) for tensor in node.outputs if tensor}
    pairs = {
        (makers[tensor], place): None
        for place, node in enumerate(nodes)
        for tensor in node.inputs
        if tensor in makers and makers[tensor] != place
    }
    return list(pairs)
