"""What functions in the torch dialect take and give, written where a program keeps it.

iree-compile declares the signature of a function of plain tensors and, for want of types that it knows, none of those
that iree-import-onnx, torch-mlir and iree-turbine write.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from hil.controller.models.importers.mlir import functions_in, parse
from hil.errors import LoadFailed
from hil.formats.iree_values import parse_type


def declare(source: Path, out: Path) -> Path:
    """Write a module with declarations as bytecode.

    Args:
        source: the module.
        out: the file to write.

    Returns:
        ``out`` or, where there was nothing to declare, ``source``.

    Raises:
        ImportFailed: it does not parse.
    """
    from iree.compiler import ir

    # Whoever has no such types need not be read and written for it.
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"torch") < 0:
            return source
    module, declared = parse(str(source)), False
    with module.context:
        for name, (inputs, outputs), operation in functions_in(module):
            values = [*inputs, *outputs]
            if "iree.reflection" in operation.attributes or "!torch." not in str(operation.attributes["function_type"]):
                continue
            if not all(_is_known(kind) for _, kind in values):
                continue
            takes, gives = (", ".join(f"%{value}: {kind}" for value, kind in side) for side in (inputs, outputs))
            text = ir.StringAttr.get(f"sync func @{name}({takes}) -> ({gives})")
            operation.attributes["iree.reflection"] = ir.DictAttr.get({"iree.abi.declaration": text})
            declared = True
    if not declared:
        return source
    with out.open("wb") as written:
        module.operation.write_bytecode(written)
    return out


def _is_known(kind: str) -> bool:
    try:
        parse_type("", kind)
    except LoadFailed:
        return False
    return True
