"""Simplify a small ONNX model: sizes, constants and attributes. Run these functions in isolated processes only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.importers.onnx_data import read_raw
from hil.controller.models.importers.onnx_nodes import label_node
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.reduce.candidates.parts import MODEL
from hil.core.files import copy_file
from hil.core.tensors import Array, parse_dtype
from hil.formats.onnx_file import load_onnx
from hil.formats.ort_values import ONNX_TYPES

# The reduction replaces constants with more elements by random values.
_SMALL_ELEMENTS = 16
# Integer constants with at most this many elements may contain a size, such as the shape parameter of Reshape.
_SHAPE_ELEMENTS = 8
_SIZES = (1, 2, 8)
# Maximum constants to replace one by one, if they cannot all be replaced together.
_CONSTANTS = 8
# Matches a long list of values in a model's text; the group is the start to keep.
_LONG_LIST = re.compile(r"(\{[^{}\n]{60})[^{}\n]*(?=\})")
_NAMES = {number: name for name, number in ONNX_TYPES.items()}

# A change to the model: ``kind`` (size, constants or attribute), the arguments of the function for this kind, and
# ``text``.
Change = dict[str, Any]


def list_changes(model: str, inputs: str) -> list[list[Change]]:
    """Return groups of possible changes. Of each group, only the first change that keeps the failure is applied.

    Args:
        model: the model file.
        inputs: directory with the values of the inputs, see :mod:`hil.controller.storage.tensor_files`.
    """
    graph = load_onnx(Path(model)).graph
    shapes = [tuple(array.shape) for array in load_tensors(Path(inputs)).values()]
    shapes += [tuple(tensor.dims) for tensor in graph.initializer]
    found = [list(_list_sizes(size)) for size in sorted({size for shape in shapes for size in shape}, reverse=True)]
    large = [tensor.name for tensor in graph.initializer if _is_large(tensor)]
    if large:
        found.append([_change("constants", f"random values for {len(large)} constants", names=large)])
        found += [
            [_change("constants", f"random values for {name}", names=[name])] for name in large[: len(large) > 1 and 8]
        ]
    for number, node in enumerate(graph.node):
        for attribute in node.attribute:
            text = f"{label_node(node)} without {attribute.name}"
            found.append([_change("attribute", text, node=number, attribute=attribute.name)])
    return [group for group in found if group]


def apply_change(model: str, inputs: str, change: Change, folder: str) -> bool:
    """Write a changed model, and the values of its inputs in a subdirectory ``inputs``.

    Returns:
        False if the changed model is invalid, or equal to the model.
    """
    import onnx

    source = Path(model)
    proto = load_onnx(source)
    values = load_tensors(Path(inputs))
    arguments = {name: value for name, value in change.items() if name not in ("kind", "text")}
    if change["kind"] == "size":
        values = {name: _cut(array, **arguments) for name, array in values.items()}
        changed = _change_sizes(proto, values, source.parent, **arguments)
    elif change["kind"] == "constants":
        changed = _change_constants(proto, source.parent, **arguments)
    else:
        changed = _remove_attribute(proto, **arguments)
    if not changed or not _infer_outputs(proto):
        return False
    for location in sorted({_get_location(tensor) for tensor in proto.graph.initializer} - {""}):
        copy_file(source.parent / location, Path(folder) / location)
    onnx.save(proto, Path(folder) / MODEL)
    save_tensors(Path(folder) / "inputs", values)
    return True


def _change(kind: str, text: str, **arguments: Any) -> Change:
    return {"kind": kind, "text": text, **arguments}


def _list_sizes(size: int) -> Iterator[Change]:
    for new in sorted({*_SIZES, size // 2}):
        if 0 < new < size:
            yield _change("size", f"size {new} instead of {size}", old=size, new=new)


def _is_large(tensor: Any) -> bool:
    name = _NAMES.get(tensor.data_type, "string")
    return math.prod(tensor.dims) > _SMALL_ELEMENTS and name in ("float16", "float32", "float64", "bfloat16")


def _cut(array: Array, old: int, new: int) -> Array:
    return np.ascontiguousarray(array[tuple(slice(new if size == old else None) for size in array.shape)])


def _change_sizes(proto: Any, values: Mapping[str, Array], folder: Path, old: int, new: int) -> bool:
    """Replace the size ``old`` by ``new`` in inputs and constants, and in parameters that contain shapes."""
    changed = False
    for value in proto.graph.input:
        if value.name in values:
            for dim, size in zip(value.type.tensor_type.shape.dim, values[value.name].shape, strict=True):
                changed |= dim.dim_value != size
                dim.dim_value = size
    for tensor in proto.graph.initializer:
        is_shape = _NAMES.get(tensor.data_type) == "int64" and math.prod(tensor.dims) <= _SHAPE_ELEMENTS
        if old not in tensor.dims and not is_shape:
            continue
        array = _read_constant(tensor, folder)
        made = _cut(array, old, new)
        if is_shape and len(tensor.dims) <= 1:
            made = np.where(made == old, np.int64(new), made)
        if made.shape != array.shape or (is_shape and not np.array_equal(made, array)):
            _write_constant(tensor, made)
            changed = True
    return changed


def _change_constants(proto: Any, folder: Path, names: Iterable[str]) -> bool:
    """Replace constants by random multiples of 1/8 from -1 to 1, with a fixed seed.

    These values are short decimals, so the model's text stays readable.
    """
    chosen, changed = set(names), False
    for number, tensor in enumerate(proto.graph.initializer):
        if tensor.name in chosen:
            array = _read_constant(tensor, folder)
            made = (np.random.default_rng(number).integers(-8, 9, array.shape) / 8).astype(array.dtype)
            changed |= not np.array_equal(made, array)
            _write_constant(tensor, made)
    return changed


def _remove_attribute(proto: Any, node: int, attribute: str) -> bool:
    own = proto.graph.node[node].attribute
    kept = [one for one in own if one.name != attribute]
    changed = len(kept) < len(own)
    del own[:]
    own.extend(kept)
    return changed


def _infer_outputs(proto: Any) -> bool:
    """Set the types and shapes of the outputs. Return False if the model is invalid."""
    import onnx

    from hil.controller.models.importers.onnx import make_light_copy

    graph = proto.graph
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(make_light_copy(proto), True, True, True)
        for value in inferred.graph.output:
            value.type.tensor_type.shape.SetInParent()  # the checker requires a shape
        onnx.checker.check_model(inferred)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError):
        return False
    for value, found in zip(graph.output, inferred.graph.output, strict=True):
        value.type.CopyFrom(found.type)
    return True


def _get_location(tensor: Any) -> str:
    if tensor.data_location != tensor.EXTERNAL:
        return ""
    return str(next(entry.value for entry in tensor.external_data if entry.key == "location"))


def _read_constant(tensor: Any, folder: Path) -> Array:
    """Return a constant's values; external data is memory-mapped."""
    from onnx import numpy_helper

    if tensor.data_location != tensor.EXTERNAL:
        return numpy_helper.to_array(tensor)
    array: Array = read_raw(tensor, folder).view(parse_dtype(_NAMES[tensor.data_type])).reshape(tuple(tensor.dims))
    return array


def _write_constant(tensor: Any, array: Array) -> None:
    from onnx import numpy_helper

    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))


def print_model(model: str) -> dict[str, Any]:
    """Return a model's ``text``, without the values of large constants, and the ``operators`` in order."""
    import onnx

    from hil.controller.models.importers.onnx import make_light_copy

    proto = load_onnx(Path(model))
    operators = [node.op_type for node in proto.graph.node]
    return {"text": _LONG_LIST.sub(r"\1...", onnx.printer.to_text(make_light_copy(proto))), "operators": operators}
