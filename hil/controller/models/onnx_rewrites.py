"""Rewrites of ONNX models: local functions inlined, operators converted to a newer opset.

Each is checked against the original on a case's inputs: see :mod:`hil.controller.models.rewrite_check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hil.controller.models.importers.onnx_nodes import (
    constants_of,
    graphs_of,
    node_label,
    nodes_and_functions,
    nodes_of,
)
from hil.controller.storage.texts import first_line, unique_name
from hil.formats.onnx_functions import inline_functions

# The oldest opset that the lowerings of IREE's importer are written for.
OPSET = 17
INLINER = "onnx.inliner"
# From this opset on these operators normalize one axis; before, all axes from theirs on as one.
_FLATTENING_UNTIL = 13
_OLD_RESIZE = 10


def needed_rewrites(model: Any) -> list[str]:
    """Return the names of the rewrites that :func:`rewrites` makes of a model."""
    names = [INLINER] if model.functions else []
    version = opset_of(model)
    if version and version < OPSET and _changed_operators(model, version):
        names.append(_converter(version))
    return names


def rewrites(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result of each rewrite that IREE's importer needs, in order. The last result counts.

    Where the operators mean the same in opset 17, only the model's opset number changes, which is not a rewrite.
    """
    if model.functions:
        model = inline_functions(model)
        yield INLINER, model
    # Before the converter adds nodes: names are numbered as they are everywhere else.
    name_nodes(model)
    version = opset_of(model)
    if not version or version >= OPSET:
        return
    if not _changed_operators(model, version):
        next(item for item in model.opset_import if item.domain in ("", "ai.onnx")).version = OPSET
        return
    try:
        converted = convert_opset(model, OPSET)
    except Exception as error:  # what cannot be converted may still be importable as it is
        print(f"note: stays at opset {version}: {first_line(error)}", flush=True)
        return
    yield _converter(version), converted


def rewritten(model: Any) -> Any:
    """Return a model with every rewrite that IREE's importer needs."""
    for _, result in rewrites(model):
        model = result
    return model


def opset_of(model: Any) -> int:
    """Return the version of ONNX's own operators that a model uses; 0 if it uses none."""
    return next((int(item.version) for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)


def name_nodes(model: Any) -> None:
    """Give every node, those of subgraphs too, a name that no other has."""
    taken: set[str] = set()
    for number, node in enumerate(nodes_of(model.graph.node)):
        node.name = unique_name(node.name or f"{node.op_type}_{number}", taken)


def convert_opset(model: Any, version: int) -> Any:
    """Convert a model to a newer opset with onnx's converter, and repair what that does wrong.

    - ``Resize`` 10 and ``Upsample`` take the pixel at ``x / scale``; the converter leaves what ``Resize`` 11 does.
    - ``Hardmax`` before 13 sees all axes from its own on as one, which the converter ignores.

    Raises:
        ValueError: ``Resize`` 10 with scales that are not known, or that are above and below 1.
        Exception: onnx's converter cannot convert the model.
    """
    from onnx import ModelProto, helper, version_converter

    before = opset_of(model)
    source = ModelProto()
    source.CopyFrom(model)
    graphs = [source.graph, *(inner for node in nodes_of(source.graph.node) for inner in graphs_of(node))]
    # By output: the converter makes nodes without names.
    sampling: dict[str, tuple[str, str]] = {}
    # Inner graphs first: changing a graph copies its nodes, and what these hold.
    for graph in reversed(graphs):
        if before < _FLATTENING_UNTIL <= version:
            _flatten_hardmax(graph)
        for node in graph.node:
            if node.op_type == "Upsample" or (node.op_type == "Resize" and before == _OLD_RESIZE):
                sampling[node.output[0]] = node.name, _rounding(node, graph)
    converted = version_converter.convert_version(source, version)
    for node in nodes_of(converted.graph.node):
        if node.op_type == "Resize" and node.output[0] in sampling:
            node.name, rounding = sampling[node.output[0]]
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", rounding))
    return converted


def _rounding(node: Any, graph: Any) -> str:
    """Return how a ``Resize`` 10 or ``Upsample`` rounds to the nearest pixel: down, but up where it shrinks."""
    from onnx import numpy_helper

    is_nearest = all(attribute.s == b"nearest" for attribute in node.attribute if attribute.name == "mode")
    if node.op_type == "Upsample" or not is_nearest:
        return "floor"
    scales = constants_of(graph).get(node.input[1])
    if scales is None or scales.data_location == scales.EXTERNAL:
        raise ValueError(f"the scales of {node_label(node)} are not constant")
    values = numpy_helper.to_array(scales)
    if (values >= 1).all():
        return "floor"
    if (values <= 1).all():
        return "ceil"
    raise ValueError(f"{node_label(node)} both enlarges and shrinks: Resize {_OLD_RESIZE} rounds each axis its own way")


def _flatten_hardmax(graph: Any) -> None:
    """Write each Hardmax as one of a matrix."""
    from onnx import helper

    nodes = []
    for node in graph.node:
        if node.op_type != "Hardmax" or node.domain not in ("", "ai.onnx"):
            nodes.append(node)
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        (taken,), (given,), name = node.input, node.output, node.name
        shape, matrix, result = (f"{given}/{part}" for part in ("shape", "matrix", "hardmax"))
        nodes += [
            helper.make_node("Shape", [taken], [shape], name=f"{name}/shape"),
            helper.make_node("Flatten", [taken], [matrix], name=f"{name}/flatten", axis=axis),
            helper.make_node("Hardmax", [matrix], [result], name=name, axis=1),
            helper.make_node("Reshape", [result, shape], [given], name=f"{name}/reshape"),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _converter(version: int) -> str:
    return f"onnx.version_converter {version} -> {OPSET}"


def _changed_operators(model: Any, version: int) -> set[str]:
    """Return the operators of a model that have other inputs, outputs, attributes or defaults in the newer opset."""
    used = {node.op_type for node in nodes_and_functions(model) if node.domain in ("", "ai.onnx")}
    return {name for name in used if _signature(name, version) != _signature(name, OPSET)}


def _signature(operator: str, version: int) -> Any:
    from onnx import defs

    if not defs.has(operator, max_inclusive_version=version):
        return None
    schema = defs.get_schema(operator, max_inclusive_version=version)
    sides = [[(one.name, one.option) for one in side] for side in (schema.inputs, schema.outputs)]
    attributes = {
        name: (one.type, one.required, one.default_value.SerializeToString()) for name, one in schema.attributes.items()
    }
    return sides, attributes, schema.deprecated
