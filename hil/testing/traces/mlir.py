"""What happens to MLIR in a process of its own: methods become one module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.storage.runs import write_file


def merge(methods: Mapping[str, str], output: str) -> None:
    """Make the ``main`` of several modules the functions of one.

    Args:
        methods: name -> file with a module whose one public function is ``main``, as TensorFlow lowers it.
        output: the file to write, as text with the places where operations come from.

    Raises:
        CompileFailed: a module holds what is no StableHLO.
    """
    from iree.compiler import ir

    from hil.controller.models.conversions.tensorflow_program import prepare

    with ir.Context() as context, ir.Location.unknown(context):
        merged = ir.Module.create()
        for name, path in methods.items():
            module = ir.Module.parse(prepare(Path(path).read_text()))
            operations = list(module.body.operations)
            for operation in operations:
                old = ir.StringAttr(operation.attributes["sym_name"]).value
                new = name if old == "main" else f"{name}.{old}"
                ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
                ir.SymbolTable.set_symbol_name(operation, new)
            for operation in operations:
                merged.body.append(operation.detach_from_parent())
        write_file(Path(output), merged.operation.get_asm(enable_debug_info=True).encode(), option="")
