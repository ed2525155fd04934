"""A graph as a page draws it: nodes that are joined by the tensors that they make and take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A larger graph is told, not drawn: nobody could read it, and its picture would take long.
MOST_NODES = 20_000


class GraphNode(NamedTuple):
    """A node. Inputs and outputs of the model are nodes of their own."""

    name: str  # unique among its graph's nodes, as layers, bisections and profiles name it
    op: str
    kind: str = "node"  # "node", "input", "output"
    # inputs, outputs: names of the tensors that it takes and makes.
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    key: str = ""  # what Model Explorer calls it, where that is not its name
    within: Sequence[str] = ()  # the nodes that it stands for: those of its subgraphs, of a dispatch
    label: str = ""  # how a picture calls it, where that is not by its name


@dataclass(frozen=True)
class ModelGraph:
    """A graph."""

    kind: str  # "onnx", "imported", "dispatches"
    name: str  # as its file has it
    nodes: Sequence[GraphNode]
    edges: Sequence[tuple[int, int]]  # from a node to one that takes what it makes, by their places in ``nodes``
    shapes: Mapping[str, str] = field(default_factory=dict)  # tensor -> dtype and shape, where they are known
    notes: Sequence[str] = ()  # what is left out or uncertain, a line each

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelGraph:
        """The graph of what :func:`as_json` made."""
        return cls(
            document["kind"],
            document["name"],
            tuple(GraphNode(*one) for one in document["nodes"]),
            tuple((first, last) for first, last in document["edges"]),
            document["shapes"],
            tuple(document["notes"]),
        )

    def as_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "nodes": [list(one) for one in self.nodes],
            "edges": [list(one) for one in self.edges],
            "shapes": dict(self.shapes),
            "notes": list(self.notes),
        }

    def holders(self) -> dict[str, int]:
        """Name of a node -> the place of the node that is it, or that it is within."""
        found = {name: place for place, node in enumerate(self.nodes) for name in node.within}
        return found | {node.name: place for place, node in enumerate(self.nodes)}


def edges_of(nodes: Sequence[GraphNode]) -> list[tuple[int, int]]:
    """The edges between nodes: from the maker of each tensor to those that take it, each pair once."""
    makers = {tensor: place for place, node in enumerate(nodes) for tensor in node.outputs if tensor}
    pairs = {
        (makers[tensor], place): None
        for place, node in enumerate(nodes)
        for tensor in node.inputs
        if tensor in makers and makers[tensor] != place
    }
    return list(pairs)
