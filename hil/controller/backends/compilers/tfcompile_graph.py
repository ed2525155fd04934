"""From a model to what tfcompile takes: a graph without functions, and its config. For an isolated process only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.tfcompile_config import Config, Node, Port, make_config
from hil.controller.models.tensorflow.graphs import words
from hil.controller.models.tensorflow.source import named_outputs, open_model, spec_of
from hil.core.tensors import TensorSpec, to_bytes
from hil.errors import CompileFailed, HilError

GRAPH = "graph.pb"
CONFIG = "config.pbtxt"
PORTS = "ports.json"
# The variables' values, one after the other in the config's order.
VALUES = "variables.bin"
# The function lies in the graph under this name, its variables beside it under their own.
_SCOPE = "function"


def generate(path: str, function: str, dims: Mapping[str, int], folder: str) -> None:
    """Write the graph, the config (as tfcompile reads it, and as JSON) and the variables' values into a folder.

    Args:
        path: the model's file: a SavedModel's saved_model.pb, or a .keras file.
        function: of the model.
        dims: sizes of symbolic dimensions.
        folder: an existing one.

    Raises:
        UsageError: there is no such function, or a dimension is open.
        CompileFailed: the model cannot be traced, or has what tfcompile takes no config for.
    """
    import tensorflow as tf

    source = open_model(path, function, dims)

    def flat(*tensors: Any) -> list[Any]:
        return [tf.identity(leaf) for _, leaf in named_outputs(source.call(list(tensors)))]

    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*source.sized())
    except HilError:
        raise
    except Exception as error:  # whatever the function itself raises, and TensorFlow's own many
        raise CompileFailed(f"TensorFlow cannot trace {function}: {words(error)}", detail=str(error)) from error
    feeds = dict(zip(map(_imported, concrete.inputs[: len(source.inputs)]), source.inputs, strict=True))
    fetches = dict(zip(map(_imported, concrete.outputs), source.outputs(), strict=True))
    with tf.Graph().as_default():
        variables = _import(concrete)
        flattened = _without_functions([*feeds, *fetches])
    config = make_config(
        [Node(node.name, node.op, tuple(node.input)) for node in flattened.node],
        feeds,
        fetches,
        {name: spec_of(name, variable) for name, variable in variables.items()},
    )
    where = Path(folder)
    (where / GRAPH).write_bytes(flattened.SerializeToString(deterministic=True))
    (where / CONFIG).write_text(str(_message(config)))
    (where / PORTS).write_text(json.dumps(asdict(config), indent=1))
    with (where / VALUES).open("wb") as file:
        for variable in config.variables:
            file.write(to_bytes(variables[variable.node].numpy()))


def _import(concrete: Any) -> dict[str, Any]:
    """Put a function's graph into the current one, its variables as nodes of their own; the variables by node."""
    import tensorflow as tf

    variables: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    by_handle = {id(variable.handle): variable for variable in concrete.graph.variables}
    captured = zip(concrete.captured_inputs, concrete.inputs[-len(concrete.captured_inputs) :], strict=True)
    for value, placeholder in captured if concrete.captured_inputs else ():
        if value.dtype != tf.resource:
            nodes[placeholder.name] = tf.constant(value.numpy())
            continue
        variable = by_handle.get(id(value))
        if variable is None:
            raise CompileFailed("the function uses a resource that is no variable, such as a table: tfcompile has none")
        name = tf.compat.v1.get_default_graph().unique_name(str(variable.name).split(":")[0], mark_as_used=False)
        # tfcompile knows a variable by its shared name.
        handle = tf.raw_ops.VarHandleOp(dtype=variable.dtype, shape=variable.shape, name=name, shared_name=name)
        nodes[placeholder.name] = handle
        variables[handle.op.name] = variable
    tf.graph_util.import_graph_def(concrete.graph.as_graph_def(), input_map=nodes, name=_SCOPE)
    return variables


def _imported(tensor: Any) -> str:
    return f"{_SCOPE}/{tensor.name}"


def read_ports(folder: Path) -> Config:
    """The config that :func:`generate` wrote."""
    kinds: dict[str, Any] = json.loads((folder / PORTS).read_text())
    return Config(**{kind: tuple(_port(port) for port in ports) for kind, ports in kinds.items()})


def _port(port: Mapping[str, Any]) -> Port:
    spec = port["spec"]
    return Port(**{**port, "spec": TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"]))})


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
    try:
        return tf_optimizer.OptimizeGraph(options, meta)
    except Exception as error:  # TensorFlow has many
        raise CompileFailed(f"TensorFlow cannot inline the graph's functions: {words(error)}") from error


def _message(config: Config) -> Any:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla import tf2xla_pb2

    def shape(spec: TensorSpec) -> Any:
        return tf.TensorShape(spec.shape).as_proto()

    def type_of(spec: TensorSpec) -> int:
        return int(tf.dtypes.as_dtype(spec.dtype).as_datatype_enum)

    def tensor(port: Port) -> Any:
        return tf2xla_pb2.TensorId(node_name=port.node, output_index=port.output)

    message = tf2xla_pb2.Config()
    for kind, ports in (("feed", config.feeds), ("fetch", config.fetches)):
        for port in ports:
            getattr(message, kind).add(id=tensor(port), name=port.name, shape=shape(port.spec), type=type_of(port.spec))
    for port in config.variables:
        message.variable.add(
            node_name=port.node,
            name=port.name,
            shape=shape(port.spec),
            type=type_of(port.spec),
            readonly=port.read_only,
        )
    return message
