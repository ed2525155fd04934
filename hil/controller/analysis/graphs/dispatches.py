"""The operations of a profile as a graph: dispatches, joined as the model's nodes that they compute are."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hil.controller.analysis.graphs.model_graph import MOST_NODES, GraphNode, ModelGraph
from hil.controller.analysis.graphs.values import NodeValue, worst
from hil.controller.analysis.profile.totals import Total, shortener, totals
from hil.core.timeline import OpRow
from hil.errors import UsageError


def timed_operations(rows: Iterable[OpRow]) -> list[Total]:
    """The sums of a profile's rows by operation, of what computes the model, in the order of their first start.

    A program may call one operation for several parts of the model: each is one of its own, the second ``NAME #2``.
    """
    first: dict[str, int] = {}
    names: dict[tuple[str, tuple[str, ...]], str] = {}
    calls: dict[str, int] = defaultdict(int)

    def noting() -> Iterator[OpRow]:
        for row in rows:
            if row.kind != "compute":
                yield row
                continue
            site = (row.op, row.onnx_nodes)
            if site not in names:
                calls[row.op] += 1
                names[site] = row.op if calls[row.op] == 1 else f"{row.op} #{calls[row.op]}"
                first[names[site]] = len(first)
            yield row if names[site] == row.op else replace(row, op=names[site])

    found = [total for total in totals(noting()) if total.kind == "compute"]
    return sorted(found, key=lambda total: first[total.name])


def dispatch_graph(operations: Sequence[Total], name: str, model: ModelGraph | None) -> ModelGraph:
    """The graph of a program's operations.

    Args:
        operations: in the order in which they run.
        model: the model's graph, which says what takes from what; without it nobody knows, and there is no edge.

    Raises:
        UsageError: there are none, or too many to be drawn.
    """
    if not operations:
        raise UsageError("the profile has no operation that computes the model")
    if len(operations) > MOST_NODES:
        raise UsageError(f"the program has {len(operations)} operations: at most {MOST_NODES} are drawn")
    short = shortener(operations)
    nodes = [
        GraphNode(total.name, "+".join(total.op_types) or "operation", within=total.onnx_nodes, label=short(total.name))
        for total in operations
    ]
    edges = _edges(nodes, model) if model is not None else []
    if not edges and len(nodes) > 1:
        note = (
            "what takes from what is not known: operations stand in the order in which they run, and nothing joins them"
        )
        return ModelGraph("dispatches", name, nodes, edges, notes=(note,))
    return ModelGraph("dispatches", name, nodes, edges)


def _edges(nodes: Sequence[GraphNode], model: ModelGraph) -> list[tuple[int, int]]:
    places = model.holders()
    of_node: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for name in node.within:
            if name in places and number not in of_node[places[name]]:
                of_node[places[name]].append(number)
    before: dict[int, list[int]] = defaultdict(list)
    for first, last in model.edges:
        before[last].append(first)
    # Of each of the model's nodes the operations that its value comes from: through nodes that none computes.
    sources: dict[int, set[int]] = {}
    edges: dict[tuple[int, int], None] = {}
    for place in range(len(model.nodes)):
        taken = set().union(*(sources.get(one, set()) for one in before[place]))
        own = of_node.get(place, [])
        edges.update(dict.fromkeys(itertools.pairwise(own)))
        if own:
            edges.update({(one, own[0]): None for one in sorted(taken) if one < own[0]})
        sources[place] = {own[-1]} if own else taken
    return list(edges)


def of_operations(graph: ModelGraph, operations: Sequence[Total], values: dict[str, NodeValue]) -> dict[str, NodeValue]:
    """What is known of each operation: its own time, and the worst of the nodes that it computes."""
    times = {total.name: total for total in operations}
    found = of_members(graph, values)
    for name, total in times.items():
        known = found.get(name, NodeValue())
        found[name] = replace(known, time_ns=total.run_ns, ops=total.ops, timed_with=len(total.onnx_nodes))
    return found


def of_members(graph: ModelGraph, values: dict[str, NodeValue]) -> dict[str, NodeValue]:
    """Node of a graph -> the worst of what is known of it and of the model's nodes that it stands for."""
    found = {}
    for node in graph.nodes:
        listed = [values[name] for name in (node.name, *node.within) if name in values]
        if listed:
            found[node.name] = worst(listed)
    return found
