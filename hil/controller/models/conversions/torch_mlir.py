"""Run torch-mlir's importer, with module paths as locations and large weights in a separate file. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from iree.compiler import ir
from iree.compiler.extras import fx_importer

from hil.controller.models.compiling import (
    EXTERNAL_FROM_BYTES,
    EXTERNAL_FROM_ELEMENTS,
    PARAMETER_SCOPE,
    PARAMETERS,
    write_parameters,
)

# torch-mlir expects these operators decomposed. For most other ATen operators, its own lowering is better than torch's
# decomposition. The list comes from torch-mlir's exporter, which IREE's wheel does not include.
_DECOMPOSED = (
    "_adaptive_avg_pool2d _euclidean_dist _log_softmax _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _prelu_kernel _to_copy _unsafe_index addmm binary_cross_entropy dot "
    "embedding_dense_backward full grid_sampler_2d im2col index_copy index_copy_ lift_fresh_copy log_sigmoid_forward "
    "masked_fill native_group_norm native_layer_norm nll_loss_backward nll_loss_forward norm select_backward "
    "slice_backward soft_margin_loss split split_with_sizes squeeze t unsafe_split upsample_bilinear2d"
).split()


# Operators that must not be decomposed. torch decomposes them by default, but torch-mlir's lowering is better or the
# only supported form.
_KNOWN = ("roll", "fft_rfft")


def decompose_program(program: Any) -> Any:
    """Decompose a program into operators that torch-mlir supports."""
    known = {operator for name in _KNOWN for operator in _list_overloads(name)}
    table = {op: how for op, how in torch.export.default_decompositions().items() if op not in known}
    wanted = torch._decomp.get_decompositions([getattr(torch.ops.aten, name) for name in _DECOMPOSED])
    return program.run_decompositions({**table, **wanted})


def _list_overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def import_program(program: Any, function: str, folder: Path, name_of: Callable[[Any], str]) -> Any:
    """Import a decomposed and marked program as a module. Large weights go into ``params.irpa`` in the directory.

    Args:
        program: exported program.
        function: function name.
        folder: directory for the weights.
        name_of: returns a node's name, or "" if unknown.
    """
    weights = [*program.state_dict.values(), *(value for value in program.constants.values() if _is_tensor(value))]
    heavy = sum(weight.nbytes for weight in weights) > EXTERNAL_FROM_BYTES
    hooks = _ExternalWeights() if heavy else None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # for nodes without a name, the importer would use Python source lines
    importer = fx_importer.FxImporter(
        context=ir.Context(), hooks=hooks, graph_node_importer_cls=_make_located_importer(name_of)
    )
    importer.import_program(program, func_name=function, func_visibility="public")
    if hooks is not None:
        hooks.save(folder / PARAMETERS)
    return importer.module_op


def _make_located_importer(name_of: Callable[[Any], str]) -> type:
    """Return a node importer with module names as locations instead of Python source lines."""

    class NodeLocations(fx_importer.ContextCache):  # type: ignore[misc]  # the package has no types
        def get_node_location(self, node: Any) -> Any:
            name = name_of(node)
            return ir.Location.name(name, context=self._c) if name else None

    class LocatedImporter(fx_importer.GraphNodeImporter):  # type: ignore[misc]  # the package has no types
        def __init__(self, importer: Any, context: Any, cache: Any, block: Any) -> None:
            super().__init__(importer, context, NodeLocations(context), block)

    return LocatedImporter


class _ExternalWeights(fx_importer.FxImporterHooks):  # type: ignore[misc]  # the package has no types
    """Hooks that store large weights in an archive and load them as globals."""

    def __init__(self) -> None:
        self._module: Any = None
        self._weights: dict[str, Any] = {}

    def prepare_module(self, module_op: Any) -> None:
        """Remember the module, which receives the globals."""
        self._module = module_op

    def resolve_literal(self, gni: Any, literal: Any, info: Any) -> Any:
        """Return a load of the global for a large tensor, or None for other values."""
        if not _is_tensor(literal) or literal.numel() < EXTERNAL_FROM_ELEMENTS or literal.dtype == torch.uint8:
            return None
        context = self._module.context
        name = next((name for name, weight in self._weights.items() if weight is literal), "")
        vtensor = gni._cc.tensor_to_vtensor_type(literal)
        # The torch dialect has signed integers; lower dialects have signless integers.
        with context:
            element = fx_importer.TORCH_DTYPE_TO_MLIR_TYPE[literal.dtype]()
            if ir.IntegerType.isinstance(element):
                element = ir.IntegerType.get_signless(ir.IntegerType(element).width)
            kind = ir.RankedTensorType.get(list(literal.shape), element, loc=ir.Location.unknown())
        if not name:
            name = f"weight{len(self._weights)}" if info is None else str(info.input_spec.target)
            self._weights[name] = literal
            with ir.InsertionPoint.at_block_begin(self._module.regions[0].blocks[0]), ir.Location.unknown(context):
                ir.Operation.create(
                    "util.global",
                    attributes={
                        "sym_name": ir.StringAttr.get(name),
                        "sym_visibility": ir.StringAttr.get("private"),
                        "type": ir.TypeAttr.get(kind),
                        "initial_value": ir.Attribute.parse(
                            f'#stream.parameter.named<"{PARAMETER_SCOPE}"::"{name}"> : {kind}'
                        ),
                    },
                )
        attributes = {"global": ir.FlatSymbolRefAttr.get(name, context)}
        loaded = ir.Operation.create("util.global.load", results=[kind], attributes=attributes).result
        return ir.Operation.create("torch_c.from_builtin_tensor", results=[vtensor], operands=[loaded]).result

    def save(self, file: Path) -> None:
        """Write the archive directly from the weights' memory."""
        data = ((name, weight.detach().cpu().contiguous()) for name, weight in self._weights.items())
        write_parameters(file, ((name, one.reshape(-1).view(torch.uint8).numpy()) for name, one in data))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
