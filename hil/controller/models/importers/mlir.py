"""Import MLIR modules, text or bytecode, in any dialect that IREE compiles: StableHLO, torch, TOSA, linalg."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.description import make_description
from hil.controller.models.importers.mlir_resources import check_resources
from hil.controller.models.onnx_files.random_nodes import DRAWING
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed, ImportFailed, LoadFailed, UsageError, did_you_mean
from hil.formats.iree_values import SCALAR_PREFIX, format_reflection, parse_type

# Name and type of an input or output.
Value = tuple[str, str]

_TORCH_TENSOR = re.compile(r"!torch\.v?tensor<\[(?P<dims>[^\]]*)\],\s*(?P<element>.+)>$", re.S)
# Operations that draw random numbers. Only StableHLO and torch have such operations. Other dialects use generators with
# state.
_DRAWING = re.compile(
    r"stablehlo\.rng|torch\.(aten|prims)\.(rand|randn|randint|randperm|bernoulli|multinomial|normal|uniform|exponential)"
    r"(_like)?_?(\..*)?"
)
_DROPOUT = re.compile(r"torch\.aten\.(native_|feature_|alpha_)?dropout_?")
_FLOAT64 = re.compile(r"\bf64\b|xf64\b")
_TORCH_NUMBERS = {"!torch.int": "i64", "!torch.float": "f64", "!torch.bool": "i1"}
# Portable StableHLO has a separate function operation and types. Lower it in the same way as iree-compile.
_VHLO_PIPELINE = "builtin.module(iree-stablehlo-input-transformation-pipeline)"


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Parse a module and read the signature of a public function.

    Names come from the attribute ``iree.abi.name``. Without it, inputs are arg0, arg1, ..., and outputs are output0,
    output1, ... A dynamic dimension is a symbol such as ``arg0.dim1``.

    Raises:
        ImportFailed: the module does not parse or has no public function; or the function has no results, or has values
            other than tensors.
        UsageError: the function or dimension does not exist, or the module has multiple functions and ``function`` is
            "".
    """
    name = Path(path).name
    module = parse(path)
    check_resources(Path(path), module)
    functions = {function: types for function, types, _ in iter_functions(module)}
    if not functions:
        raise ImportFailed(f"{name} has no public function")
    listed = ", ".join(functions)
    if function and function not in functions:
        hint = f"{did_you_mean(function, functions)}choose one with --function: {listed}"
        raise UsageError(f"{name} has no function {function!r}", hint=hint, option="--function")
    if not function and len(functions) > 1:
        hint = f"choose one with --function: {listed}"
        raise UsageError(f"{name} has several functions", hint=hint, option="--function")
    chosen = function or next(iter(functions))
    arguments, results = functions[chosen]
    inputs = [_make_spec(name, *item, named=True) for item in arguments]
    outputs = [_make_spec(name, *item, named=False) for item in results]
    producer = {"functions": list(functions), "unseen_state": list(_iter_mutable(module))}
    return make_description(
        name,
        chosen,
        inputs,
        outputs,
        dims,
        producer=producer,
        float64=has_float64(module),
        random=list(_iter_random(module)),
    )


def list_functions(path: str) -> list[str]:
    """Return the names of a module's public functions, in order. Raises ImportFailed if the module does not parse."""
    return [name for name, *_ in iter_functions(parse(path))]


def parse(path: str) -> Any:
    """Parse a file. Raises ImportFailed if the module does not parse."""
    from iree.compiler import ir, passmanager

    file = Path(path)
    try:
        module = ir.Module.parse(read_file(file, MAX_MODEL_BYTES), context=ir.Context())
        if any(op.operation.name.startswith("vhlo.") for op in module.body.operations):
            with module.context:
                passmanager.PassManager.parse(_VHLO_PIPELINE).run(module.operation)
        return module
    except ir.MLIRError as error:
        lines = [line.removeprefix("error: ") for line in str(error).splitlines()[1:] if line.strip()]
        first = (lines[0] if lines else str(error)).replace('"-":', "line ")
        raise ImportFailed(f"cannot parse {file.name}: {first[:400]}", detail=str(error)) from error


def iter_functions(module: Any) -> Iterator[tuple[str, tuple[list[Value], list[Value]], Any]]:
    """Yield a module's public functions: name, (inputs, outputs) with builtin types if possible, operation."""
    from iree.compiler import ir

    for op in module.operation.regions[0].blocks[0].operations:
        attributes = op.operation.attributes
        if not op.operation.name.endswith(".func") or "function_type" not in attributes:
            continue
        visibility = _read_text(attributes["sym_visibility"]) if "sym_visibility" in attributes else "public"
        if visibility not in ("", "public") or not op.operation.regions[0].blocks:
            continue
        kind = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value)
        yield (
            _read_text(attributes["sym_name"]),
            (
                _name_values(attributes, "arg_attrs", "arg", kind.inputs),
                _name_values(attributes, "res_attrs", "output", kind.results),
            ),
            op.operation,
        )


def get_function(module: Any, name: str) -> Any:
    """Return the operation for a module's public function."""
    return next(operation for found, _, operation in iter_functions(module) if found == name)


def find_operations(operation: Any, name: str) -> list[Any]:
    """Return all nested operations with this name, inner operations first."""
    from iree.compiler import ir

    found: list[Any] = []

    def visit_operation(inner: Any) -> Any:
        if inner.name == name:
            found.append(inner)
        return ir.WalkResult.ADVANCE

    operation.walk(visit_operation)
    return found


def declare(operation: Any, text: str) -> None:
    """Store a function's signature, with names and signedness, in the attribute ``iree.abi.declaration``."""
    from iree.compiler import ir

    with operation.context:
        reflection = {"iree.abi.declaration": ir.StringAttr.get(text)}
        operation.attributes["iree.reflection"] = ir.DictAttr.get(reflection)


def format_declaration(function: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return the text for :func:`declare`. Raises CompileFailed for values without an MLIR type, such as strings."""
    try:
        return format_reflection(function, inputs, outputs)
    except UsageError as error:
        raise CompileFailed(f"IREE does not support this model: {error.message}") from error


def has_float64(module: Any) -> bool:
    """Return True if the type of any value in a module contains float64.

    ``!torch.float`` counts only in function signatures, where it becomes ``f64``. Elsewhere it does not count, because
    every ``torch.constant.float`` has this type, such as the epsilon of a normalization.
    """
    from iree.compiler import ir

    signatures = [kind for _, sides, _ in iter_functions(module) for side in sides for _, kind in side]
    if any(_FLOAT64.search(kind) for kind in signatures):
        return True
    seen: set[Any] = set()

    def visit_operation(operation: Any) -> Any:
        blocks = [block for region in operation.regions for block in region.blocks]
        values = [*operation.results, *(argument for block in blocks for argument in block.arguments)]
        for kind in {value.type for value in values} - seen:
            seen.add(kind)
            if _FLOAT64.search(str(kind)):
                found.append(kind)
                return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    found: list[Any] = []
    module.operation.walk(visit_operation)
    return bool(found)


def _iter_mutable(module: Any) -> Iterator[str]:
    """Yield the module's mutable globals."""
    for op in module.body.operations:
        attributes = op.operation.attributes
        if op.operation.name.endswith(".global") and "is_mutable" in attributes:
            yield _read_text(attributes["sym_name"])


def _iter_random(module: Any) -> Iterator[str]:
    """Yield the names of operations that draw random numbers. For ONNX, the name is in ``torch.operator``."""
    from iree.compiler import ir

    found: dict[str, None] = {}

    def visit_operation(inner: Any) -> Any:
        name = inner.name
        if name == "torch.operator":
            name = _read_text(inner.attributes["name"])
        is_onnx = name.removeprefix("onnx.") in DRAWING
        if is_onnx or _DRAWING.fullmatch(name) or (_DROPOUT.fullmatch(name) and not _is_off(inner)):
            found[name] = None
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit_operation)
    yield from found


def _is_off(dropout: Any) -> bool:
    """Return True if a dropout is in inference mode, that is, if the last operand is false."""
    # The operation is None for a block argument.
    maker = getattr(dropout.operands[len(dropout.operands) - 1].owner, "operation", None)
    return maker is not None and maker.name == "torch.constant.bool" and str(maker.attributes["value"]) == "false"


def _read_text(attribute: Any) -> str:
    """Return the text in an attribute. Raises ImportFailed if the attribute is not a text in UTF-8."""
    from iree.compiler import ir

    try:
        return str(ir.StringAttr(attribute).value)
    except (RuntimeError, ValueError) as error:
        raise ImportFailed("invalid name in the module: expected UTF-8 text") from error


def _name_values(attributes: Any, key: str, default: str, types: Any) -> list[Value]:
    from iree.compiler import ir

    own = list(ir.ArrayAttr(attributes[key])) if key in attributes else []
    names = []
    for position, kind in enumerate(types):
        given = ir.DictAttr(own[position]) if position < len(own) else {}
        name = _read_text(given["iree.abi.name"]) if "iree.abi.name" in given else f"{default}{position}"
        names.append((name, _convert_type(str(kind))))
    return names


def _convert_type(text: str) -> str:
    """Convert a torch dialect type to the corresponding builtin type. Other types are returned unchanged."""
    if match := _TORCH_TENSOR.match(text):
        sizes = [size.strip() for size in match["dims"].split(",") if size.strip()]
        return f"tensor<{''.join(f'{size}x' for size in sizes)}{match['element']}>"
    return _TORCH_NUMBERS.get(text, text)


def _make_spec(file: str, name: str, text: str, *, named: bool) -> TensorSpec:
    """Return the spec for a value. With ``named``, dynamic dimensions become symbols."""
    try:
        spec = parse_type(name, text)
    except LoadFailed as error:
        raise ImportFailed(f"{file}: {error.message}", hint=error.hint) from error
    shape = (f"{name}.dim{axis}" if dim is None and named else dim for axis, dim in enumerate(spec.shape))
    return TensorSpec(spec.name.removeprefix(SCALAR_PREFIX), spec.dtype, tuple(shape))
