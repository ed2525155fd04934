"""PyTorch's exported programs (``.pt2``): signature, read in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.importers.pt2_archive import load_program
from hil.core.tensors import DTYPES, Dim
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
        ImportFailed: it cannot be read (:func:`hil.controller.models.importers.pt2_archive.load_program`), takes or
            returns numbers that vary, or has a dtype that hil does not know.
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
    outputs = [sizes.spec(name, each, arg, "output") for each, arg in given if is_tensor(arg)]
    outputs += [sizes.spec(name, each, spec.arg, "the new value") for each, spec in new_values(program)]
    if not outputs:
        raise ImportFailed(
            f"{name} returns no tensor and changes none", hint="a model that returns nothing cannot be checked"
        )
    for kind, values in (("input", taken), ("output", given)):
        for each, arg in values:
            if not is_tensor(arg) and not hasattr(arg, "value"):
                raise ImportFailed(
                    f"{kind} {each!r} of {name} is a number that varies: hil passes tensors",
                    hint="export it as a tensor of one element, or as a constant",
                )
    inputs = [sizes.spec(name, each, arg, "input") for each, arg in taken if is_tensor(arg)]
    integers = {each for each, dtype, _ in inputs if "int" in dtype}
    return {
        "function": FUNCTION,
        "inputs": inputs,
        "outputs": outputs,
        "ranges": known_ranges({node.name: node for node in program.graph.nodes if node.name in integers}),
        "external": [],
        "producer": {
            "name": "torch.export",
            "constants": {each: str(arg.value) for each, arg in taken if not is_tensor(arg)},
            "constant_outputs": {each: str(arg.value) for each, arg in given if not is_tensor(arg)},
            "dims": sizes.ranges,
        },
    }


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
    return list(zip(_unique(names, [name for name, _ in user_inputs(program)]), args, strict=True))


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
    names = _unique([f"{target}_out" for target in targets], taken)
    return [(name, held[target]) for name, target in zip(names, targets, strict=True)]


def changed(program: Any) -> list[int]:
    """Where a program without operators that write returns those new values, in the order of :func:`new_values`."""
    from torch.export.graph_signature import OutputKind

    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    specs = program.graph_signature.output_specs
    return sorted((at for at, spec in enumerate(specs) if spec.kind in kinds), key=lambda at: str(specs[at].target))


def _may_write(node: Any) -> bool:
    """Whether a node of an exported graph writes into what it takes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    # In training these write into the running statistics, and their schemas do not say so.
    hidden = schema.name in ("aten::batch_norm", "aten::instance_norm") and node.args[5] is True
    return bool(schema.is_mutable or hidden)


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
        """Give sizes to dimensions.

        Raises:
            UsageError: there is no such dimension, or the program was not exported for this size.
        """
        by_name = {name: symbol for symbol, name in self.names.items()}
        for name, size in dims.items():
            if name not in by_name and name not in self.ranges:
                have = ", ".join(sorted(by_name)) or "none: every dimension is fixed"
                raise UsageError(f"{file} has no dimension {name!r}", hint=f"its symbolic dimensions: {have}")
            low, high = self.ranges.get(name, [None, None])
            if (low is not None and size < low) or (high is not None and size > high):
                most = "any size" if high is None else high
                raise UsageError(
                    f"{file} was exported for {name} of {low or 0} to {most}, not {size}",
                    hint="torch.export.export(..., dynamic_shapes=...) says which",
                )
            self._known[by_name.get(name, name)] = size

    def spec(self, file: str, name: str, arg: Any, kind: str) -> list[Any]:
        """[name, dtype, shape] of a tensor argument.

        Raises:
            ImportFailed: hil has no such dtype.
        """
        value = self._values[arg.name]
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ImportFailed(f"{kind} {name!r} of {file} is {dtype}, which hil does not know")
        return [name, dtype, [self._dim(size, kind) for size in value.shape]]

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


def _unique(names: Iterable[str], taken: Iterable[str]) -> Sequence[str]:
    """Names of outputs, none of them an input's: in ONNX both are names of values."""
    used = set(taken)
    found: list[str] = []
    for name in names:
        unique = base = f"{name}_out" if name in used else name
        again = 1
        while unique in used:
            unique, again = f"{base}_{again}", again + 1
        used.add(unique)
        found.append(unique)
    return found


# Operators that hand on the values of their first argument, all or some of them.
_SAME_VALUES = frozenset(
    "_to_copy to clone contiguous detach alias view reshape flatten squeeze unsqueeze transpose permute t expand "
    "repeat slice select narrow split chunk unbind flip roll getitem".split()
)
# Operator -> where its indices are among its arguments, and where the dimension that they count; None is the first.
_INDEXED = {
    "embedding": (1, None),
    "embedding_bag": (1, None),
    "_embedding_bag": (1, None),
    "_embedding_bag_forward_only": (1, None),
    "index_select": (2, 1),
    "index_add": (2, 1),
    "index_copy": (2, 1),
    "index_fill": (2, 1),
    "gather": (2, 1),
    "scatter": (2, 1),
    "scatter_add": (2, 1),
    "scatter_reduce": (2, 1),
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
