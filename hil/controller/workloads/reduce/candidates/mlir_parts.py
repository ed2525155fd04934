"""Write parts of an MLIR module as separate modules. Run these functions in isolated processes only.

A part contains operations of the function's body. Tensors that other operations compute become inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hil.controller.models.importers.mlir import describe, get_function, iter_functions, parse
from hil.errors import ImportFailed

MLIR_MODEL = "model.mlir"
# Name of the only function of a part.
MLIR_FUNCTION = "main"
# Its name while the module also has the original functions.
_PART = "hil_part"
_NAME = "iree.abi.name"
_TENSORS = ("tensor<", "!torch.vtensor<[")
# Attributes that describe the name and the signature of a function.
_SIGNATURE = {"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs", "iree.reflection"}
_MAX_ELEMENTS = 16


def write_mlir_base(path: str, function: str, folder: str) -> dict[str, Any]:
    """Write the base module for the parts: the module as text.

    Args:
        function: name of the public function; "" is the only one.

    Returns:
        ``parts``: the number of each operation that can be an own part, in a list each; ``nodes``: the number of these
        operations; ``function``: the function's name.

    Raises:
        ImportFailed: the function has branches between blocks.
    """
    module = parse(path)
    function = function or next(name for name, *_ in iter_functions(module))
    numbers = [number for number, op in enumerate(_body_of(module, function)) if not _is_pulled(op)]
    (Path(folder) / MLIR_MODEL).write_text(str(module), encoding="utf-8")
    return {"parts": [[number] for number in numbers], "nodes": len(numbers), "function": function}


def write_mlir_part(base: str, function: str, numbers: Sequence[int], folder: str) -> dict[str, Any]:
    """Write operations of a base module as a module with a function ``main``.

    Constants and operations without tensors as results are added if the operations need them. The outputs are the
    tensors that other operations or the caller use, and the tensors that no operation uses.

    Returns:
        ``inputs``: [name, dtype, shape] of every input; ``nodes``: number of operations, 0 if an output or a new input
        would not be a tensor, or the module would be invalid. The function's own arguments keep their names.
    """
    from iree.compiler import ir, passmanager
    from iree.compiler.dialects import func

    module = parse(base)
    functions = {name: (types, op) for name, types, op in iter_functions(module)}
    (given, _), old = functions[function]
    body = _body_of(module, function)
    arguments = list(old.regions[0].blocks[0].arguments)
    names = dict(zip(arguments, (name for name, _ in given), strict=True))
    chosen = _add_pulled(body, numbers)
    operations = [body[number] for number in chosen]
    inner = {result for op in operations for result in op.results}
    inputs = list(dict.fromkeys(value for op in operations for value in _values_used(op) if value not in inner))
    known = set(operations)
    outputs = [value for number in numbers for value in body[number].results if _is_output(value, known)]
    inner_inputs = [value for value in inputs if value not in names]
    if not outputs or not all(_is_tensor(value) for value in (*inner_inputs, *outputs)):
        return {"inputs": [], "nodes": 0}
    count = sum(not _is_pulled(op) for op in operations)
    with module.context, ir.Location.unknown():
        block = module.body
        types = [value.type for value in inputs], [value.type for value in outputs]
        made = func.FuncOp(_PART, types, visibility="public", ip=ir.InsertionPoint.at_block_begin(block))
        for name in sorted({*old.attributes} - _SIGNATURE):
            made.attributes[name] = old.attributes[name]  # such as the opset of an imported ONNX model
        labels = _name_inputs(inputs, names)
        made.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get({_NAME: ir.StringAttr.get(label)}) for label in labels])
        entry = made.add_entry_block()
        new = dict(zip(inputs, entry.arguments, strict=True))
        with ir.InsertionPoint(entry):
            for op in operations:
                copy = op.clone()
                _replace_operands(copy, new)
                new.update(zip(op.results, copy.results, strict=True))
            func.ReturnOp([new[value] for value in outputs])
        for _, op in functions.values():
            # The part may call another public function.
            op.attributes["sym_visibility"] = ir.StringAttr.get("private")
        try:
            passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)
            made.attributes["sym_name"] = ir.StringAttr.get(MLIR_FUNCTION)
            module.operation.verify()
        except ir.MLIRError:
            return {"inputs": [], "nodes": 0}
    file = Path(folder) / MLIR_MODEL
    file.write_text(str(module), encoding="utf-8")
    return {"inputs": describe(str(file), MLIR_FUNCTION, {})["inputs"], "nodes": count}


def print_mlir(model: str) -> dict[str, Any]:
    """Return a module's ``text``, without the values of large constants, and the ``operators`` in order."""
    module = parse(model)
    text = module.operation.get_asm(large_elements_limit=_MAX_ELEMENTS, large_resource_limit=_MAX_ELEMENTS)
    body = _body_of(module, MLIR_FUNCTION)
    return {"text": text, "operators": [_name_operator(op) for op in body if not _is_pulled(op)]}


def _name_operator(op: Any) -> str:
    """Return the name of an operation; of an imported ONNX node, the name of the operator."""
    return str(op.attributes["name"]).strip('"') if op.name == "torch.operator" else str(op.name)


def _name_inputs(inputs: Sequence[Any], names: Mapping[Any, str]) -> list[str]:
    """Return the names of a part's inputs. New inputs get names that no argument of the function has."""
    prefix = "value"
    while any(name.startswith(prefix) for name in names.values()):
        prefix += "_"
    return [names.get(value) or f"{prefix}{number}" for number, value in enumerate(inputs)]


def _body_of(module: Any, function: str) -> list[Any]:
    """Return the operations of a function, without the return operation."""
    blocks = list(get_function(module, function).regions[0].blocks)
    if len(blocks) != 1:
        raise ImportFailed(f"function {function} has {len(blocks)} blocks: hil reduces only functions with one block")
    return [op.operation for op in blocks[0].operations][:-1]


def _is_pulled(op: Any) -> bool:
    """Return whether an operation is only added to parts that use its results: a constant, or a number or list."""
    uses_tensors = any("tensor<" in str(value.type) for value in op.operands)  # directly, or in a list
    return not uses_tensors or not all(map(_is_tensor, op.results))


def _is_tensor(value: Any) -> bool:
    return str(value.type).startswith(_TENSORS)


def _add_pulled(body: Sequence[Any], numbers: Sequence[int]) -> list[int]:
    """Return the numbers with those of the pulled operations that they need, in ascending order."""
    makers = {result: number for number, op in enumerate(body) for result in op.results}
    found, pending = set(numbers), list(numbers)
    while pending:
        for value in _values_used(body[pending.pop()]):
            number = makers.get(value)
            if number is not None and number not in found and _is_pulled(body[number]):
                found.add(number)
                pending.append(number)
    return sorted(found)


def _values_used(op: Any) -> Iterator[Any]:
    """Yield the values from outside that an operation or an operation in its regions uses."""
    yield from op.operands
    nested = _list_nested(op)
    own = {result for inner in nested for result in inner.results}
    for inner in (op, *nested):
        own.update(argument for region in inner.regions for block in region.blocks for argument in block.arguments)
    for inner in nested:
        yield from (value for value in inner.operands if value not in own)


def _list_nested(op: Any) -> list[Any]:
    return [
        nested
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
        for nested in (inner.operation, *_list_nested(inner.operation))
    ]


def _replace_operands(op: Any, new: dict[Any, Any]) -> None:
    for inner in (op, *_list_nested(op)):
        for place, value in enumerate(inner.operands):
            if value in new:
                inner.operands[place] = new[value]


def _is_output(value: Any, operations: Set[Any]) -> bool:
    """Return whether a value is used outside the operations, or nowhere."""
    owners = [use.owner for use in value.uses]
    return not owners or not all(_is_inside(owner, operations) for owner in owners)


def _is_inside(op: Any, operations: Set[Any]) -> bool:
    """Return whether an operation is one of the operations, or in a region of one."""
    while op is not None:
        if op.operation in operations:
            return True
        op = op.parent
    return False
