"""Merge methods into one MLIR module, in an isolated process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import write_file
from hil.core.files import MAX_MODEL_BYTES, read_text
from hil.core.npy import load_npy
from hil.core.tensors import TensorSpec

# Constants with more elements are omitted from the readable text.
_SHOWN_ELEMENTS = 64


def merge(methods: Mapping[str, Mapping[str, Any]], text: str, bytecode: str) -> None:
    """Merge the ``main`` functions of multiple modules into one module.

    Args:
        methods: Method name -> dictionary. ``mlir`` is a file lowered by TensorFlow with ``main`` as the only public
            function. ``constants`` lists number, dtype, shape and .npy file of arguments that became constants.
        text: Output file with the operations' locations.
        bytecode: Additional output file if the constants are so large that ``text`` omits them; else "".

    Raises:
        CompileFailed: a module contains operations other than StableHLO.
    """
    from iree.compiler import ir

    from hil.controller.models.conversions.tensorflow_program import Constant, make_lowered_module

    with ir.Context() as context, ir.Location.unknown(context):
        merged = ir.Module.create()
        for name, method in methods.items():
            constants = {
                place: Constant(TensorSpec("", dtype, tuple(shape)), load_npy(Path(file), dtype))
                for place, dtype, shape, file in method["constants"]
            }
            module = make_lowered_module(read_text(Path(method["mlir"]), MAX_MODEL_BYTES), name, constants)
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
