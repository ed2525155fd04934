"""Change the int64 inputs and outputs of a torch module to int32, for iree-compile's flag NARROW_FLAG.

For the torch dialect, which ONNX models use, IREE converts the types after it has created the interface of a program.
The program then declares int64 tensors, but reads and writes their memory as int32. So hil changes the interface before
compiling. For other dialects, IREE converts the types in the correct order.
"""

from __future__ import annotations

import re
from typing import Any

from hil.controller.models.importers.mlir import iter_functions
from hil.controller.storage.screen.texts import get_first_line
from hil.core.narrow_integers import NARROW_FLAG
from hil.errors import CompileFailed

_TORCH = re.compile(r"(!torch\.vtensor<.*,\s*)si64>", re.S)
_OTHER_WIDE = re.compile(r"!torch\.(int|v?tensor<.*[su]i64>)", re.S)
# Numbers of the dtypes in torch.
_TORCH_INT32, _TORCH_INT64 = 3, 4


def narrow_functions(module: Any) -> None:
    """Change the public functions of a module in place. Inside a function, the values stay int64.

    Raises:
        CompileFailed: an input or output has a 64-bit type that hil cannot change, or the module calls a changed
            function.
    """
    from iree.compiler import ir

    with module.context, ir.Location.unknown():
        changed = [_narrow_function(name, operation) for name, _, operation in list(iter_functions(module))]
        if not any(changed):
            return
        try:
            module.operation.verify()
        except ir.MLIRError as error:
            raise CompileFailed(
                f"cannot change the int64 inputs and outputs to int32 for {NARROW_FLAG}: {get_first_line(error)}",
                detail=str(error),
            ) from error


def _narrow_function(name: str, operation: Any) -> bool:
    """Change a function. Return whether it has int64 inputs or outputs."""
    from iree.compiler import ir

    entry, *others = operation.regions[0].blocks
    kind = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value)
    inputs = [_narrow_type(name, f"input {place}", one) for place, one in enumerate(kind.inputs)]
    outputs = [_narrow_type(name, f"output {place}", one) for place, one in enumerate(kind.results)]
    if (inputs, outputs) == (list(kind.inputs), list(kind.results)):
        return False
    start = ir.InsertionPoint.at_block_begin(entry)
    for argument, narrow in zip(entry.arguments, inputs, strict=True):
        wide = argument.type
        if narrow != wide:
            argument.set_type(narrow)
            conversion = _convert(argument, wide, start)
            argument.replace_all_uses_except(conversion.result, conversion)
    for block in (entry, *others):
        end = block.operations[len(block.operations) - 1].operation
        if not end.name.endswith(".return"):
            continue
        for place, narrow in enumerate(outputs):
            value = end.operands[place]
            if narrow != value.type:
                end.operands[place] = _convert(value, narrow, ir.InsertionPoint(end)).result
    operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs))
    return True


def _narrow_type(function: str, what: str, kind: Any) -> Any:
    """Return the type with int32 for int64. Raises CompileFailed for other 64-bit integer types."""
    from iree.compiler import ir

    text = str(kind)
    if match := _TORCH.fullmatch(text):
        return ir.Type.parse(f"{match[1]}si32>")
    if _OTHER_WIDE.fullmatch(text):
        raise CompileFailed(
            f"{what} of {function} has type {text}: with {NARROW_FLAG}, hil supports only int64 tensors",
            hint=f"change the type in the model, or compile without {NARROW_FLAG}",
        )
    return kind


def _convert(value: Any, kind: Any, place: Any) -> Any:
    """Insert the conversion of an integer tensor to another type."""
    from iree.compiler import ir

    number = _TORCH_INT32 if str(kind).endswith("si32>") else _TORCH_INT64
    attributes = {"value": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)}
    code = ir.Operation.create(
        "torch.constant.int", results=[ir.Type.parse("!torch.int")], attributes=attributes, ip=place
    )
    name = "torch.prims.convert_element_type"
    return ir.Operation.create(name, results=[kind], operands=[value, code.result], ip=place)
