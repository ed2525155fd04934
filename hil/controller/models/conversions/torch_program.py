"""Convert exported PyTorch programs to MLIR's torch dialect and to ONNX.

Call these functions only in an isolated process: they import torch.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import EXTERNAL_FROM_BYTES, report_phase
from hil.controller.models.conversions import ONNX_HINT, OP_TYPES
from hil.controller.models.importers.exported.pt2 import Sizes, call_of, is_tensor, keep_outputs
from hil.controller.models.importers.exported.pt2_archive import load_program
from hil.controller.models.importers.mlir import declare, format_declaration, get_function
from hil.controller.models.importers.onnx_nodes import list_nodes
from hil.controller.storage.screen.texts import convert_foreign_errors, get_first_line, make_unique_name
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed
from hil.formats.onnx_file import load_onnx

_OPSET = 20


def to_mlir(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a program as MLIR bytecode. Each operator's location names the operator's module.

    Each call starts with the saved values of buffers. The new values of changed buffers and inputs follow the outputs.
    Large weights go into ``params.irpa`` in the same directory. If ``dims`` sets all symbolic dimensions, the result is
    static.
    """
    from hil.controller.models.conversions.torch_mlir import decompose_program, import_program

    report_phase("load")
    program = load_program(path)
    types = mark(program)
    inputs, outputs = _read_specs(path, program, dims)
    with convert_foreign_errors(CompileFailed, f"torch-mlir cannot import {Path(path).name}", hint=ONNX_HINT):
        signature = format_declaration(function, inputs, outputs)
        report_phase("decompose")
        program = decompose_program(_trace_with_sizes(program, inputs))
        report_phase("torch-mlir: import")
        module = import_program(_make_stateless(program), function, Path(output).parent, get_marked_name)
        module.verify()
        declare(get_function(module, function), signature)
    with Path(output).open("wb") as file:
        module.write_bytecode(file)
    (Path(output).parent / OP_TYPES).write_text(json.dumps(types))


def to_onnx(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a program as ONNX with module names for nodes. Weights of 256 MB and more go into a separate file.

    Names of inputs, outputs and symbolic dimensions come from :mod:`hil.controller.models.importers.exported.pt2`. If
    ``dims`` sets all symbolic dimensions, the result is static.
    """
    import onnx
    import torch

    program = load_program(path)
    inputs, outputs = _read_specs(path, program, dims)
    if pairs := [spec for spec in (*inputs, *outputs) if spec.dtype.startswith("complex")]:
        raise CompileFailed(
            f"unsupported complex tensor {pairs[0]}: torch.onnx converts complex values to pairs of floats"
        )
    heavy = sum(weight.nbytes for weight in program.state_dict.values()) > EXTERNAL_FROM_BYTES
    # The exporter raises various nested exceptions.
    with convert_foreign_errors(
        CompileFailed,
        f"torch.onnx cannot export {Path(path).name}",
        error_text=lambda error: get_first_line(_find_root_cause(error)),
    ):
        report_phase("torch.onnx: export")
        exported = torch.onnx.export(
            _make_stateless(_trace_with_sizes(program, inputs).run_decompositions(_get_batch_norm_decompositions())),
            dynamo=True,
            opset_version=_OPSET,
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            verbose=False,
        )
        assert exported is not None
        exported.rename_axes(Sizes(program).names)
        exported.save(output, external_data=heavy)
    model = load_onnx(output)
    model.graph.name = function
    name_onnx_nodes(model)
    onnx.save(model, output)


def _read_specs(path: str, program: Any, dims: Mapping[str, int]) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    """Return the specs for the program's inputs and outputs, with the importer's names."""
    sizes = Sizes(program)
    sizes.fix(Path(path).name, dims)
    return sizes.inputs(path), sizes.outputs(path)


def _trace_with_sizes(program: Any, inputs: Sequence[TensorSpec]) -> Any:
    """Trace a program with dynamic shapes again, for the shapes of these inputs."""
    import torch

    if not program.range_constraints or not all(spec.is_static for spec in inputs):
        return program
    examples = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in inputs}
    args, kwargs = call_of(program, examples)
    with torch.fx.traceback.preserve_node_meta():
        return torch.export.export(program.module(check_guards=False), args, kwargs)


def _make_stateless(program: Any) -> Any:
    """Make the program stateless.

    The new program returns the output tensors without constants, then the new values of changed state.
    """
    from torch.export.graph_signature import OutputKind

    keep_outputs(program, lambda spec: spec.kind is OutputKind.USER_OUTPUT and is_tensor(spec.arg))
    return program


def _get_batch_norm_decompositions() -> Any:
    """Return decompositions of batch norm in training mode. The exporter itself would use the running statistics."""
    import torch

    kinds = ("_native_batch_norm_legit", "_native_batch_norm_legit_functional")
    return torch._decomp.get_decompositions([getattr(torch.ops.aten, kind) for kind in kinds])


def _find_root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# Metadata key that torch.fx preserves in decompositions and archives.
_META = "custom"
_NAME = "hil.name"
_ONNX = "pkg.torch.onnx."
_LIBRARY = "torch.nn.modules."


def mark(program: Any) -> dict[str, str]:
    """Store each node's name in metadata that survives decompositions. Return name -> type, in order."""
    types: dict[str, str] = {}
    nodes = [node for graph in iter_graphs(program) for node in graph.nodes if node.op == "call_function"]
    places = [_find_module(node) for node in nodes]
    shared = Counter(places)
    for node, (path, kind) in zip(nodes, places, strict=True):
        alone = shared[path, kind] == 1
        name, type_ = name_operator(path, kind if alone else "", node.name, _get_operator_name(node.target))
        node.meta[_META] = {**(node.meta.get(_META) or {}), _NAME: name}
        types[name] = type_
    return types


def iter_graphs(program: Any) -> Iterator[Any]:
    """Yield the graphs of a program, including branches and loops."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield module.graph


def get_marked_name(node: Any) -> str:
    """Return a node's name in a marked program, decomposed or not; "" if unknown."""
    return str((node.meta.get(_META) or {}).get(_NAME, ""))


def name_operator(path: str, kind: str, node: str, operator: str) -> tuple[str, str]:
    """Return the name and type of an operator.

    If its module is a single torch layer, return the module's name and type.

    Args:
        path: innermost module's path, such as ``blocks.1.attn``; "" is the model itself.
        kind: that module's class, such as ``torch.nn.modules.linear.Linear``; "" if it has multiple operators.
        node: node name.
        operator: operator name.
    """
    if path and kind.startswith(_LIBRARY):
        return path, kind.rpartition(".")[2]
    return f"{path}.{node}" if path else node, operator


def name_onnx_nodes(model: Any) -> None:
    """Rename the nodes of an ONNX model from torch's exporter to their module paths, instead of ``node_conv2d_3``.

    If a module has multiple nodes, the operator is appended: ``gru.Squeeze``.
    """
    nodes = list_nodes(model)
    names = [_read_onnx_name(node) for node in nodes]
    shared = Counter(names)
    taken: set[str] = set()
    for node, name in zip(nodes, names, strict=True):
        if name:
            node.name = make_unique_name(f"{name}.{node.op_type}" if shared[name] > 1 else name, taken)


def _read_onnx_name(node: Any) -> str:
    properties: Mapping[str, str] = {entry.key: entry.value for entry in node.metadata_props}
    try:
        scopes, classes = (ast.literal_eval(properties[_ONNX + key]) for key in ("name_scopes", "class_hierarchy"))
    except (KeyError, ValueError, SyntaxError):
        return ""
    if not scopes:
        return ""
    path, kind = _normalize_module(*map(str, (scopes[-2], classes[-2]))) if len(scopes) > 1 else ("", "")
    return name_operator(path, kind, str(scopes[-1]), node.op_type)[0]


def _find_module(node: Any) -> tuple[str, str]:
    """Return path and class of a node's innermost module; both empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    return _normalize_module(path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")


def _normalize_module(path: str, kind: str) -> tuple[str, str]:
    """Return the path and class of a module.

    Replace the module that torch adds for size operators by the model itself.
    """
    return ("", "") if path == "_empty_nn_module_stack_from_metadata_hook" else (path, kind)


def _get_operator_name(target: Any) -> str:
    """Return an operator's name without overload: ``softmax`` for ``aten.softmax.int``."""
    schema = getattr(target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", target))
