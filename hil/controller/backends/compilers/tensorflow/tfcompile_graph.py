"""Convert a model to tfcompile's input: a graph without functions, and a config. Only for an isolated process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import report_phase
from hil.controller.models.tensorflow.graph_def import VARIABLE_OP, TfGraph
from hil.controller.models.tensorflow.graphs import HandleGraph, format_error, is_variable, list_captured
from hil.controller.models.tensorflow.source import OpenedFunction, make_spec, name_outputs, open_model
from hil.controller.storage.screen.texts import convert_foreign_errors, make_unique_name
from hil.core.files import read_file
from hil.core.tensors import TensorSpec, to_bytes
from hil.errors import CompileFailed

GRAPH = "graph.pb"
CONFIG = "config.pbtxt"
PORTS = "ports.json"
# File with the values of the variables, concatenated in the order of the config.
VALUES = "variables.bin"
# Name scope of the function in the graph. Variables are outside this scope and keep their names.
_SCOPE = "function"


def generate(path: str, function: str, dims: Mapping[str, int], folder: str) -> None:
    """Write the graph, the config (for tfcompile, and as JSON) and the values of variables to a directory.

    Raises:
        UsageError: unknown function, or a dimension has no size.
        CompileFailed: the model cannot be traced, or tfcompile has no config for it.
    """
    source = open_model(path, function, dims)
    is_graph = isinstance(source.model, TfGraph)
    config, nodes, variables = _read_graph(source) if is_graph else _trace_function(source, function)
    where = Path(folder)
    (where / GRAPH).write_bytes(nodes.SerializeToString(deterministic=True))
    (where / CONFIG).write_text(str(_make_message(config)))
    (where / PORTS).write_text(json.dumps(asdict(config), indent=1))
    with (where / VALUES).open("wb") as file:
        for variable in config.variables:
            file.write(to_bytes(variables[variable.node].numpy()))


def _trace_function(source: OpenedFunction, function: str) -> tuple[Config, Any, dict[str, Any]]:
    """Return config, graph and variables of a traced function."""
    import tensorflow as tf

    def call_flat(*tensors: Any) -> list[Any]:
        return [tf.identity(leaf) for _, leaf in name_outputs(source.call(list(tensors)))]

    report_phase("trace")
    with convert_foreign_errors(CompileFailed, f"TensorFlow cannot trace {function}", error_text=format_error):
        concrete = tf.function(call_flat, autograph=False).get_concrete_function(*source.list_sized_inputs())
    feeds = dict(zip(map(_name_imported, concrete.inputs[: len(source.inputs)]), source.inputs, strict=True))
    fetches = dict(zip(map(_name_imported, concrete.outputs), source.outputs(), strict=True))
    report_phase("inline the graph's functions")
    with tf.Graph().as_default():
        variables = _import(concrete)
        flattened = _inline_functions([*feeds, *fetches])
    return make_config(flattened.node, feeds, fetches, _describe_variables(variables)), flattened, variables


def _read_graph(source: OpenedFunction) -> tuple[Config, Any, dict[str, Any]]:
    """Return config, graph and variables of a GraphDef. In the graph, functions are inlined."""
    import tensorflow as tf

    graph: TfGraph = source.model
    source.list_sized_inputs()
    feeds = dict(zip((feed.tensor for feed in graph.feeds), source.inputs, strict=True))
    fetches = dict(zip((fetch.tensor for fetch in graph.fetches), source.outputs(), strict=True))
    definition = graph.definition
    if definition.library.function:
        with tf.Graph().as_default():
            tf.import_graph_def(definition, name="")
            definition = _inline_functions([*feeds, *fetches])
    config = make_config(
        definition.node,
        feeds,
        fetches,
        _describe_variables(graph.variables),
        {one.tensor: one.identifier for one in (*graph.feeds, *graph.fetches)} | dict(graph.identifiers),
    )
    return config, definition, graph.variables


def _describe_variables(variables: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {node: make_spec(node, variable) for node, variable in variables.items()}


def _import(concrete: Any) -> dict[str, Any]:
    """Import a function's graph into the current graph, with variables as nodes. Return the variables by node."""
    import tensorflow as tf

    variables: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    items = list_captured(concrete)
    for (told, item), placeholder in zip(items, concrete.inputs[len(concrete.inputs) - len(items) :], strict=True):
        if not is_variable(item):
            nodes[placeholder.name] = tf.constant(item.numpy())
            continue
        name = tf.compat.v1.get_default_graph().unique_name(told, mark_as_used=False)
        # tfcompile identifies variables by their shared names.
        handle = tf.raw_ops.VarHandleOp(dtype=item.dtype, shape=item.shape, name=name, shared_name=name)
        nodes[placeholder.name] = handle
        variables[handle.op.name] = item
    tf.graph_util.import_graph_def(concrete.graph.as_graph_def(), input_map=nodes, name=_SCOPE)
    return variables


def _name_imported(tensor: Any) -> str:
    return f"{_SCOPE}/{tensor.name}"


def read_ports(folder: Path) -> Config:
    """Read the config that :func:`generate` wrote."""
    kinds: dict[str, Any] = json.loads(read_file(folder / PORTS))
    for port in (port for ports in kinds.values() for port in ports):
        port["spec"] = TensorSpec(port["spec"]["name"], port["spec"]["dtype"], tuple(port["spec"]["shape"]))
    return Config(**{kind: tuple(Port(**port) for port in ports) for kind, ports in kinds.items()})


def _inline_functions(kept: list[str]) -> Any:
    """Return the part of the current graph that some tensors need, with functions inlined.

    This is necessary because tfcompile looks for variables only in the main graph. TensorFlow's optimizer inlines the
    functions. All other optimizations are disabled, so that hil compiles the graph as written.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = tf.compat.v1.train.export_meta_graph()
    # The optimizer keeps the nodes of this collection.
    meta.collection_def["train_op"].node_list.value.extend(kept)
    options = config_pb2.ConfigProto()
    rewriting = options.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    rewriting.optimizers.extend(["pruning", "function"])
    with convert_foreign_errors(
        CompileFailed, "TensorFlow cannot inline the graph's functions", error_text=format_error
    ):
        return tf_optimizer.OptimizeGraph(options, meta)


def _make_message(config: Config) -> Any:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla import tf2xla_pb2

    def describe_port(port: Port) -> dict[str, Any]:
        number = tf.dtypes.as_dtype(port.spec.dtype).as_datatype_enum
        return {"name": port.name, "shape": tf.TensorShape(port.spec.shape).as_proto(), "type": int(number)}

    message = tf2xla_pb2.Config()
    for field, ports in ((message.feed, config.feeds), (message.fetch, config.fetches)):
        for port in ports:
            field.add(id=tf2xla_pb2.TensorId(node_name=port.node, output_index=port.output), **describe_port(port))
    for port in config.variables:
        message.variable.add(node_name=port.node, readonly=port.read_only, **describe_port(port))
    return message


_NO_IDENTIFIER = re.compile(r"\W", re.ASCII)


@dataclass(frozen=True)
class Port:
    """Input, output or variable of a compiled graph."""

    name: str  # unique, and a valid C++ identifier, because tfcompile uses the name in method names
    node: str
    output: int  # index among the node's outputs
    spec: TensorSpec  # the user-visible name, dtype and shape
    read_only: bool = False  # True for a variable that the graph never assigns


@dataclass(frozen=True)
class Config:
    """Config for tfcompile.

    The program's arguments are the feeds, then the variables. Its results are the fetches, then the new values of the
    variables that are not read-only.
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
    """Build the config for a graph.

    Args:
        nodes: The graph's nodes, as NodeDef.
        feeds, fetches: Tensor of the graph (``name:output``) -> name, dtype and shape.
        variables: Node of a variable -> name, dtype and shape.
        given: Tensor, or node of a variable -> identifier from the user's config, or "".

    Raises:
        CompileFailed: a shape is unknown, or a feed or fetch is not in the graph.
    """
    for spec in (*feeds.values(), *fetches.values(), *variables.values()):
        if not spec.is_static:
            raise CompileFailed(
                f"tfcompile requires static shapes, got {spec}",
                hint="set an input_signature with fixed dimensions",
            )
    present = {node.name for node in nodes}
    for tensor in (*feeds, *fetches):
        if split(tensor)[0] not in present:
            raise CompileFailed(f"input or output node {split(tensor)[0]!r} not found in the graph")
    kept = given or {}
    new = make_identifiers(filter(None, kept.values()))

    def choose_name(kind: str, name: str, place: str) -> str:
        return kept.get(place) or new(kind, name)

    assigned = find_assigned_variables(nodes)
    return Config(
        feeds=tuple(Port(choose_name("feed", spec.name, at), *split(at), spec) for at, spec in feeds.items()),
        fetches=tuple(Port(choose_name("fetch", spec.name, at), *split(at), spec) for at, spec in fetches.items()),
        variables=tuple(
            Port(choose_name("param", spec.name, node), node, 0, spec, read_only=node not in assigned)
            for node, spec in variables.items()
            if node in present
        ),
    )


def find_assigned_variables(nodes: Sequence[Any]) -> set[str]:
    """Return the variables with a handle that an operation other than a read uses: the graph may assign these
    variables."""
    graph = HandleGraph(nodes)
    return {node.name for node in nodes if node.op == VARIABLE_OP and graph.is_written(node.name)}


def make_identifiers(taken_already: Iterable[str] = ()) -> Callable[[str, str], str]:
    """Return a function that maps a kind and a name to a C++ identifier, unique for every call.

    tfcompile requires C++ identifiers, but TensorFlow's names have scopes: ``fc1/kernel``, ``while/fc1.kernel``.
    """
    taken: set[str] = set(taken_already)

    def make_identifier(kind: str, name: str) -> str:
        return make_unique_name(f"{kind}_{_NO_IDENTIFIER.sub('_', name)}", taken, first=2)

    return make_identifier


def split(tensor: str) -> tuple[str, int]:
    """Split a tensor name (``scope/add:1``) into node and output index, which defaults to 0."""
    node, colon, number = tensor.rpartition(":")
    return (node, int(number)) if colon else (tensor, 0)
