"""Rewrite ONNX models: inline local functions, convert to a newer opset, and expand operators of ONNX Runtime.

Each rewrite is checked against the original on a case's inputs:
see :mod:`hil.controller.models.onnx_files.rewrite_check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hil.controller.models.importers.onnx_nodes import iter_nodes, label_node, list_nodes, read_constants
from hil.controller.models.onnx_files.onnx_contrib import OLDEST_OPSET, expand_contrib, find_contrib
from hil.controller.storage.screen.texts import get_first_line, make_unique_name
from hil.formats.onnx_file import iter_subgraphs
from hil.formats.onnx_functions import inline_functions

# Oldest opset that IREE's importer supports.
OPSET = 17
INLINER = "onnx.inliner"
_EXPANSION = "expansion of "
# Since this opset, Hardmax normalizes a single axis. Before, it flattens and normalizes all axes from the given axis
# on.
_FLATTENING_UNTIL = 13
_OLD_RESIZE = 10


def list_needed_rewrites(model: Any) -> list[str]:
    """Return the names of the rewrites that :func:`iter_rewrites` applies to a model."""
    names = [INLINER] if model.functions else []
    version = get_opset(model)
    if version and version < OPSET and _list_changed_operators(model, version):
        names.append(_name_converter(version))
    if operators := find_contrib(model):
        names.append(_EXPANSION + ", ".join(operators))
    return names


def iter_rewrites(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and result of each rewrite that IREE's importer needs, in order. The last result is final.

    If opset 17 does not change the model's operators, only the opset number changes. This does not count as a rewrite.
    """
    if model.functions:
        model = inline_functions(model)
        yield INLINER, model
    # Name the nodes before the converter adds nodes, so that hil uses the same names everywhere.
    name_nodes(model)
    version = get_opset(model)
    if version and version < OPSET:
        if not _list_changed_operators(model, version):
            next(item for item in model.opset_import if item.domain in ("", "ai.onnx")).version = OPSET
        elif (converted := _try_convert(model, version)) is not None:
            model = converted
            yield _name_converter(version), model
    if operators := find_contrib(model):
        if (version := get_opset(model)) < OLDEST_OPSET:
            print(f"note: cannot expand {', '.join(operators)} in opset {version}, requires {OLDEST_OPSET}", flush=True)
        else:
            yield _EXPANSION + ", ".join(operators), expand_contrib(model, version)


def _try_convert(model: Any, version: int) -> Any:
    """Return the model in the newer opset, or None if onnx cannot convert it.

    The importer may still accept such a model.
    """
    try:
        return convert_opset(model, OPSET)
    except Exception as error:
        print(f"note: cannot convert opset {version}: {get_first_line(error)}", flush=True)
        return None


def rewrite_model(model: Any) -> Any:
    """Return a model with all rewrites that IREE's importer needs."""
    for _, result in iter_rewrites(model):
        model = result
    return model


def get_opset(model: Any) -> int:
    """Return the version of ONNX's standard opset that a model uses, or 0."""
    return next((int(item.version) for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)


def name_nodes(model: Any) -> None:
    """Give every node a unique name, including nodes in subgraphs."""
    taken: set[str] = set()
    for number, node in enumerate(iter_nodes(model.graph.node)):
        node.name = make_unique_name(node.name or f"{node.op_type}_{number}", taken)


def convert_opset(model: Any, version: int) -> Any:
    """Convert a model to a newer opset with onnx's converter, and fix the converter's errors.

    - ``Resize`` 10 and ``Upsample`` read the pixel at ``x / scale``. The converter does not set this, so the different
      default of ``Resize`` 11 would apply.
    - ``Hardmax`` before opset 13 flattens all axes from the given axis on. The converter ignores this.

    Raises:
        ValueError: the scales for a ``Resize`` 10 are unknown, or some are above 1 and others below 1.
        Exception: onnx's converter failed.
    """
    from onnx import ModelProto, helper, version_converter

    before = get_opset(model)
    source = ModelProto()
    source.CopyFrom(model)
    graphs = [source.graph, *(inner for node in iter_nodes(source.graph.node) for inner in iter_subgraphs(node))]
    # The key is an output, because the converter creates nodes without names.
    sampling: dict[str, tuple[str, str]] = {}
    # Inner graphs first: changing a graph copies its nodes with their subgraphs.
    for graph in reversed(graphs):
        if before < _FLATTENING_UNTIL <= version:
            _flatten_hardmax(graph)
        for node in graph.node:
            if node.op_type == "Upsample" or (node.op_type == "Resize" and before == _OLD_RESIZE):
                sampling[node.output[0]] = node.name, _choose_rounding(node, graph)
    converted = version_converter.convert_version(source, version)
    for node in iter_nodes(converted.graph.node):
        if node.op_type == "Resize" and node.output[0] in sampling:
            node.name, rounding = sampling[node.output[0]]
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", rounding))
    return converted


def _choose_rounding(node: Any, graph: Any) -> str:
    """Return the rounding to the nearest pixel of ``Resize`` 10 or ``Upsample``: up if the image shrinks, else down."""
    from onnx import numpy_helper

    is_nearest = all(attribute.s == b"nearest" for attribute in node.attribute if attribute.name == "mode")
    if node.op_type == "Upsample" or not is_nearest:
        return "floor"
    scales = read_constants(graph).get(node.input[1])
    if scales is None or scales.data_location == scales.EXTERNAL:
        raise ValueError(f"the scales of {label_node(node)} are not constant")
    values = numpy_helper.to_array(scales)
    if (values >= 1).all():
        return "floor"
    if (values <= 1).all():
        return "ceil"
    raise ValueError(
        f"{label_node(node)} enlarges some axes and shrinks others, which Resize {_OLD_RESIZE} rounds differently"
    )


def _flatten_hardmax(graph: Any) -> None:
    """Rewrite each Hardmax as a Hardmax of a matrix."""
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


def _name_converter(version: int) -> str:
    return f"onnx.version_converter {version} -> {OPSET}"


def _list_changed_operators(model: Any, version: int) -> set[str]:
    """Return the model's operators that have other inputs, outputs, attributes or defaults in the newer opset."""
    used = {node.op_type for node in list_nodes(model) if node.domain in ("", "ai.onnx")}
    return {name for name in used if _read_signature(name, version) != _read_signature(name, OPSET)}


def _read_signature(operator: str, version: int) -> Any:
    from onnx import defs

    if not defs.has(operator, max_inclusive_version=version):
        return None
    schema = defs.get_schema(operator, max_inclusive_version=version)
    sides = [[(one.name, one.option) for one in side] for side in (schema.inputs, schema.outputs)]
    attributes = {
        name: (one.type, one.required, one.default_value.SerializeToString()) for name, one in schema.attributes.items()
    }
    return sides, attributes, schema.deprecated
