"""Import ONNX into MLIR's torch dialect. Node names become locations; large weights go to a separate file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.iree_integers import narrow_functions
from hil.controller.models.compiling import (
    EXTERNAL_FROM_ELEMENTS,
    PARAMETER_SCOPE,
    write_parameters,
)
from hil.controller.models.importers.mlir import declare
from hil.controller.models.importers.onnx import make_light_copy
from hil.controller.models.importers.onnx_data import read_raw
from hil.controller.models.importers.onnx_nodes import iter_nodes
from hil.controller.models.onnx_files.onnx_model import is_heavy, load_model
from hil.controller.models.onnx_files.onnx_rewrites import name_nodes, rewrite_model
from hil.controller.storage.screen.texts import get_first_line
from hil.errors import CompileFailed
from hil.formats.onnx_file import iter_subgraphs


def convert(
    path: Path,
    dims: Mapping[str, int],
    declaration: str | None,
    out: Path,
    parameters: Path,
    text: Path | None,
    *,
    narrow: bool = False,
) -> None:
    """Write a model as MLIR bytecode.

    Args:
        path: The ONNX file, with external data in the same directory.
        declaration: Text for the function's ``iree.abi.declaration``, which IREE omits for ONNX.
        parameters: File for large weights, if the model has large weights. The scope of the weights is ``model``.
        text: File for the module as text, or None.
        narrow: Change int64 inputs and outputs to int32.

    Raises:
        CompileFailed: the model uses features that IREE's importer does not support.
    """
    from iree.compiler import ir

    model = _prepare_model(path, dims)
    heavy = is_heavy(model)
    module, importer = _import_model(model, ir.Context(), declaration, (path.parent, parameters) if heavy else None)
    if narrow:
        narrow_functions(module)
    if heavy:
        # External data is memory-mapped, so that the weights are never all in memory.
        tensors = importer._gi.initializer_map
        write_parameters(
            parameters, ((symbol, read_raw(tensors[name], path.parent)) for name, symbol in importer.globals)
        )
    with out.open("wb") as file:
        module.write_bytecode(file)
    if text is not None:
        text.write_text(module.get_asm(enable_debug_info=True, large_elements_limit=64, large_resource_limit=64))


def save_prepared(path: Path, dims: Mapping[str, int], out: Path) -> None:
    """Write the ONNX model in the form that IREE's importer receives."""
    import onnx

    onnx.save(_prepare_model(path, dims), out)


def add_to(
    module: Any,
    path: Path,
    dims: Mapping[str, int],
    function: str,
    declaration: str | None,
    *,
    narrow: bool = False,
) -> None:
    """Add a model with its weights to an ``ir.Module`` as another function with a unique name.

    The locations of the model's nodes are ``function/node``. All names are unique in the module.

    Raises:
        CompileFailed: the model uses features that IREE's importer does not support, or its weights are too large for a
            module. The module is unchanged.
    """
    from iree.compiler import ir

    model = _prepare_model(path, dims)
    if is_heavy(model):
        raise CompileFailed("the weights require a separate parameter file")
    model.graph.name = function
    for node in iter_nodes(model.graph.node):
        node.name = f"{function}/{node.name}"
    own, _ = _import_model(model, module.context, declaration, None)
    if narrow:
        narrow_functions(own)
    operations = list(own.regions[0].blocks[0].operations)
    # The importer writes some operators as private functions, whose names may exist already in the module.
    for operation in operations:
        name = ir.StringAttr(operation.attributes["sym_name"]).value
        if name != function:
            ir.SymbolTable.replace_all_symbol_uses(name, f"{function}.{name}", own)
            ir.SymbolTable.set_symbol_name(operation, f"{function}.{name}")
    for operation in operations:
        module.body.append(operation)


def _import_model(
    model: Any, context: Any, declaration: str | None, heavy: tuple[Path, Path] | None
) -> tuple[Any, Any]:
    """Import a model and return the module and the importer.

    Args:
        heavy: The directory of external data and the file for large weights; or None.
    """
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    try:
        info = onnx_importer.ModelInfo(model)
        module = info.create_module(context=context).operation
        if heavy:
            importer = _import_with_parameters(info, module, *heavy)
        else:
            importer = onnx_importer.NodeImporter.define_function(info.main_graph, module)
        importer.import_all()
        if declaration is not None:
            declare(importer._p, declaration)
        module.verify()
    except onnx_importer.OnnxImportError as error:
        raise CompileFailed(
            f"IREE's ONNX importer rejected the model: {get_first_line(error)}", detail=str(error)
        ) from error
    except ir.MLIRError as error:
        raise CompileFailed(
            f"importing the model gives invalid MLIR: {get_first_line(error)}", detail=str(error)
        ) from error
    return module, importer


def _prepare_model(path: Path, dims: Mapping[str, int]) -> Any:
    """Load a model with fixed sizes, inlined functions, a supported opset, inferred shapes and named nodes."""
    model = rewrite_model(load_model(path, dims))
    infer(model, make_light_copy(model))
    name_nodes(model)
    return model


def infer(model: Any, light: Any) -> None:
    """Infer shapes on a copy without weights, and write them to the model."""
    import onnx

    try:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except Exception as error:
        print(f"note: cannot infer shapes: {get_first_line(error)}", flush=True)
        return
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    for mine, theirs in zip(model.graph.output, inferred.graph.output, strict=True):
        mine.CopyFrom(theirs)
    # Nodes contain their subgraphs, so copying a node also copies the shapes in its subgraphs.
    for node, shaped in zip(model.graph.node, inferred.graph.node, strict=True):
        if any(iter_subgraphs(node)):
            node.CopyFrom(shaped)


def _import_with_parameters(info: Any, module: Any, folder: Path, parameters: Path) -> Any:
    from iree.compiler.tools.import_onnx import importer_externalization_overrides as overrides

    settings = overrides.ParamData(
        param_bit_threshold=None,
        num_elements_threshold=EXTERNAL_FROM_ELEMENTS,
        params_scope=PARAMETER_SCOPE,
        data_dir=str(folder),
        param_path=str(parameters),
        input_index_threshold=None,
    )
    return overrides.IREENodeImporter.define_function(info.main_graph, module, settings)
