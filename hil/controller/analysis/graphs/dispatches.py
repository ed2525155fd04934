"""A profile's operations as a graph: dispatches, linked like the model nodes that they compute."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hil.controller.analysis.graphs.model_graph import MAX_NODES, GraphNode, ModelGraph
from hil.controller.analysis.graphs.values import NodeValue, find_worst
from hil.controller.analysis.profile.totals import make_shortener, sum_rows
from hil.controller.records.commands.stored import ProfileTotal
from hil.core.timeline import OpRow
from hil.errors import UsageError


def sum_operations(rows: Iterable[OpRow]) -> list[ProfileTotal]:
    """Return totals for a profile's compute operations, ordered by first start.

    A program may call one operation for multiple parts of the model. Every call site is a separate total: the
    second is named ``NAME #2``.
    """
    first: dict[str, int] = {}
    names: dict[tuple[str, tuple[str, ...]], str] = {}
    calls: dict[str, int] = defaultdict(int)

    def note_sites() -> Iterator[OpRow]:
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

    found = [total for total in sum_rows(note_sites()) if total.kind == "compute"]
    return sorted(found, key=lambda total: first[total.name])


def dispatch_graph(operations: Sequence[ProfileTotal], name: str, model: ModelGraph | None) -> ModelGraph:
    """Return the graph for a program's operations.

    Args:
        operations: the operations, in execution order.
        model: the model's graph, which defines the edges; None gives a graph without edges.

    Raises:
        UsageError: no operations, or more than :data:`MAX_NODES`.
    """
    if not operations:
        raise UsageError("the profile has no compute operations")
    if len(operations) > MAX_NODES:
        raise UsageError(f"cannot draw {len(operations)} operations: the limit is {MAX_NODES}")
    short = make_shortener(operations)
    nodes = [
        GraphNode(total.name, "+".join(total.op_types) or "operation", within=total.onnx_nodes, label=short(total.name))
        for total in operations
    ]
    edges = _trace_edges(nodes, model) if model is not None else []
    if not edges and len(nodes) > 1:
        note = "unknown data flow: operations are in execution order, without edges"
        return ModelGraph("dispatches", name, nodes, edges, notes=(note,))
    return ModelGraph("dispatches", name, nodes, edges)


def _trace_edges(nodes: Sequence[GraphNode], model: ModelGraph) -> list[tuple[int, int]]:
    places = model.holders()
    of_node: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for name in node.within:
            if name in places and number not in of_node[places[name]]:
                of_node[places[name]].append(number)
    before: dict[int, list[int]] = defaultdict(list)
    for first, last in model.edges:
        before[last].append(first)
    # Model node -> operations that produce its value, traced through nodes without an operation.
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


def map_operations(
    graph: ModelGraph, operations: Sequence[ProfileTotal], values: dict[str, NodeValue]
) -> dict[str, NodeValue]:
    """Return operation -> time, and the worst result of the nodes that the operation computes."""
    times = {total.name: total for total in operations}
    found = map_members(graph, values)
    for name, total in times.items():
        known = found.get(name, NodeValue())
        found[name] = replace(known, time_ns=total.run_ns, ops=total.ops, timed_with=len(total.onnx_nodes))
    return found


def map_members(graph: ModelGraph, values: dict[str, NodeValue]) -> dict[str, NodeValue]:
    """Return graph node -> worst result over the node and the model nodes within it."""
    found = {}
    for node in graph.nodes:
        listed = [values[name] for name in (node.name, *node.within) if name in values]
        if listed:
            found[node.name] = find_worst(listed)
    return found
