"""From a model to what tfcompile takes: a graph without functions, and its config. For an isolated process only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import entering
from hil.controller.models.tensorflow.graph_def import VARIABLE_OP, Graph
from hil.controller.models.tensorflow.graphs import HandleGraph, captured, error_text, is_variable
from hil.controller.models.tensorflow.source import Source, named_outputs, open_model, spec_of
from hil.controller.storage.texts import foreign_errors, unique_name
from hil.core.tensors import TensorSpec, to_bytes
from hil.errors import CompileFailed

GRAPH = "graph.pb"
CONFIG = "config.pbtxt"
PORTS = "ports.json"
# The variables' values, one after the other in the config's order.
VALUES = "variables.bin"
# The function lies in the graph under this name, its variables beside it under their own.
_SCOPE = "function"


def generate(path: str, function: str, dims: Mapping[str, int], folder: str) -> None:
    """Write the graph, the config (as tfcompile reads it, and as JSON) and the variables' values into a folder.

    Raises:
        UsageError: there is no such function, or a dimension is open.
        CompileFailed: the model cannot be traced, or has what tfcompile takes no config for.
    """
    source = open_model(path, function, dims)
    is_graph = isinstance(source.model, Graph)
    config, nodes, variables = _of_graph(source) if is_graph else _of_function(source, function)
    where = Path(folder)
    (where / GRAPH).write_bytes(nodes.SerializeToString(deterministic=True))
    (where / CONFIG).write_text(str(_message(config)))
    (where / PORTS).write_text(json.dumps(asdict(config), indent=1))
    with (where / VALUES).open("wb") as file:
        for variable in config.variables:
            file.write(to_bytes(variables[variable.node].numpy()))


def _of_function(source: Source, function: str) -> tuple[Config, Any, dict[str, Any]]:
    """Config, graph and variables of a traced function."""
    import tensorflow as tf

    def flat(*tensors: Any) -> list[Any]:
        return [tf.identity(leaf) for _, leaf in named_outputs(source.call(list(tensors)))]

    entering("trace")
    with foreign_errors(CompileFailed, f"TensorFlow cannot trace {function}", error_text=error_text):
        concrete = tf.function(flat, autograph=False).get_concrete_function(*source.sized())
    feeds = dict(zip(map(_imported, concrete.inputs[: len(source.inputs)]), source.inputs, strict=True))
    fetches = dict(zip(map(_imported, concrete.outputs), source.outputs(), strict=True))
    entering("inline the graph's functions")
    with tf.Graph().as_default():
        variables = _import(concrete)
        flattened = _without_functions([*feeds, *fetches])
    return make_config(flattened.node, feeds, fetches, _specs(variables)), flattened, variables


def _of_graph(source: Source) -> tuple[Config, Any, dict[str, Any]]:
    """Config, graph and variables of a GraphDef, as it is: its functions alone are put in the place of their calls."""
    import tensorflow as tf

    graph: Graph = source.model
    source.sized()
    feeds = dict(zip((feed.tensor for feed in graph.feeds), source.inputs, strict=True))
    fetches = dict(zip((fetch.tensor for fetch in graph.fetches), source.outputs(), strict=True))
    definition = graph.definition
    if definition.library.function:
        with tf.Graph().as_default():
            tf.import_graph_def(definition, name="")
            definition = _without_functions([*feeds, *fetches])
    config = make_config(
        definition.node,
        feeds,
        fetches,
        _specs(graph.variables),
        {one.tensor: one.identifier for one in (*graph.feeds, *graph.fetches)} | dict(graph.identifiers),
    )
    return config, definition, graph.variables


def _specs(variables: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {node: spec_of(node, variable) for node, variable in variables.items()}


def _import(concrete: Any) -> dict[str, Any]:
    """Put a function's graph into the current one, its variables as nodes of their own; the variables by node."""
    import tensorflow as tf

    variables: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    items = captured(concrete)
    for (told, item), placeholder in zip(items, concrete.inputs[len(concrete.inputs) - len(items) :], strict=True):
        if not is_variable(item):
            nodes[placeholder.name] = tf.constant(item.numpy())
            continue
        name = tf.compat.v1.get_default_graph().unique_name(told, mark_as_used=False)
        # tfcompile knows a variable by its shared name.
        handle = tf.raw_ops.VarHandleOp(dtype=item.dtype, shape=item.shape, name=name, shared_name=name)
        nodes[placeholder.name] = handle
        variables[handle.op.name] = item
    tf.graph_util.import_graph_def(concrete.graph.as_graph_def(), input_map=nodes, name=_SCOPE)
    return variables


def _imported(tensor: Any) -> str:
    return f"{_SCOPE}/{tensor.name}"


def read_ports(folder: Path) -> Config:
    """The config that :func:`generate` wrote."""
    kinds: dict[str, Any] = json.loads((folder / PORTS).read_text())
    for port in (port for ports in kinds.values() for port in ports):
        port["spec"] = TensorSpec(port["spec"]["name"], port["spec"]["dtype"], tuple(port["spec"]["shape"]))
    return Config(**{kind: tuple(Port(**port) for port in ports) for kind, ports in kinds.items()})


def _without_functions(kept: list[str]) -> Any:
    """The part of the current graph that some tensors need, with functions' bodies in the place of their calls.

    tfcompile looks for variables in the main graph only. TensorFlow's own optimizer does that; nothing else is asked of
    it, for what is compiled should be what was written.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = tf.compat.v1.train.export_meta_graph()
    # Where the optimizer looks for what has to stay.
    meta.collection_def["train_op"].node_list.value.extend(kept)
    options = config_pb2.ConfigProto()
    rewriting = options.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    rewriting.optimizers.extend(["pruning", "function"])
    with foreign_errors(CompileFailed, "TensorFlow cannot inline the graph's functions", error_text=error_text):
        return tf_optimizer.OptimizeGraph(options, meta)


def _message(config: Config) -> Any:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla import tf2xla_pb2

    def described(port: Port) -> dict[str, Any]:
        number = tf.dtypes.as_dtype(port.spec.dtype).as_datatype_enum
        return {"name": port.name, "shape": tf.TensorShape(port.spec.shape).as_proto(), "type": int(number)}

    message = tf2xla_pb2.Config()
    for field, ports in ((message.feed, config.feeds), (message.fetch, config.fetches)):
        for port in ports:
            field.add(id=tf2xla_pb2.TensorId(node_name=port.node, output_index=port.output), **described(port))
    for port in config.variables:
        message.variable.add(node_name=port.node, readonly=port.read_only, **described(port))
    return message


_NO_IDENTIFIER = re.compile(r"\W", re.ASCII)


@dataclass(frozen=True)
class Port:
    """What goes into a compiled graph or comes out of it."""

    name: str  # unique among all, in C++'s alphabet: tfcompile makes methods of it
    node: str
    output: int  # which one of the node's
    spec: TensorSpec  # the name that people know it by, dtype and shape
    read_only: bool = False  # of a variable: whether the graph never assigns it


@dataclass(frozen=True)
class Config:
    """All that tfcompile is told. The program's arguments are the feeds, then the variables; its results are the
    fetches, then the new values of the variables that are not read only; each in this order.
    """

    feeds: tuple[Port, ...]
    fetches: tuple[Port, ...]
    variables: tuple[Port, ...]


def make_config(
    nodes: Sequence[Any],
    feeds: Mapping[str, TensorSpec],
    fetches: Mapping[str, TensorSpec],
    variables: Mapping[str, TensorSpec],
    given: Mapping[str, str] | None = None,
) -> Config:
    """What tfcompile is to be told of a graph.

    Args:
        nodes: of the graph, each a NodeDef.
        feeds, fetches: tensor of the graph (``name:output``) -> what it is called, dtype and shape.
        variables: node of a variable -> what it is called, dtype and shape.
        given: tensor or node of a variable -> the identifier that it has already, or "".

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
    kept = given or {}
    new = identifiers(filter(None, kept.values()))

    def names(kind: str, name: str, place: str) -> str:
        return kept.get(place) or new(kind, name)

    assigned = assigned_variables(nodes)
    return Config(
        feeds=tuple(Port(names("feed", spec.name, at), *split(at), spec) for at, spec in feeds.items()),
        fetches=tuple(Port(names("fetch", spec.name, at), *split(at), spec) for at, spec in fetches.items()),
        variables=tuple(
            Port(names("param", spec.name, node), node, 0, spec, read_only=node not in assigned)
            for node, spec in variables.items()
            if node in present
        ),
    )


def assigned_variables(nodes: Sequence[Any]) -> set[str]:
    """The variables of a graph that anything may assign: all whose handle goes to more than a reading operation."""
    graph = HandleGraph(nodes)
    return {node.name for node in nodes if node.op == VARIABLE_OP and graph.writes(node.name)}


def identifiers(taken_already: Iterable[str] = ()) -> Callable[[str, str], str]:
    """A function of a kind and a name that gives an identifier of C++, another one for each call.

    tfcompile takes names of C++'s alphabet only, and TensorFlow's have scopes: ``fc1/kernel``, ``while/fc1.kernel``.
    """
    taken: set[str] = set(taken_already)

    def identifier(kind: str, name: str) -> str:
        return unique_name(f"{kind}_{_NO_IDENTIFIER.sub('_', name)}", taken, first=2)

    return identifier


def split(tensor: str) -> tuple[str, int]:
    """The node and the output's number of a tensor's name: ``scope/add:1``; no number is 0."""
    node, colon, number = tensor.rpartition(":")
    return (node, int(number)) if colon else (tensor, 0)
