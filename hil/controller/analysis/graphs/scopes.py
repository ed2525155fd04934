"""Groups of nodes by name scope, and graphs in which closed groups are single nodes.

ONNX exporters, TensorFlow and PyTorch name a node after its module: ``/encoder/layer1/Conv``, ``dense/MatMul``,
``layer1.0.conv``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hil.controller.analysis.graphs.model_graph import GraphNode, ModelGraph

# By default, scopes are open while a graph has at most this many visible nodes.
MAX_VISIBLE = 120
# Maximum nested scopes of a node. The memory use grows with the square, and a model file is untrusted.
MAX_DEPTH = 32


@dataclass(frozen=True)
class Scope:
    """Scope with at least two nodes.

    Attributes:
        path: parts of the name, joined by slashes.
        parent: path of the enclosing scope; "" for an outermost scope.
        members: indices of all nodes in the scope, also of inner scopes.
    """

    path: str
    parent: str
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the group in a graph, which differs from all node names."""
        return f"{self.path}/"

    @property
    def label(self) -> str:
        """Path relative to the enclosing scope."""
        return self.path.removeprefix(f"{self.parent}/") if self.parent else self.path


@dataclass(frozen=True)
class FoldedItem:
    """Visible node, or a closed scope."""

    members: tuple[int, ...]  # node indices
    scope: str = ""  # path of a closed scope


@dataclass(frozen=True)
class FoldedView:
    """Graph in which closed scopes are single items."""

    items: Sequence[FoldedItem]
    edges: Sequence[tuple[int, int]]  # pairs of indices in ``items``

    @property
    def has_groups(self) -> bool:
        """True if at least one scope is closed."""
        return any(one.scope for one in self.items)


def find_scopes(graph: ModelGraph) -> dict[str, Scope]:
    """Return path -> scope, outer scopes before inner scopes.

    A scope with the same nodes as an inner scope is left out, and a scope with all nodes.
    """
    members: dict[str, list[int]] = {}
    dotted = graph.kind == "onnx" and not any("/" in node.name for node in graph.nodes if node.kind == "node")
    for place, node in enumerate(graph.nodes):
        for path in _list_prefixes(node, "." if dotted else "/"):
            members.setdefault(path, []).append(place)
    largest: dict[str, int] = {}
    for path, found in members.items():
        outer = path.rpartition("/")[0]
        largest[outer] = max(largest.get(outer, 0), len(found))
    total = sum(node.kind == "node" for node in graph.nodes)
    kept = {path for path, found in members.items() if 1 < len(found) < total and largest.get(path, 0) < len(found)}
    paths = sorted(kept, key=lambda path: path.split("/"))
    return {path: Scope(path, _find_parent(path, kept), tuple(members[path])) for path in paths}


def _list_prefixes(node: GraphNode, separator: str) -> list[str]:
    """Return the scopes of a node, outermost first. A fused TFLite node has the scopes of its first part."""
    if node.kind != "node":
        return []
    parts = [part for part in node.name.partition(";")[0].split(separator) if part]
    return ["/".join(parts[:count]) for count in range(1, min(len(parts), MAX_DEPTH + 1))]


def _find_parent(path: str, kept: Collection[str]) -> str:
    while path := path.rpartition("/")[0]:
        if path in kept:
            return path
    return ""


def list_outer_scopes(scopes: Mapping[str, Scope], path: str) -> list[str]:
    """Return the scopes around a scope, innermost first."""
    found = []
    while path and (path := scopes[path].parent):
        found.append(path)
    return found


def find_inner_scopes(scopes: Mapping[str, Scope]) -> dict[int, str]:
    """Return node index -> innermost scope, for nodes in scopes."""
    return {place: scope.path for scope in scopes.values() for place in scope.members}


def choose_open_scopes(scopes: Mapping[str, Scope], count: int, shown: Iterable[int] = ()) -> set[str]:
    """Return the scopes that are open by default.

    Outer scopes are opened first, while the graph has at most :data:`MAX_VISIBLE` nodes.

    Args:
        count: number of nodes.
        shown: nodes that are always visible.
    """
    inner = find_inner_scopes(scopes)
    found: set[str] = set()
    for place in shown:
        if place in inner:
            found |= {inner[place], *list_outer_scopes(scopes, inner[place])}
    children: dict[str, list[str]] = {}
    for scope in scopes.values():
        children.setdefault(scope.parent, []).append(scope.path)
    added = {path: _count_direct(scope, children, scopes) - 1 for path, scope in scopes.items()}
    top = children.get("", [])
    visible = count - sum(len(scopes[path].members) - 1 for path in top) + sum(added[path] for path in found)
    waiting = deque(top)
    while waiting:
        path = waiting.popleft()
        if path not in found:
            if visible + added[path] > MAX_VISIBLE:
                continue
            found.add(path)
            visible += added[path]
        waiting += children.get(path, [])
    return found


def _count_direct(scope: Scope, children: Mapping[str, Sequence[str]], scopes: Mapping[str, Scope]) -> int:
    """Return the number of visible nodes if the scope is open and the inner scopes are closed."""
    inner = [scopes[path] for path in children.get(scope.path, ())]
    return len(scope.members) - sum(len(one.members) - 1 for one in inner)


def fold(graph: ModelGraph, scopes: Mapping[str, Scope], opened: Collection[str]) -> FoldedView:
    """Return a graph in which every closed scope is a single item, at the place of its first node.

    Args:
        opened: paths of open scopes. A scope in a closed scope is not visible.
    """
    inner = find_inner_scopes(scopes)
    closed: dict[str, str] = {}  # scope -> outermost closed scope around it, or ""
    for path, scope in scopes.items():  # outer scopes first
        outer = closed.get(scope.parent, "")
        closed[path] = outer or ("" if path in opened else path)
    places: dict[str, int] = {}
    items: list[FoldedItem] = []
    item_of = []
    for place in range(len(graph.nodes)):
        path = closed.get(inner.get(place, ""), "")
        if path and path in places:
            item_of.append(places[path])
            continue
        if path:
            places[path] = len(items)
        item_of.append(len(items))
        items.append(FoldedItem(scopes[path].members, path) if path else FoldedItem((place,)))
    pairs = dict.fromkeys((item_of[first], item_of[last]) for first, last in graph.edges)
    return FoldedView(items, [pair for pair in pairs if pair[0] != pair[1]])
