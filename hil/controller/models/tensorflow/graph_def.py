"""Open GraphDef files (graphs of TensorFlow 1), with optional tf2xla config files in tfcompile's format."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from hil.controller.models.tensorflow.graphs import format_error
from hil.controller.storage.paths import is_file
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.core.files import MAX_MODEL_BYTES, read_file, read_text
from hil.errors import ImportFailed, UsageError, did_you_mean

SUFFIXES = (".pb", ".pbtxt")
# Suffixes of configs with feeds and fetches of a graph. NAME.config.pbtxt is the default config of NAME.pb; other
# configs are further entry points.
CONFIG_SUFFIXES = tuple(f".config{suffix}" for suffix in SUFFIXES)
# Files in a SavedModel directory that are not graphs.
_SAVED_MODELS = frozenset(("saved_model.pb", "saved_model.pbtxt", "fingerprint.pb", "keras_metadata.pb"))
# Entry point of a graph without a config. hil derives feeds, fetches and operations to run from the graph.
MAIN = "main"
VARIABLE_OP = "VarHandleOp"
# Sources of variable values, highest priority first: checkpoint next to the graph, initialisers in the graph, seeded
# random values.
CHECKPOINT, INITIALISER, SEED = "checkpoint", "initialiser", "seed"
# Operations with outputs that the caller provides.
_FED = frozenset(("Placeholder", "PlaceholderV2", "IteratorGetNext"))
_ASSIGN = "AssignVariableOp"
# Variables without a resource handle, which XLA does not support.
_REFERENCES = frozenset(("Variable", "VariableV2", "TemporaryVariable"))
# Unused outputs that do not become fetches: gradients of the fed tensors, and reads of variables (whose new values are
# outputs in any case).
_GRADIENTS = "gradients"
_READ = "ReadVariableOp"
_NO_VALUES = frozenset(("string", "resource", "variant"))


@dataclass(frozen=True)
class GraphPort:
    """Tensor that the caller provides (feed) or receives (fetch)."""

    tensor: str  # ``node:output`` in :attr:`TfGraph.definition`
    name: str  # display name
    identifier: str = ""  # C++ identifier from a config, or ""
    spec: Any = None  # ``tf.TensorSpec`` for a feed


@dataclass(frozen=True)
class TfGraph:
    """Graph with feeds and fetches."""

    name: str  # entry point: config file, requested operations, or :data:`MAIN`
    entries: tuple[str, ...]  # available entry points, except operations
    definition: Any  # GraphDef for the fetches; every fetch depends on the operations to run
    feeds: tuple[GraphPort, ...]
    fetches: tuple[GraphPort, ...]
    identifiers: Mapping[str, str]  # variable node -> name in the config
    initialisers: Any  # GraphDef for computing initial values
    checkpoint: str  # argument for ``tf.train.load_checkpoint``, or ""

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""
        return [fetch.name for fetch in self.fetches]

    @cached_property
    def variables(self) -> dict[str, Any]:
        """The graph's variables with initial values, by node."""
        import tensorflow as tf

        return {name: tf.Variable(value, name=name) for name, (value, _) in self._initial_values.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Source for every variable's initial value, by node."""
        return {name: source for name, (_, source) in self._initial_values.items()}

    @cached_property
    def _initial_values(self) -> dict[str, tuple[Any, str]]:
        import tensorflow as tf

        nodes = {node.name: node for node in self.definition.node if node.op == VARIABLE_OP}
        with convert_foreign_errors(ImportFailed, "cannot read the graph's checkpoint", error_text=format_error):
            stored = tf.train.load_checkpoint(self.checkpoint) if self.checkpoint and nodes else None
        values = {}
        for name, node in nodes.items():
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
            shape = tf.TensorShape(node.attr["shape"].shape)
            if not shape.is_fully_defined():
                raise ImportFailed(f"variable {name!r} has the shape {shape}: expected a fixed shape")
            value, source = stored.get_tensor(name) if stored and stored.has_tensor(name) else None, CHECKPOINT
            if value is None:
                value, source = _compute_initial_value(self.initialisers, name), INITIALISER
            if value is None:
                value, source = _make_seeded_value(name, dtype, shape), SEED
            if value.shape != tuple(shape) or value.dtype != dtype.as_numpy_dtype:
                raise ImportFailed(
                    f"invalid {source} value for variable {name!r}: expected {dtype.name}{shape.as_list()}, "
                    f"got {value.dtype}{list(value.shape)}"
                )
            values[name] = value, source
        return values

    def function(self, specs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function from feeds of these shapes to fetches."""
        import tensorflow as tf

        after = {f"^{name}" for name in self.variables}
        plain = tf.compat.v1.GraphDef(versions=self.definition.versions, library=self.definition.library)
        plain.node.extend(node for node in self.definition.node if node.name not in self.variables)
        for node in plain.node:
            node.attr.pop("_output_shapes", None)  # the attribute may contradict the actual shapes
            node.input[:] = [taken for taken in node.input if taken not in after]
        returned = [fetch.tensor for fetch in self.fetches]

        def import_graph(*given: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            inside = {feed.tensor: tensor for feed, tensor in zip(self.feeds, given, strict=True)}
            for name, variable in self.variables.items():
                graph.watch_variable(variable)
                inside[f"{name}:0"] = graph.capture(variable.handle)
            used = {taken for node in plain.node for taken in map(_get_tensor_name, node.input)} | set(returned)
            inside = {name: tensor for name, tensor in inside.items() if name in used}
            return list(tf.import_graph_def(plain, input_map=inside, return_elements=returned, name=""))

        # Do not use tf.function: it would add control dependencies, which fails in loops.
        wrapped: Callable[..., list[Any]] = tf.compat.v1.wrap_function(import_graph, list(specs))
        return wrapped


def is_graph(file: Path) -> bool:
    """Return True if the file name belongs to a GraphDef and not to a config."""
    name = file.name.lower()
    return name.endswith(SUFFIXES) and name not in _SAVED_MODELS and not is_config(file)


def is_config(file: Path) -> bool:
    """Return True if the file name belongs to a config."""
    return file.name.lower().endswith(CONFIG_SUFFIXES)


def own_config(file: Path) -> Path | None:
    """Return the config that belongs to a graph by name."""
    return next((path for suffix in CONFIG_SUFFIXES if is_file(path := file.with_name(file.stem + suffix))), None)


def list_companions(file: Path, function: str) -> list[Path]:
    """Return the further files for a graph's entry point: config, and checkpoint with the graph's name."""
    if not is_graph(file):
        return []
    config = file.with_name(function) if is_config(Path(function)) else own_config(file) if not function else None
    checkpoint = file.with_name(f"{file.stem}.index")
    data = sorted(file.parent.glob(f"{escape(file.stem)}.data-*-of-*")) if is_file(checkpoint) else []
    return [path for path in (config, checkpoint, *data) if path is not None and is_file(path)]


def open_graph(file: Path, function: str) -> TfGraph:
    """Open a graph.

    Args:
        file: the graph's file.
        function: file name of a config in the same directory; or operations and tensors (``loss,train``). Operations
            with values become outputs. Operations without values only run. "" selects the config with the graph's name,
            or else :data:`MAIN`.

    Raises:
        ImportFailed: the file is not a graph, or the graph has variables that XLA does not support.
        UsageError: the operation or config does not exist.
    """
    import tensorflow as tf

    definition = tf.compat.v1.GraphDef()
    _parse_message(file, definition, "GraphDef", ("node",))
    if not definition.node:
        raise ImportFailed(f"{file.name} is not a GraphDef: it contains no nodes")
    own = own_config(file)
    configs = sorted(path.name for path in file.parent.iterdir() if is_config(path))
    entries = (MAIN, *configs)
    nodes = _Nodes(definition)
    wanted = function or (own.name if own is not None else MAIN)
    targets: list[str] = []
    identifiers: dict[str, str] = {}
    if is_config(Path(wanted)):
        if wanted not in configs:
            hint = f"{did_you_mean(wanted, configs)}configs in this directory: {', '.join(configs) or 'none'}"
            raise UsageError(f"config {wanted!r} not found in the directory of {file.name}", hint=hint)
        feeds, fetches, identifiers = _read_config(file.with_name(wanted), nodes)
    else:
        names, targets = nodes.list_leaves() if wanted == MAIN else nodes.select_named(wanted.split(","))
        if not names:
            raise UsageError(
                f"no output tensors in {file.name}",
                hint="pass operations with values, such as --function loss,train; the default outputs are the unused "
                "tensors that depend on an input",
                option="--function",
            )
        fetches = [GraphPort(name, name.removesuffix(":0")) for name in names]
        needed = nodes.find_closure([_get_node_name(name) for name in (*names, *targets)])
        feeds = [GraphPort(name, name.removesuffix(":0")) for name in nodes.list_fed(needed)]
    made, fetches = nodes.cut(fetches, targets)
    if reference := next((node.name for node in made.node if node.op in _REFERENCES), ""):
        raise ImportFailed(
            f"unsupported reference variable {reference!r}: XLA requires resource variables",
            hint="call tf.compat.v1.enable_resource_variables() first, or freeze the variables to constants",
        )
    specs = [nodes.make_spec(feed) for feed in feeds]
    return TfGraph(
        wanted,
        entries,
        made,
        tuple(
            GraphPort(feed.tensor, feed.name, feed.identifier, spec) for feed, spec in zip(feeds, specs, strict=True)
        ),
        tuple(fetches),
        identifiers,
        definition,
        str(file.with_suffix("")) if is_file(file.with_name(f"{file.stem}.index")) else "",
    )


def _parse_message(file: Path, message: Any, kind: str, fields: Sequence[str]) -> None:
    from google.protobuf import text_format

    with convert_foreign_errors(ImportFailed, f"{file.name} is not a {kind}", error_text=format_error):
        if file.suffix.lower() == ".pbtxt":
            text_format.Parse(read_text(file, MAX_MODEL_BYTES), message, allow_unknown_field=False)
        else:
            message.ParseFromString(read_file(file, MAX_MODEL_BYTES))
    if not any(len(getattr(message, field)) for field in fields):
        raise ImportFailed(f"{file.name} is not a {kind}: missing {', '.join(fields)}")


def _read_config(file: Path, nodes: _Nodes) -> tuple[list[GraphPort], list[GraphPort], dict[str, str]]:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla import tf2xla_pb2

    config = tf2xla_pb2.Config()
    _parse_message(file, config, "tf2xla config", ("feed", "fetch", "variable"))

    def read_port(port: Any) -> GraphPort:
        tensor = f"{port.id.node_name}:{port.id.output_index}"
        nodes.check(tensor, f"{file.name}: ")
        spec = None
        if port.HasField("shape"):
            dtype = tf.dtypes.as_dtype(port.type) if port.type else nodes.make_spec(GraphPort(tensor, tensor)).dtype
            spec = tf.TensorSpec(tf.TensorShape(port.shape), dtype)
        return GraphPort(tensor, port.name or tensor.removesuffix(":0"), port.name, spec)

    if not config.fetch:
        raise ImportFailed(f"invalid config {file.name}: expected at least one fetch")
    return (
        [read_port(feed) for feed in config.feed],
        [read_port(fetch) for fetch in config.fetch],
        {variable.node_name: variable.name for variable in config.variable if variable.name},
    )


class _Nodes:
    """Nodes of a graph with their dependencies."""

    def __init__(self, definition: Any) -> None:
        self._definition = definition
        self._nodes = {node.name: node for node in definition.node}
        self._takers: dict[str, list[str]] = defaultdict(list)
        for node in definition.node:
            for taken in node.input:
                self._takers[_get_node_name(taken)].append(node.name)

    def find_closure(self, names: Iterable[str]) -> set[str]:
        """Return these nodes and all their dependencies."""
        return _find_reachable(
            names, lambda name: map(_get_node_name, self._nodes[name].input) if name in self._nodes else ()
        )

    def extract_part(self, names: Iterable[str]) -> Any:
        """Return a GraphDef of these nodes and all their dependencies."""
        needed = self.find_closure(names)
        made = type(self._definition)(versions=self._definition.versions, library=self._definition.library)
        made.node.extend(node for node in self._definition.node if node.name in needed)
        for node in made.node:
            node.attr.pop("_class", None)  # the attribute may name a node outside this part
        return made

    def list_fed(self, needed: set[str]) -> list[str]:
        """Return the tensors among the nodes that the caller must provide."""
        fed = (node for node in self._definition.node if node.name in needed and node.op in _FED)
        return [tensor for node in fed for tensor in self._iter_outputs(node)]

    def list_leaves(self) -> tuple[list[str], list[str]]:
        """Return the unused results that depend on feeds: tensors, and operations without values (training)."""
        fed = [node.name for node in self._definition.node if node.op in _FED]
        computed = _find_reachable(fed, lambda name: self._takers[name]) - set(fed)
        last = [
            node
            for node in self._definition.node
            if node.name in computed and not self._takers[node.name] and node.op != _READ
        ]
        outer = [node for node in last if not node.name.split("/")[0].startswith(_GRADIENTS)]
        tensors = [tensor for node in outer for tensor in self._iter_outputs(node)]
        return tensors, [node.name for node in last if not self._list_output_types(node)]

    def select_named(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the tensors among the names, and the operations without values among the names."""
        tensors, operations = [], []
        for name in (name.strip() for name in names):
            self.check(name)
            if ":" in name:
                tensors.append(name)
            elif self._list_output_types(self._nodes[name]):
                tensors.append(f"{name}:0")
            else:
                operations.append(name)
        return tensors, operations

    def check(self, tensor: str, where: str = "") -> None:
        """Raise UsageError if the graph lacks this tensor or operation."""
        node, _, number = tensor.partition(":")
        if node not in self._nodes:
            hint = did_you_mean(node, self._nodes) or "pass a config file or operations of the graph to --function"
            raise UsageError(f"{where}operation {node!r} not found in the graph", hint=hint, option="--function")
        if number and not (number.isdigit() and int(number) < len(self._list_output_types(self._nodes[node]))):
            raise UsageError(f"{where}output {number} of operation {node!r} not found")

    def make_spec(self, feed: GraphPort) -> Any:
        """Return the ``tf.TensorSpec`` for a feed, from the config or the graph.

        Raises ImportFailed if the type is unknown.
        """
        import tensorflow as tf

        if feed.spec is not None:
            return tf.TensorSpec(feed.spec.shape, feed.spec.dtype, feed.name)
        name, _, number = feed.tensor.partition(":")
        node, place = self._nodes[name], int(number)
        # Reading a missing key of a protobuf map would insert it.
        listed = (node.attr[one].list.shape for one in ("_output_shapes", "output_shapes") if one in node.attr)
        shapes = next(filter(None, listed), ())
        shape = shapes[place] if place < len(shapes) else node.attr["shape"].shape if "shape" in node.attr else None
        return tf.TensorSpec(tf.TensorShape(shape), self._list_output_types(node)[place], feed.name)

    def cut(self, fetches: Sequence[GraphPort], targets: Sequence[str]) -> tuple[Any, list[GraphPort]]:
        """Return the part of the graph that fetches and operations need, and the fetches in this part."""
        made = self.extract_part([*(_get_node_name(fetch.tensor) for fetch in fetches), *targets])
        if not targets:
            return made, list(fetches)
        waiting = []
        for number, fetch in enumerate(fetches):
            name, _, output = fetch.tensor.partition(":")
            node = made.node.add(name=f"hil/fetch{number}", op="Identity")
            node.input.extend([fetch.tensor if output != "0" else name, *(f"^{target}" for target in targets)])
            node.attr["T"].type = self._list_output_types(self._nodes[name])[int(output)].as_datatype_enum
            waiting.append(GraphPort(f"{node.name}:0", fetch.name, fetch.identifier))
        return made, waiting

    def _iter_outputs(self, node: Any) -> Iterator[str]:
        """Yield the outputs of a node that have values."""
        for number, dtype in enumerate(self._list_output_types(node)):
            if dtype.name not in _NO_VALUES:
                yield f"{node.name}:{number}"

    def _list_output_types(self, node: Any) -> list[Any]:
        """Return the types for a node's outputs."""
        import tensorflow as tf
        from tensorflow.python.framework import op_def_registry

        signature = op_def_registry.get(node.op)
        if signature is None:
            functions = (one.signature for one in self._definition.library.function)
            signature = next((one for one in functions if one.name == node.op), None)
        if signature is None:
            raise ImportFailed(f"unsupported op {node.op} of node {node.name!r}: unknown to the installed TensorFlow")
        types: list[int] = []
        for output in signature.output_arg:
            if output.type_list_attr:
                types += node.attr[output.type_list_attr].list.type
            else:
                count = node.attr[output.number_attr].i if output.number_attr else 1
                types += [node.attr[output.type_attr].type if output.type_attr else output.type] * count
        return [tf.dtypes.as_dtype(one) for one in types]


def _compute_initial_value(definition: Any, variable: str) -> Any:
    """Return the initial value of a variable from the graph, or None."""
    import tensorflow as tf

    assigning = [node for node in definition.node if node.op == _ASSIGN and node.input[0] == variable]
    # Prefer the assignment that TensorFlow 1 creates. Otherwise use any assignment without unknown dependencies.
    for node in sorted(assigning, key=lambda node: bool(node.name != f"{variable}/Assign")):
        part = _Nodes(definition).extract_part([_get_node_name(node.input[1])])
        if any(one.op in _FED or one.op == VARIABLE_OP for one in part.node):
            continue
        for one in part.node:
            if "seed2" in one.attr and not one.attr["seed"].i and not one.attr["seed2"].i:
                one.attr["seed2"].i = _make_seed(one.name)  # deterministic across processes
        what = f"TensorFlow cannot compute the initial value of {variable}"
        with tf.Graph().as_default() as graph, convert_foreign_errors(ImportFailed, what, error_text=format_error):
            tf.import_graph_def(part, name="")
            with tf.compat.v1.Session(graph=graph) as session:
                return session.run(_get_tensor_name(node.input[1]))
    return None


def _make_seeded_value(name: str, dtype: Any, shape: Any) -> Any:
    """Return seeded values in [0, 1) for floats, or zeros for other dtypes.

    The seed depends on the variable's name.
    """
    import numpy as np

    if not dtype.is_floating:
        return np.zeros(tuple(shape), dtype.as_numpy_dtype)
    return np.random.default_rng(_make_seed(name)).random(tuple(shape)).astype(dtype.as_numpy_dtype)


def _make_seed(text: str) -> int:
    return zlib.crc32(text.encode()) or 1


def _find_reachable(names: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    seen = set(names)
    waiting = list(seen)
    while waiting:
        new = set(following(waiting.pop())) - seen
        seen |= new
        waiting += new
    return seen


def _get_node_name(taken: str) -> str:
    """Return the node name in an input: ``^node``, ``node`` or ``node:1``."""
    return taken.lstrip("^").partition(":")[0]


def _get_tensor_name(taken: str) -> str:
    return taken if ":" in taken or taken.startswith("^") else f"{taken}:0"
