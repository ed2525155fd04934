"""What happens to MLIR in a process of its own: methods become one module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import write_file
from hil.core.npy import load_npy
from hil.core.tensors import TensorSpec

# Constants of more elements are left out of a text for people.
_SHOWN_ELEMENTS = 64


def merge(methods: Mapping[str, Mapping[str, Any]], text: str, bytecode: str) -> None:
    """Make the ``main`` of several modules the functions of one.

    Args:
        methods: name -> ``mlir``, the file with a module whose one public function is ``main``, as TensorFlow lowers
            it; ``constants``, of its arguments that are none any more the number, dtype, shape and .npy file.
        text: the file to write, with the places where operations come from.
        bytecode: the file to write as well, where there are so many constants that ``text`` is to leave them out.

    Raises:
        CompileFailed: a module holds what is no StableHLO.
    """
    from iree.compiler import ir

    from hil.controller.models.conversions.tensorflow_program import Constant, lowered_module

    with ir.Context() as context, ir.Location.unknown(context):
        merged = ir.Module.create()
        for name, method in methods.items():
            constants = {
                place: Constant(TensorSpec("", dtype, tuple(shape)), load_npy(Path(file), dtype))
                for place, dtype, shape, file in method["constants"]
            }
            module = lowered_module(Path(method["mlir"]).read_text(), name, constants)
            operations = list(module.body.operations)
            for operation in operations:
                if (old := ir.StringAttr(operation.attributes["sym_name"]).value) != name:
                    new = f"{name}.{old}"
                    ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
                    ir.SymbolTable.set_symbol_name(operation, new)
            for operation in operations:
                merged.body.append(operation.detach_from_parent())
        limit = _SHOWN_ELEMENTS if bytecode else None
        asm = merged.operation.get_asm(enable_debug_info=True, large_elements_limit=limit)
        write_file(Path(text), asm.encode(), option="")
        if bytecode:
            with Path(bytecode).open("wb") as file:
                merged.operation.write_bytecode(file)
