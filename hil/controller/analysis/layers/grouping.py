"""Which nodes make a layer together. Called in isolated processes only."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hil.controller.analysis.layers.graph import Graph

_CONVOLUTIONS = frozenset(["Conv", "ConvTranspose"])
_HEADS = _CONVOLUTIONS | {"MatMul", "Gemm"}
_ACTIVATIONS = frozenset(
    "Relu LeakyRelu PRelu Clip Sigmoid HardSigmoid HardSwish Tanh Elu Selu Celu Gelu Mish Softplus Softsign "
    "ThresholdedRelu Swish".split()
)


@dataclass(frozen=True)
class Group:
    """Numbers of the nodes of a layer, in order.

    Attributes:
        nodes: all of them.
        own: those whose results the layer gives to others; the rest are copies of what others have too.
    """

    nodes: tuple[int, ...]
    own: tuple[int, ...]


def groups_of(graph: Graph, *, fused: bool) -> list[Group]:
    """The layers of a model, each after those that it takes from.

    What dequantises a value is copied into each layer that uses the value, so that layers meet at quantised tensors;
    what quantises belongs to the layer whose result it takes.
    """
    sets = _Sets(graph)
    for number in graph.live:
        node = graph.nodes[number]
        for name in node.output:
            if name and graph.type_of(name) is None:
                sets.join([number, *graph.users.get(name, ())])
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and not sets.is_copied(number)):
            maker = graph.producer.get(node.input[0])
            if maker is not None and graph.is_runtime(maker) and not sets.is_copied(maker):
                sets.join([maker, number])
    for chain in _chains(graph):
        if fused or _is_quantised(graph, chain):
            sets.join(chain)
    return list(_ordered(graph, sets))


class _Sets:
    """Disjoint sets of live nodes; nodes that are copied wherever they are used are in none."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._copied = {
            number
            for number in graph.live
            if graph.nodes[number].op_type == "DequantizeLinear"
            and graph.nodes[number].output[0] not in graph.outputs
            and graph.type_of(graph.nodes[number].output[0]) is not None
        }
        self._of = {number: {number} for number in graph.live if number not in self._copied}

    def is_copied(self, number: int) -> bool:
        return number in self._copied

    def join(self, numbers: Iterable[int]) -> None:
        joined = set().union(*(self._of[number] for number in numbers if number in self._of))
        for number in joined:
            self._of[number] = joined

    def all(self) -> list[list[int]]:
        return [sorted(members) for number, members in self._of.items() if number == min(members)]


def _chains(graph: Graph) -> Iterator[list[int]]:
    """Nodes that compilers make one of: each takes the only use of the one before."""
    taken: set[int] = set()
    for head in graph.live:
        if graph.nodes[head].op_type not in _HEADS or head in taken:
            continue
        steps = [frozenset(["Add"]), _ACTIVATIONS]
        if graph.nodes[head].op_type in _CONVOLUTIONS:
            steps.insert(0, frozenset(["BatchNormalization"]))
        chain = [head]
        for operators in steps:
            follower = _only_user(graph, chain[-1])
            if follower is not None and follower not in taken and graph.nodes[follower].op_type in operators:
                chain.append(follower)
        taken.update(chain)
        if len(chain) > 1:
            yield chain


def _only_user(graph: Graph, number: int) -> int | None:
    """The node that alone uses a node's results, and only the first of them."""
    first, *others = graph.nodes[number].output
    users = graph.users.get(first, [])
    is_seen = first in graph.outputs or any(name in graph.users or name in graph.outputs for name in others)
    if is_seen or len(users) != 1 or graph.nodes[users[0]].domain not in ("", "ai.onnx"):
        return None
    return users[0]


def _is_quantised(graph: Graph, chain: list[int]) -> bool:
    """Whether a chain's values are quantised before and after it: then it is what a quantised kernel replaces."""
    makers = (graph.producer.get(name) for name in graph.reads(chain[0]))
    follower = _only_user(graph, chain[-1])
    return (
        follower is not None
        and graph.nodes[follower].op_type == "QuantizeLinear"
        and any(maker is not None and graph.nodes[maker].op_type == "DequantizeLinear" for maker in makers)
    )


def _ordered(graph: Graph, sets: _Sets) -> Iterator[Group]:
    while True:
        groups = [_complete(graph, sets, own) for own in sets.all()]
        owner = {number: index for index, group in enumerate(groups) for number in group.own}
        before = {
            index: {owner[graph.producer[name]] for name in graph.takes(group.nodes) if name in graph.producer}
            for index, group in enumerate(groups)
        }
        sorter = graphlib.TopologicalSorter(before)
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            # A value leaves one of them and comes back through the others: they can only run together.
            sets.join(number for index in error.args[1] for number in groups[index].own)
            continue
        break
    ready: list[tuple[int, int]] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (groups[index].own[0], index))
        _, index = heapq.heappop(ready)
        yield groups[index]
        sorter.done(index)


def _complete(graph: Graph, sets: _Sets, own: list[int]) -> Group:
    """A group with the copies that it needs."""
    nodes = set(own)
    pending = list(own)
    while pending:
        for name in graph.reads(pending.pop()):
            maker = graph.producer.get(name)
            if maker is None or maker in nodes or name not in graph.runtime:
                continue
            if graph.nodes[maker].op_type == "DequantizeLinear" and graph.type_of(name) is not None:
                nodes.add(maker)
                pending.append(maker)
    return Group(tuple(graph.with_constants(nodes)), tuple(own))
