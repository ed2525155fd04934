"""PyTorch's exported programs (``.pt2``): signature, read in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.description import check_dims, description
from hil.controller.models.importers.pt2_archive import load_program
from hil.controller.storage.texts import unique_name
from hil.core.tensors import DTYPES, Dim, TensorSpec
from hil.errors import ImportFailed, UsageError

FUNCTION = "forward"


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a program's signature: its tensors, in the order that it takes and returns them.

    An input is named as the graph names it: ``x``, and ``batch_image`` for ``batch["image"]``. An output is named by
    its place in what is returned: ``logits``, ``boxes_0``, ``output_1``; ``output`` where it is the only one. After
    them come the new values of what a call changes: see :func:`new_values`. A dynamic dimension is named by where it
    first appears: ``x.dim0``. Inputs and outputs that are no tensors are constants of the program, listed in
    ``producer``.

    Raises:
        ImportFailed: it cannot be read, takes or returns numbers that vary, or has a dtype that hil does not know.
        UsageError: no such function or dimension, or a size that the program was not exported for.
    """
    name = Path(path).name
    if function not in ("", FUNCTION):
        raise UsageError(f"{name} has no function {function!r}", hint=f"an exported program has one: {FUNCTION!r}")
    program = load_program(path)
    sizes = Sizes(program)
    sizes.fix(name, dims)
    taken = [(each, spec.arg) for each, spec in user_inputs(program)]
    given = output_names(program)
    outputs = sizes.outputs(name)
    constants: dict[str, dict[str, str]] = {}
    for kind, values in (("input", taken), ("output", given)):
        for each, arg in values:
            if not is_tensor(arg) and not hasattr(arg, "value"):
                raise ImportFailed(
                    f"{kind} {each!r} of {name} is a number that varies: hil passes tensors",
                    hint="export it as a tensor of one element, or as a constant",
                )
        constants[kind] = {each: str(arg.value) for each, arg in values if not is_tensor(arg)}
    inputs = sizes.inputs(name)
    integers = {spec.name for spec in inputs if "int" in spec.dtype}
    return description(
        name,
        FUNCTION,
        inputs,
        outputs,
        ranges=known_ranges({node.name: node for node in program.graph.nodes if node.name in integers}),
        producer={
            "name": "torch.export",
            "constants": constants["input"],
            "constant_outputs": constants["output"],
            "dims": sizes.ranges,
        },
        random=[f"{node.name} ({_name(node.target)})" for node in program.graph.nodes if _draws(node)],
        float64=_has_float64(program),
    )


def _has_float64(program: Any) -> bool:
    """Return whether a node of a program's graph gives a tensor of float64 or complex128."""
    import torch
    from torch.utils._pytree import tree_leaves

    values = (leaf for node in program.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128) for value in values)


def user_inputs(program: Any) -> list[tuple[str, Any]]:
    """Name and ``InputSpec`` of each thing that a caller passes, constants included, in order."""
    from torch.export.graph_signature import InputKind

    places = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    return [
        (place, spec)
        for place, spec in zip(places, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


def output_names(program: Any) -> list[tuple[str, Any]]:
    """Name and argument of each thing that a caller gets, constants included, in order."""
    from torch.export.graph_signature import OutputKind
    from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

    args = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    tree = tree_unflatten(range(len(args)), program.call_spec.out_spec)
    names: list[str] = []
    for path, _ in tree_flatten_with_path(tree)[0]:
        parts = [_key(key) for key in path]
        plain = not parts or parts[0].isdigit()
        names.append("_".join(["output", *parts] if plain else parts))
    # In ONNX names of inputs and of outputs are names of values.
    return list(zip(_unlike([name for name, _ in user_inputs(program)], names), args, strict=True))


def new_values(program: Any) -> list[tuple[str, Any]]:
    """Name and ``InputSpec`` of each buffer, parameter and input that a call changes: its new value is an output too.

    It is called as its module calls it, with ``_out`` behind: ``bn.running_mean_out``; the name itself is the weight's.
    """
    if not any(map(_may_write, program.graph.nodes)):
        return []
    places = (node.name for node in program.graph.nodes if node.op == "placeholder")
    held = {spec.target or place: spec for place, spec in zip(places, program.graph_signature.input_specs, strict=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch thinks of its own copying
        functional = program.run_decompositions({})
    targets = [str(functional.graph_signature.output_specs[at].target) for at in changed(functional)]
    taken = [name for name, _ in (*user_inputs(program), *output_names(program))]
    names = _unlike(taken, [f"{target}_out" for target in targets])
    return [(name, held[target]) for name, target in zip(names, targets, strict=True)]


def changed(program: Any) -> list[int]:
    """Where a program without operators that write returns those new values, in the order of :func:`new_values`."""
    from torch.export.graph_signature import OutputKind

    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    specs = program.graph_signature.output_specs
    return sorted((at for at, spec in enumerate(specs) if spec.kind in kinds), key=lambda at: str(specs[at].target))


def returning(program: Any, kept: Callable[[Any], bool]) -> None:
    """Have a program return the new values of what it changes as well, after the outputs whose specs are kept."""
    from torch.export.graph_signature import OutputKind, OutputSpec
    from torch.utils._pytree import tree_structure

    specs = program.graph_signature.output_specs
    own, new = [at for at, spec in enumerate(specs) if kept(spec)], changed(program)
    returned = next(node for node in program.graph.nodes if node.op == "output")
    returned.args = (tuple(returned.args[0][at] for at in (*own, *new)),)
    specs[:] = [*(specs[at] for at in own), *(OutputSpec(OutputKind.USER_OUTPUT, specs[at].arg, None) for at in new)]
    count = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs)
    program.module_call_graph[0].signature.out_spec = tree_structure(tuple(range(count)))
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def call_of(program: Any, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments and keywords of a call with these tensors, by name, and the program's own constants."""
    from torch.utils._pytree import tree_unflatten

    flat = [tensors[name] if is_tensor(spec.arg) else spec.arg.value for name, spec in user_inputs(program)]
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


def _may_write(node: Any) -> bool:
    """Whether a node of an exported graph writes into what it takes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    # In training these write into the running statistics, and their schemas do not say so.
    hidden = schema.name in ("aten::batch_norm", "aten::instance_norm") and node.args[5] is True
    return bool(schema.is_mutable or hidden)


def _draws(node: Any) -> bool:
    """Return whether a node of an exported graph draws random numbers, and so is no dropout that is switched off."""
    import torch

    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    switched_off = any(given.get(name) is False for name in ("train", "training"))
    return not switched_off and all(given.get(name) != 0 for name in ("p", "dropout", "dropout_p"))


def is_tensor(arg: Any) -> bool:
    """Whether an argument of a signature is a tensor."""
    from torch.export.graph_signature import TensorArgument

    return isinstance(arg, TensorArgument)


class Sizes:
    """The dimensions of a program's tensors, symbols under names for people.

    Attributes:
        names: the program's own symbol, such as ``s77`` -> hil's name, such as ``x.dim0``.
        ranges: name -> [lowest, highest] size that the program was exported for; None is open.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self._values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        self._known: dict[Any, int] = {}
        self.names: dict[str, str] = {}
        for place, spec in user_inputs(program):
            if is_tensor(spec.arg):
                for axis, size in enumerate(self._values[place].shape):
                    expression = _expression(size)
                    if getattr(expression, "is_Symbol", False):
                        self.names.setdefault(str(expression), f"{place}.dim{axis}")
        self.ranges = {
            self.names.get(str(symbol), str(symbol)): [_bound(limits.lower), _bound(limits.upper)]
            for symbol, limits in program.range_constraints.items()
        }

    def fix(self, file: str, dims: Mapping[str, int]) -> None:
        """Give sizes to dimensions. Raises UsageError: there is no such one, or it was not exported for this size."""
        by_name = {name: symbol for symbol, name in self.names.items()}
        check_dims(file, {name: size for name, size in dims.items() if name not in self.ranges}, by_name)
        for name, size in dims.items():
            low, high = self.ranges.get(name, [None, None])
            if (low is not None and size < low) or (high is not None and size > high):
                most = "any size" if high is None else high
                raise UsageError(
                    f"{file} was exported for {name} of {low or 0} to {most}, not {size}",
                    hint="torch.export.export(..., dynamic_shapes=...) says which",
                )
            self._known[by_name.get(name, name)] = size

    def inputs(self, file: str) -> list[TensorSpec]:
        """The tensors that the program takes. Raises ImportFailed: hil has no such dtype."""
        named = user_inputs(self._program)
        return [self._spec(file, name, spec.arg, "input") for name, spec in named if is_tensor(spec.arg)]

    def outputs(self, file: str) -> list[TensorSpec]:
        """The tensors that it returns, then its new values. Raises ImportFailed: hil has no such dtype."""
        named = output_names(self._program)
        own = [self._spec(file, name, arg, "output") for name, arg in named if is_tensor(arg)]
        new = new_values(self._program)
        return own + [self._spec(file, name, spec.arg, "the new value") for name, spec in new]

    def _spec(self, file: str, name: str, arg: Any, kind: str) -> TensorSpec:
        value = self._values[arg.name]
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ImportFailed(f"{kind} {name!r} of {file} is {dtype}, which hil does not know")
        return TensorSpec(name, dtype, tuple(self._dim(size, kind) for size in value.shape))

    def _dim(self, size: Any, kind: str) -> Dim:
        expression = _expression(size)
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


def _expression(size: Any) -> Any:
    """An int, or sympy's expression of one that varies."""
    return size if isinstance(size, int) else size.node.expr


def _bound(limit: Any) -> int | None:
    return int(limit) if getattr(limit, "is_Integer", False) and abs(int(limit)) < 1 << 62 else None


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _unlike(taken: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names for outputs: ``NAME_out`` where an input is called so."""
    used = set(taken)
    return [unique_name(f"{name}_out" if name in used else name, used) for name in names]


# Operators that hand on the values of their first argument, all or some of them.
_SAME_VALUES = frozenset(
    "_to_copy to clone contiguous detach alias view reshape flatten squeeze unsqueeze transpose permute t expand "
    "repeat slice select narrow split chunk unbind flip roll getitem".split()
)
# Operator -> where its indices are among its arguments, and where the dimension that they count; None is the first.
_INDEXED: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys("embedding embedding_bag _embedding_bag _embedding_bag_forward_only".split(), (1, None)),
    **dict.fromkeys("index_select index_add index_copy index_fill".split(), (2, 1)),
    **dict.fromkeys("gather scatter scatter_add scatter_reduce".split(), (2, 1)),
}


def known_ranges(inputs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Input -> (lowest, highest) value of those that are used as indices."""
    found = {name: list(_sizes(node, set())) for name, node in inputs.items()}
    return {name: (0, min(sizes) - 1) for name, sizes in found.items() if sizes and min(sizes) > 0}


def _sizes(node: Any, seen: set[Any]) -> Iterator[int]:
    """The sizes of what a node's values index."""
    for user in node.users:
        if user.op != "call_function" or user in seen:
            continue
        seen.add(user)
        name = _name(user.target)
        if name in _SAME_VALUES and user.args and user.args[0] is node:
            yield from _sizes(user, seen)
        elif name in _INDEXED:
            place, axis = _INDEXED[name]
            if len(user.args) > place and user.args[place] is node:
                yield from _size(user.args[0], 0 if axis is None else user.args[axis])
        elif name in ("index", "index_put", "_unsafe_index") and len(user.args) > 1:
            for axis, index in enumerate(user.args[1]):
                if index is node:
                    yield from _size(user.args[0], axis)


def _size(indexed: Any, axis: Any) -> Iterator[int]:
    value = indexed.meta.get("val")
    if value is not None and isinstance(axis, int) and len(value.shape) and isinstance(value.shape[axis], int):
        yield value.shape[axis]


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    name = str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", ""))
    return name.rstrip("_") if not name.startswith("__") else name
