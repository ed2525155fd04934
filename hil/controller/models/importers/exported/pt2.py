"""Import exported PyTorch programs (``.pt2``) in an isolated process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.description import check_dims, make_description
from hil.controller.models.importers.exported.pt2_archive import load_program
from hil.controller.storage.screen.texts import make_unique_name
from hil.core.tensors import DTYPES, Dim, TensorSpec
from hil.errors import ImportFailed, UsageError

FUNCTION = "forward"


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a program's signature: tensors in the order of arguments and results.

    An input has its name in the graph: ``x``, and ``batch_image`` for ``batch["image"]``. An output is named by its
    place in the result: ``logits``, ``boxes_0``, ``output_1``; a single output is ``output``. The new values of changed
    state follow: see :func:`list_new_values`. A dynamic dimension is named after its first occurrence: ``x.dim0``.
    Inputs and outputs other than tensors are constants of the program; ``producer`` lists them.

    Raises:
        ImportFailed: the file is unreadable, the program takes or returns numbers that vary, or a dtype is unsupported.
        UsageError: the function or dimension does not exist, or the program was not exported for this size.
    """
    name = Path(path).name
    if function not in ("", FUNCTION):
        raise UsageError(
            f"{name} has no function {function!r}", hint=f"an exported program has one function: {FUNCTION!r}"
        )
    program = load_program(path)
    sizes = Sizes(program)
    sizes.fix(name, dims)
    taken = [(each, spec.arg) for each, spec in list_user_inputs(program)]
    given = list_output_names(program)
    outputs = sizes.outputs(name)
    constants: dict[str, dict[str, str]] = {}
    for kind, values in (("input", taken), ("output", given)):
        for each, arg in values:
            if not is_tensor(arg) and not hasattr(arg, "value"):
                raise ImportFailed(
                    f"{kind} {each!r} of {name} is a variable number: expected a tensor or a constant",
                    hint="export the value as a one-element tensor or as a constant",
                )
        constants[kind] = {each: str(arg.value) for each, arg in values if not is_tensor(arg)}
    inputs = sizes.inputs(name)
    integers = {spec.name for spec in inputs if "int" in spec.dtype}
    return make_description(
        name,
        FUNCTION,
        inputs,
        outputs,
        ranges=find_ranges({node.name: node for node in program.graph.nodes if node.name in integers}),
        producer={
            "name": "torch.export",
            "constants": constants["input"],
            "constant_outputs": constants["output"],
            "dims": sizes.ranges,
        },
        random=[f"{node.name} ({_name(node.target)})" for node in program.graph.nodes if _is_random(node)],
        float64=_has_float64(program),
    )


def _has_float64(program: Any) -> bool:
    """Return True if a node of a program's graph returns a float64 or complex128 tensor."""
    import torch
    from torch.utils._pytree import tree_leaves

    values = (leaf for node in program.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128) for value in values)


def list_user_inputs(program: Any) -> list[tuple[str, Any]]:
    """Return the name and ``InputSpec`` for every argument, including constants, in order."""
    from torch.export.graph_signature import InputKind

    places = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    return [
        (place, spec)
        for place, spec in zip(places, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


def list_output_names(program: Any) -> list[tuple[str, Any]]:
    """Return the name and argument for every result, including constants, in order."""
    from torch.export.graph_signature import OutputKind
    from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

    args = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    tree = tree_unflatten(range(len(args)), program.call_spec.out_spec)
    names: list[str] = []
    for path, _ in tree_flatten_with_path(tree)[0]:
        parts = [_get_key(key) for key in path]
        plain = not parts or parts[0].isdigit()
        names.append("_".join(["output", *parts] if plain else parts))
    # In ONNX, inputs and outputs share a namespace.
    return list(zip(_make_unique([name for name, _ in list_user_inputs(program)], names), args, strict=True))


def list_new_values(program: Any) -> list[tuple[str, Any]]:
    """Return the name and ``InputSpec`` for every buffer, parameter and input that a call changes.

    Each new value is an output. Its name is the weight's name in the module, with the suffix ``_out``:
    ``bn.running_mean_out``.
    """
    if not any(map(_may_write, program.graph.nodes)):
        return []
    places = (node.name for node in program.graph.nodes if node.op == "placeholder")
    held = {spec.target or place: spec for place, spec in zip(places, program.graph_signature.input_specs, strict=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own copies
        functional = program.run_decompositions({})
    targets = [str(functional.graph_signature.output_specs[at].target) for at in list_changed(functional)]
    taken = [name for name, _ in (*list_user_inputs(program), *list_output_names(program))]
    names = _make_unique(taken, [f"{target}_out" for target in targets])
    return [(name, held[target]) for name, target in zip(names, targets, strict=True)]


def list_changed(program: Any) -> list[int]:
    """Return the output indices of new values in a functionalized program, in the order of :func:`list_new_values`."""
    from torch.export.graph_signature import OutputKind

    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    specs = program.graph_signature.output_specs
    return sorted((at for at, spec in enumerate(specs) if spec.kind in kinds), key=lambda at: str(specs[at].target))


def keep_outputs(program: Any, kept: Callable[[Any], bool]) -> None:
    """Make a program return the outputs in ``kept``, followed by the new values of changed state."""
    from torch.export.graph_signature import OutputKind, OutputSpec
    from torch.utils._pytree import tree_structure

    specs = program.graph_signature.output_specs
    own, new = [at for at, spec in enumerate(specs) if kept(spec)], list_changed(program)
    returned = next(node for node in program.graph.nodes if node.op == "output")
    returned.args = (tuple(returned.args[0][at] for at in (*own, *new)),)
    specs[:] = [*(specs[at] for at in own), *(OutputSpec(OutputKind.USER_OUTPUT, specs[at].arg, None) for at in new)]
    count = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs)
    program.module_call_graph[0].signature.out_spec = tree_structure(tuple(range(count)))
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def call_of(program: Any, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the positional and keyword arguments for a call with these tensors and the program's constants."""
    from torch.utils._pytree import tree_unflatten

    flat = [tensors[name] if is_tensor(spec.arg) else spec.arg.value for name, spec in list_user_inputs(program)]
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


def _may_write(node: Any) -> bool:
    """Return True if a node of an exported graph may write to an argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    # In training mode, these operators write to the running statistics, although their schemas do not declare this.
    hidden = schema.name in ("aten::batch_norm", "aten::instance_norm") and node.args[5] is True
    return bool(schema.is_mutable or hidden)


def _is_random(node: Any) -> bool:
    """Return True if a node of an exported graph draws random numbers. A dropout in inference mode draws none."""
    import torch

    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    switched_off = any(given.get(name) is False for name in ("train", "training"))
    return not switched_off and all(given.get(name) != 0 for name in ("p", "dropout", "dropout_p"))


def is_tensor(arg: Any) -> bool:
    """Return True if an argument of a signature is a tensor."""
    from torch.export.graph_signature import TensorArgument

    return isinstance(arg, TensorArgument)


class Sizes:
    """Dimensions of a program's tensors, with readable names for symbols.

    Attributes:
        names: the program's symbol, such as ``s77`` -> hil's name, such as ``x.dim0``.
        ranges: name -> [lowest, highest] exported size; None is unlimited.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self._values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        self._known: dict[Any, int] = {}
        self.names: dict[str, str] = {}
        for place, spec in list_user_inputs(program):
            if is_tensor(spec.arg):
                for axis, size in enumerate(self._values[place].shape):
                    expression = _get_expression(size)
                    if getattr(expression, "is_Symbol", False):
                        self.names.setdefault(str(expression), f"{place}.dim{axis}")
        self.ranges = {
            self.names.get(str(symbol), str(symbol)): [_bound(limits.lower), _bound(limits.upper)]
            for symbol, limits in program.range_constraints.items()
        }

    def fix(self, file: str, dims: Mapping[str, int]) -> None:
        """Set sizes of dimensions. Raises UsageError for an unknown dimension or a size outside the exported range."""
        by_name = {name: symbol for symbol, name in self.names.items()}
        check_dims(file, {name: size for name, size in dims.items() if name not in self.ranges}, by_name)
        for name, size in dims.items():
            low, high = self.ranges.get(name, [None, None])
            if (low is not None and size < low) or (high is not None and size > high):
                most = "unlimited" if high is None else high
                raise UsageError(
                    f"invalid size {size} of {name}: {file} was exported for sizes {low or 0} to {most}",
                    hint="set the range with torch.export.export(..., dynamic_shapes=...)",
                )
            self._known[by_name.get(name, name)] = size

    def inputs(self, file: str) -> list[TensorSpec]:
        """Return the specs for the program's inputs. Raises ImportFailed for unsupported dtypes."""
        named = list_user_inputs(self._program)
        return [self._make_spec(file, name, spec.arg, "input") for name, spec in named if is_tensor(spec.arg)]

    def outputs(self, file: str) -> list[TensorSpec]:
        """Return the specs for the program's outputs and new values. Raises ImportFailed for unsupported dtypes."""
        named = list_output_names(self._program)
        own = [self._make_spec(file, name, arg, "output") for name, arg in named if is_tensor(arg)]
        new = list_new_values(self._program)
        return own + [self._make_spec(file, name, spec.arg, "the new value") for name, spec in new]

    def _make_spec(self, file: str, name: str, arg: Any, kind: str) -> TensorSpec:
        value = self._values[arg.name]
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ImportFailed(f"unsupported dtype {dtype} of {kind} {name!r} in {file}")
        return TensorSpec(name, dtype, tuple(self._make_dim(size, kind) for size in value.shape))

    def _make_dim(self, size: Any, kind: str) -> Dim:
        expression = _get_expression(size)
        if isinstance(expression, int):
            return expression
        given = {symbol: self._known[str(symbol)] for symbol in expression.free_symbols if str(symbol) in self._known}
        found = expression.subs(given)
        if found.is_Integer:
            return int(found)
        if kind == "output" and str(found) not in self.names:
            return None
        text = str(found)
        for symbol in sorted(map(str, found.free_symbols), key=len, reverse=True):
            text = text.replace(symbol, self.names.get(symbol, symbol))
        return text


def _get_expression(size: Any) -> Any:
    """Return an int, or the sympy expression of a dynamic size."""
    return size if isinstance(size, int) else size.node.expr


def _bound(limit: Any) -> int | None:
    return int(limit) if getattr(limit, "is_Integer", False) and abs(int(limit)) < 1 << 62 else None


def _get_key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _make_unique(taken: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return unique output names, with ``_out`` appended on a conflict with an input."""
    used = set(taken)
    return [make_unique_name(f"{name}_out" if name in used else name, used) for name in names]


# Operators that only copy values of their first argument.
_SAME_VALUES = frozenset(
    "_to_copy to clone contiguous detach alias view reshape flatten squeeze unsqueeze transpose permute t expand "
    "repeat slice select narrow split chunk unbind flip roll getitem".split()
)
# Operator -> (position of the index argument, position of the dimension argument); None means dimension 0.
_INDEXED: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys("embedding embedding_bag _embedding_bag _embedding_bag_forward_only".split(), (1, None)),
    **dict.fromkeys("index_select index_add index_copy index_fill".split(), (2, 1)),
    **dict.fromkeys("gather scatter scatter_add scatter_reduce".split(), (2, 1)),
}


def find_ranges(inputs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return input -> (lowest, highest) value for inputs used as indices."""
    found = {name: list(_iter_sizes(node, set())) for name, node in inputs.items()}
    return {name: (0, min(sizes) - 1) for name, sizes in found.items() if sizes and min(sizes) > 0}


def _iter_sizes(node: Any, seen: set[Any]) -> Iterator[int]:
    """Yield the sizes of all dimensions into which a node's values are indices."""
    for user in node.users:
        if user.op != "call_function" or user in seen:
            continue
        seen.add(user)
        name = _name(user.target)
        if name in _SAME_VALUES and user.args and user.args[0] is node:
            yield from _iter_sizes(user, seen)
        elif name in _INDEXED:
            place, axis = _INDEXED[name]
            if len(user.args) > place and user.args[place] is node:
                yield from _iter_axis_size(user.args[0], 0 if axis is None else user.args[axis])
        elif name in ("index", "index_put", "_unsafe_index") and len(user.args) > 1:
            for axis, index in enumerate(user.args[1]):
                if index is node:
                    yield from _iter_axis_size(user.args[0], axis)


def _iter_axis_size(indexed: Any, axis: Any) -> Iterator[int]:
    value = indexed.meta.get("val")
    if value is not None and isinstance(axis, int) and len(value.shape) and isinstance(value.shape[axis], int):
        yield value.shape[axis]


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    name = str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", ""))
    return name.rstrip("_") if not name.startswith("__") else name
