"""Expand the batch normalization gradient, which IREE cannot compile, into supported operations."""

from __future__ import annotations

from typing import Any

from hil.controller.models.importers.mlir import find_operations

_OPERATION = "stablehlo.batch_norm_grad"
# From StableHLO's specification. Each gradient operation becomes a call, which IREE inlines.
_FUNCTION = """\
func.func private @"{name}"(%x: {x}, %scale: {c}, %mean: {c}, %variance: {c}, %dy: {x}) -> ({x}, {c}, {c}) {{
  %zero = stablehlo.constant dense<0.0> : {scalar}
  %epsilon = stablehlo.constant dense<{epsilon}> : {c}
  %count = stablehlo.constant dense<{count}> : {c}
  %shifted = stablehlo.add %variance, %epsilon : {c}
  %inverse = stablehlo.rsqrt %shifted : {c}
  %means = stablehlo.broadcast_in_dim %mean, dims = [{axis}] : ({c}) -> {x}
  %centered = stablehlo.subtract %x, %means : {x}
  %weighted = stablehlo.multiply %dy, %centered : {x}
  %products = stablehlo.reduce(%weighted init: %zero) applies stablehlo.add across dimensions = [{others}]
    : ({x}, {scalar}) -> {c}
  %dscale = stablehlo.multiply %products, %inverse : {c}
  %doffset = stablehlo.reduce(%dy init: %zero) applies stablehlo.add across dimensions = [{others}]
    : ({x}, {scalar}) -> {c}
  %spread = stablehlo.divide %products, %shifted : {c}
  %spreads = stablehlo.broadcast_in_dim %spread, dims = [{axis}] : ({c}) -> {x}
  %along = stablehlo.multiply %centered, %spreads : {x}
  %doffsets = stablehlo.broadcast_in_dim %doffset, dims = [{axis}] : ({c}) -> {x}
  %counts = stablehlo.broadcast_in_dim %count, dims = [{axis}] : ({c}) -> {x}
  %all = stablehlo.multiply %counts, %dy : {x}
  %rest = stablehlo.subtract %all, %doffsets : {x}
  %difference = stablehlo.subtract %rest, %along : {x}
  %slope = stablehlo.multiply %scale, %inverse : {c}
  %rate = stablehlo.divide %slope, %count : {c}
  %rates = stablehlo.broadcast_in_dim %rate, dims = [{axis}] : ({c}) -> {x}
  %dx = stablehlo.multiply %rates, %difference : {x}
  return %dx, %dscale, %doffset : {x}, {c}, {c}
}}
"""


def expand_batch_norm_grad(module: Any) -> None:
    """Replace each batch normalization gradient in a StableHLO module by a call, and add the called functions."""
    from iree.compiler import ir

    for number, operation in enumerate(find_operations(module.operation, _OPERATION)):
        with module.context, operation.location:
            # TensorFlow's names never start with a dot.
            name = f".batch_norm_grad.{number}"
            parsed = ir.Module.parse(_format_function(name, operation))
            module.body.append(parsed.body.operations[0])
            called = {"callee": ir.FlatSymbolRefAttr.get(name)}
            call = ir.Operation.create(
                "func.call",
                results=[result.type for result in operation.results],
                operands=list(operation.operands),
                attributes=called,
                ip=ir.InsertionPoint(operation),
            )
            for old, new in zip(operation.results, call.results, strict=True):
                old.replace_all_uses_with(new)
            operation.erase()


def _format_function(name: str, operation: Any) -> str:
    from iree.compiler import ir

    tensor = ir.RankedTensorType(operation.operands[0].type)
    axis = ir.IntegerAttr(operation.attributes["feature_index"]).value
    others = [number for number in range(tensor.rank) if number != axis]
    count = 1
    for number in others:
        count *= tensor.get_dim_size(number)
    return _FUNCTION.format(
        name=name,
        x=tensor,
        c=operation.operands[1].type,
        scalar=ir.RankedTensorType.get([], tensor.element_type),
        epsilon=float(ir.FloatAttr(operation.attributes["epsilon"]).value),
        count=float(count),
        axis=axis,
        others=", ".join(map(str, others)),
    )
