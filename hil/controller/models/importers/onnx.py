"""Import ONNX models: signature, external files and known ranges, without loading external data."""

from __future__ import annotations

import contextlib
import functools
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.models.description import check_dims, make_description
from hil.controller.models.importers.onnx_data import check_data
from hil.controller.models.importers.onnx_nodes import has_float64, iter_nodes, iter_tensors, label_node
from hil.controller.models.importers.onnx_ranges import find_ranges
from hil.controller.models.onnx_files.onnx_rewrites import list_needed_rewrites
from hil.controller.storage.screen.texts import line
from hil.core.tensors import DTYPES, Dim, TensorSpec
from hil.errors import ImportFailed, UsageError
from hil.formats.onnx_file import load_onnx
from hil.formats.ort_values import ONNX_TYPES

_DTYPES = {number: name for name, number in ONNX_TYPES.items() if name in DTYPES}
# Domains with operators that onnx defines. "" and ai.onnx are the same.
_OWN_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
# Larger tensors are not passed to the checker and to shape inference, which need only their type.
_SMALL_BYTES = 1 << 16
# Names that exporters write for unnamed dimensions. Two dimensions with the same placeholder name may have different
# sizes.
_PLACEHOLDERS = ("", "?", "*", "-1", "None")
_MAX_VERSION = (1 << 31) - 1
# Hints for models with sequences, maps or optionals as inputs or outputs.
_TENSOR_HINTS = {
    "input": "use one input per tensor, and build the sequence in the model with SequenceConstruct",
    "output": "return tensors: SequenceAt or ConcatFromSequence for a sequence; for a classifier, export without "
    "ZipMap (skl2onnx: options={'zipmap': False})",
}
# Memory limit for shape inference, in addition to some copies of the model.
_INFER_BYTES = 1 << 30
_STATM = Path("/proc/self/statm")


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a model's signature.

    A dynamic dimension without a name is a symbol such as ``input.dim0``.

    Raises:
        ImportFailed: the file is not a valid ONNX model, uses an unknown operator, or has inputs or outputs other than
            tensors.
        UsageError: the function or dimension does not exist.
    """
    # Imported here to avoid a cycle: find_random_nodes imports from this package.
    from hil.controller.models.onnx_files.random_nodes import find_random_nodes

    file = Path(path)
    model = _load(file)
    graph = model.graph
    if function not in ("", graph.name, "main_graph"):
        raise UsageError(
            f"{file.name} has no function {function!r}", hint=f"use the only function of this model: {graph.name!r}"
        )
    external = check_data(file.name, model)
    foreign = _check_operators(file, model)
    initialised = {tensor.name for tensor in graph.initializer} | {
        item.values.name for item in graph.sparse_initializer
    }
    real_inputs = [value for value in graph.input if value.name not in initialised]
    for kind, values in (("input", real_inputs), ("output", graph.output)):
        for value in values:
            _check_tensor(file, kind, value)
    check_dims(file.name, dims, fix_dims(real_inputs, dims))
    light = make_light_copy(model)
    inferred = _infer(light)
    if not foreign:
        _check_structure(file, light)
    outputs = inferred.graph.output
    return make_description(
        file.name,
        graph.name or "main_graph",
        [make_value_spec(value) for value in real_inputs],
        [make_value_spec(value) for value in outputs] if all(map(_has_shape, outputs)) else None,
        ranges=find_ranges(inferred.graph, [value.name for value in real_inputs]),
        external=sorted(external),
        needs=external,
        float64=has_float64(inferred),
        producer={
            "name": model.producer_name,
            "version": model.producer_version,
            "ir_version": model.ir_version,
            "opsets": {item.domain or "ai.onnx": item.version for item in model.opset_import},
            "rewrites": list_needed_rewrites(model),
            "random": find_random_nodes(model),
            "defaults": [[spec.name, spec.dtype, list(spec.shape)] for spec in _list_defaults(model)],
        },
    )


def _list_defaults(model: Any) -> list[TensorSpec]:
    """Return the inputs with a default value.

    Before IR version 4, every initializer is also an input, so such inputs do not count as default values.
    """
    held = {tensor.name for tensor in model.graph.initializer} if model.ir_version >= 4 else set()
    values = [value for value in model.graph.input if value.name in held]
    known = [value for value in values if value.type.tensor_type.elem_type in _DTYPES and _has_shape(value)]
    return list(map(make_value_spec, known))


def fix_dims(values: Any, dims: Mapping[str, int]) -> set[str]:
    """Set the sizes of symbolic dimensions in value infos. Return all symbols in the value infos."""
    symbols = set()
    for value in values:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
                continue
            symbol = _get_symbol(dim) or f"{value.name}.dim{axis}"
            symbols.add(symbol)
            if symbol in dims:
                dim.dim_value = dims[symbol]
            else:
                dim.dim_param = symbol
    return symbols


def _get_symbol(dim: Any) -> str:
    """Return a dimension's name, or "" for an unnamed dimension. Placeholders such as ``?`` are not names."""
    return "" if dim.dim_param.strip() in _PLACEHOLDERS else str(dim.dim_param)


def _load(file: Path) -> Any:
    from google.protobuf.message import DecodeError

    try:
        model = load_onnx(file)
    except DecodeError as error:
        size = file.stat().st_size
        hint = "save the weights as external data: a protobuf file cannot exceed 2 GB" if size >= 1 << 31 else ""
        raise ImportFailed(
            f"{file.name} is not an ONNX model, or is truncated or damaged", hint=hint, detail=str(error)
        ) from error
    if not model.HasField("graph") or not model.ir_version:
        raise ImportFailed(f"{file.name} is not an ONNX model: missing graph or IR version")
    # protobuf returns bytes for invalid UTF-8, which later code cannot display or look up.
    if any(isinstance(text, bytes) for text in _iter_texts(model)):
        raise ImportFailed(f"{file.name} is damaged: invalid UTF-8 in a name")
    return model


def _iter_texts(message: Any) -> Iterator[Any]:
    """Yield all strings of a message, recursively. From a tensor, yield only the name and the external location."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message.name
        for entry in message.external_data:
            yield from (entry.key, entry.value)
        return
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.type == field.TYPE_STRING:
            yield from values
        elif field.type == field.TYPE_MESSAGE:
            for one in values:
                yield from _iter_texts(one)


def _check_operators(file: Path, model: Any) -> bool:
    """Reject unknown operators. Return True if the model uses operators that only ONNX Runtime knows."""
    from onnx import defs

    foreign = False
    newest = defs.onnx_opset_version()
    local = {(function.domain, function.name) for function in model.functions}
    versions = _read_opsets(file, model.opset_import)
    if versions.get("", 0) > newest:
        raise ImportFailed(
            f"unsupported opset {versions['']} in {file.name}: the installed onnx supports up to {newest}",
            hint="update the packages onnx and onnxruntime, or export the model with an older opset",
        )
    bodies = [(function.node, _read_opsets(file, function.opset_import)) for function in model.functions]
    for nodes, opsets in [(model.graph.node, versions), *bodies]:
        for node in iter_nodes(nodes):
            domain = _normalize_domain(node.domain)
            if (node.domain, node.op_type) in local or domain not in _OWN_DOMAINS:
                continue
            version = opsets.get(domain, versions.get(domain, 0))
            if defs.has(node.op_type, domain=domain, max_inclusive_version=version):
                continue
            # Models that ONNX Runtime optimized may have operators of ONNX Runtime in ONNX's domain.
            if version < _list_ort_operators().get(node.op_type, _MAX_VERSION + 1):
                raise ImportFailed(
                    f"{file.name}: unsupported operator {node.op_type!r} of {label_node(node)}: "
                    f"not in {domain or 'ai.onnx'} {version}",
                    hint="put a custom operator in a separate domain, or define it as a function in the model",
                )
            foreign = True
    return foreign


def _read_opsets(file: Path, imports: Any) -> dict[str, int]:
    """Return domain -> version."""
    for item in imports:
        if not 0 <= item.version <= _MAX_VERSION:
            raise ImportFailed(f"invalid opset {item.version} of {item.domain or 'ai.onnx'} in {file.name}")
    return {_normalize_domain(item.domain): item.version for item in imports}


@functools.cache
def _list_ort_operators() -> dict[str, int]:
    """Return ONNX Runtime's operators in ONNX's domain -> first opset with the operator."""
    from onnxruntime.capi import onnxruntime_pybind11_state as ort

    first: dict[str, int] = {}
    for schema in ort.get_all_operator_schema():
        if not schema.domain:
            first[schema.name] = min(schema.since_version, first.get(schema.name, _MAX_VERSION))
    return first


def _normalize_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _check_tensor(file: Path, kind: str, value: Any) -> None:
    what = value.type.WhichOneof("value")
    if what != "tensor_type":
        name = (what or "none").removesuffix("_type").replace("_", " ")
        raise ImportFailed(
            f"{file.name}: {kind} {value.name!r} has unsupported type {name}: expected a tensor",
            hint=_TENSOR_HINTS[kind],
        )
    number = value.type.tensor_type.elem_type
    if number not in _DTYPES:
        from onnx import TensorProto

        name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)
        raise ImportFailed(f"{file.name}: {kind} {value.name!r} has unsupported element type {name}")
    if kind == "input" and not _has_shape(value):
        raise ImportFailed(
            f"{file.name}: input {value.name!r} has no shape: the number of dimensions is unknown",
            hint="export the model with input shapes; symbolic dimensions are allowed",
        )


def make_light_copy(model: Any) -> Any:
    """Return a copy of a model in which large and external tensors are inputs.

    Graph, types and shapes are unchanged.
    """
    import onnx

    light = onnx.ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    graph.name = graph.name or "main_graph"
    declared = {value.name for value in graph.input}
    kept = []
    for tensor in graph.initializer:
        if tensor.data_location != tensor.EXTERNAL and tensor.ByteSize() <= _SMALL_BYTES:
            kept.append(tensor)
        elif tensor.name not in declared:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return light


def _check_structure(file: Path, light: Any) -> None:
    """Run onnx's checker for names, order, attributes and versions. The checker does not check shapes."""
    import onnx

    for value in (*light.graph.input, *light.graph.output):
        value.type.tensor_type.shape.SetInParent()  # the checker requires a shape, the runtimes do not
    if any(tensor.data_location == 1 for tensor in iter_tensors(light)):
        # The model has external data in a subgraph or attribute, for which the checker would search in the wrong
        # directory.
        return
    try:
        onnx.checker.check_model(light)
    # UnicodeDecodeError: the checker's message contains attribute text that is not UTF-8.
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise ImportFailed(f"{file.name} is not a valid ONNX model: {line(str(error), 500)}") from error


def _infer(light: Any) -> Any:
    import onnx

    try:
        with limit_memory(_INFER_BYTES + 4 * light.ByteSize()):
            return onnx.shape_inference.infer_shapes(light, data_prop=True)
    except Exception:  # shapes are optional: values that cannot be inferred stay unknown
        return light


@contextlib.contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Limit further memory allocations of this process to ``size`` bytes.

    The limit is necessary because a number in a model may request a huge number of dimensions. Without /proc, there is
    no limit.
    """
    if not _STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(_STATM.read_text().split()[0]) * resource.getpagesize() + size
    limits = [one for one in (wanted, soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _has_shape(value: Any) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def make_value_spec(value: Any) -> TensorSpec:
    """Return the spec of an ONNX value info."""
    kind = value.type.tensor_type
    shape: list[Dim] = []
    for dim in kind.shape.dim:
        is_size = dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0
        shape.append(dim.dim_value if is_size else _get_symbol(dim) or None)
    return TensorSpec(value.name, _DTYPES[kind.elem_type], tuple(shape))
