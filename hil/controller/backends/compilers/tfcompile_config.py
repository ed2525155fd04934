"""What tfcompile is told of a graph: its feeds, its fetches and its variables. Made from the graph, never by hand.

The graph here is plain data, so that nothing in this module needs TensorFlow:
:mod:`hil.controller.backends.compilers.tfcompile_graph` reads it from a model and writes the config's file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.models.tensorflow.graphs import PASSING_ON, READING
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed

VARIABLE_OP = "VarHandleOp"
_NO_IDENTIFIER = re.compile(r"\W", re.ASCII)


@dataclass(frozen=True)
class Node:
    """A node of a graph: its name, its operation and the nodes (``name`` or ``name:output``) that it takes."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Port:
    """What goes into a compiled graph or comes out of it.

    Attributes:
        name: unique among all, in C++'s alphabet: tfcompile makes methods of it.
        node: of the graph.
        output: which one of the node's.
        spec: the name that people know it by, dtype and shape.
        read_only: of a variable: whether the graph never assigns it.
    """

    name: str
    node: str
    output: int
    spec: TensorSpec
    read_only: bool = False


@dataclass(frozen=True)
class Config:
    """All that tfcompile is told. The program's arguments are the feeds, then the variables; its results are the
    fetches, then the new values of the variables that are not read only; each in this order.
    """

    feeds: tuple[Port, ...]
    fetches: tuple[Port, ...]
    variables: tuple[Port, ...]

    @property
    def assigned(self) -> tuple[Port, ...]:
        """The variables that the graph assigns."""
        return tuple(variable for variable in self.variables if not variable.read_only)


def make_config(
    nodes: Sequence[Node],
    feeds: Mapping[str, TensorSpec],
    fetches: Mapping[str, TensorSpec],
    variables: Mapping[str, TensorSpec],
) -> Config:
    """What tfcompile is to be told of a graph.

    Args:
        nodes: the graph's.
        feeds, fetches: tensor of the graph (``name:output``) -> what it is called, dtype and shape.
        variables: node of a variable -> what it is called, dtype and shape.

    Raises:
        CompileFailed: a shape is not known, or a feed or fetch is not in the graph.
    """
    for spec in (*feeds.values(), *fetches.values(), *variables.values()):
        if not spec.is_static:
            raise CompileFailed(
                f"tfcompile needs every shape, but {spec} has dimensions that are not known",
                hint="give the function an input_signature of numbers only",
            )
    present = {node.name for node in nodes}
    for tensor in (*feeds, *fetches):
        if split(tensor)[0] not in present:
            raise CompileFailed(f"the graph has no node {split(tensor)[0]!r}, which is to be an input or an output")
    names = identifiers()
    assigned = assigned_variables(nodes)
    return Config(
        feeds=tuple(Port(names("feed", spec.name), *split(tensor), spec) for tensor, spec in feeds.items()),
        fetches=tuple(Port(names("fetch", spec.name), *split(tensor), spec) for tensor, spec in fetches.items()),
        variables=tuple(
            Port(names("param", spec.name), node, 0, spec, read_only=node not in assigned)
            for node, spec in variables.items()
            if node in present
        ),
    )


def assigned_variables(nodes: Iterable[Node]) -> set[str]:
    """The variables of a graph that anything may assign: all whose handle goes to more than a reading operation."""
    nodes = list(nodes)
    takers: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for taken in node.inputs:
            if not taken.startswith("^"):
                takers[split(taken)[0]].append(node)
    return {node.name for node in nodes if node.op == VARIABLE_OP and any(_assigning(node.name, takers))}


def _assigning(name: str, takers: Mapping[str, list[Node]]) -> Iterator[str]:
    waiting, seen = [name], {name}
    while waiting:
        for node in takers[waiting.pop()]:
            if node.op in PASSING_ON and node.name not in seen:
                seen.add(node.name)
                waiting.append(node.name)
            elif node.op not in READING and node.op not in PASSING_ON:
                yield node.name


def identifiers() -> Any:
    """A function of a kind and a name that gives an identifier of C++, another one for each call.

    tfcompile takes names of C++'s alphabet only, and TensorFlow's have scopes: ``fc1/kernel``, ``while/fc1.kernel``.
    """
    taken: set[str] = set()

    def identifier(kind: str, name: str) -> str:
        base = f"{kind}_{_NO_IDENTIFIER.sub('_', name)}"
        number, found = 1, base
        while found in taken:
            number += 1
            found = f"{base}_{number}"
        taken.add(found)
        return found

    return identifier


def split(tensor: str) -> tuple[str, int]:
    """The node and the output's number of a tensor's name: ``scope/add:1``; no number is 0."""
    node, colon, number = tensor.rpartition(":")
    return (node, int(number)) if colon else (tensor, 0)
