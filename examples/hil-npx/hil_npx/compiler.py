"""Compile ONNX models to programs of the chip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.plugins import Artifact, Cache, CompileFailed, CompileOrder, Model, digest_file
from hil_npx import VERSION
from hil_npx.program import FILE, FORMAT, NpxProgram, Step, write_program

if TYPE_CHECKING:
    from typing_extensions import Unpack

LANES = "--npx-lanes="
DEFAULT_LANES = 4
DTYPES = "bool int8 uint8 int32 int64 float32".split()
MIN_OPSET = 13


def compile_model(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a model, or return the cached program. docs/extending.md in hil describes the arguments."""
    if model.format != "onnx":
        raise CompileFailed(f"npx compiles ONNX models, got {model.format}")
    flags, cache = order["flags"], order["cache"]
    lanes = parse_lanes(flags)
    # The key contains everything that determines the program: the model, the settings and the compiler.
    parts = {"version": VERSION, "format": FORMAT, "model": model.digest, "dims": dict(model.dims), "lanes": lanes}
    key = Cache.key("npx", **parts)

    def make(folder: Path) -> None:
        # A separate process: a model that crashes the compiler must not end hil.
        specs = [
            [[one.name, one.dtype, list(one.shape)] for one in side or ()] for side in (model.inputs, model.outputs)
        ]
        arguments = {"model": str(model.path.absolute()), "output": str(folder / FILE), "specs": specs, "lanes": lanes}
        order["isolated"].call(build, arguments, timeout=order["timeout"], log=order["log"])

    folder, cached = cache.get_or_make(key, {"model": model.name}, make, order["recompute"])
    return Artifact(
        runtime=order["runtime"],
        main=FILE,
        files={FILE: folder / FILE},
        digests={FILE: digest_file(folder / FILE)},
        function="",
        compiler=f"npx {VERSION}",
        flags=tuple(flags),
        inputs=model.inputs,
        outputs=model.outputs,
        cached=cached,
    )


def parse_lanes(flags: Any) -> int:
    """Return the value of the last flag ``--npx-lanes=N``. Raises CompileFailed for other flags."""
    lanes = DEFAULT_LANES
    for flag in flags:
        text = flag.removeprefix(LANES)
        if text == flag or not text.isdecimal():
            raise CompileFailed(f"unknown flag {flag!r}", hint=f"expected {LANES}N")
        lanes = int(text)
    return lanes


def build(model: str, output: str, specs: Any, lanes: int) -> None:
    """Write the program of a model. Runs in a separate process."""
    import onnx

    loaded = onnx.load(model)
    graph = loaded.graph
    opset = next((one.version for one in loaded.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset < MIN_OPSET:
        raise CompileFailed(f"npx supports opset {MIN_OPSET} and newer, the model has opset {opset}")
    weights = {one.name: onnx.numpy_helper.to_array(one, str(Path(model).parent)) for one in graph.initializer}
    inputs, outputs = ([spec for spec in side if spec[0] not in weights] for side in specs)
    for name, dtype, shape in (*inputs, *outputs, *((name, one.dtype.name, ()) for name, one in weights.items())):
        if dtype not in DTYPES:
            raise CompileFailed(f"npx does not support the dtype {dtype} of the tensor {name}")
        if not all(isinstance(dim, int) for dim in shape):
            raise CompileFailed(f"tensor {name} has an unknown size", hint="set symbolic sizes with --dim NAME=N")
    steps = []
    for node in graph.node:
        values = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        if node.op_type == "Constant" and "value" in values:
            weights[node.output[0]] = onnx.numpy_helper.to_array(values["value"])
            continue
        name = node.name or node.output[0]
        convert = SUPPORTED.get(node.op_type)
        if convert is None or node.domain not in ("", "ai.onnx") or len(node.output) > 1:
            raise CompileFailed(
                f"npx does not support the operator {node.op_type} of the node {name}",
                hint=f"supported, with one output: {', '.join(sorted(SUPPORTED))}",
            )
        taken, attributes = convert(node, values, weights)
        steps.append(Step(name, node.op_type, taken, list(node.output), attributes))
    used = {name for step in steps for name in step.inputs} | {name for name, *_ in outputs}
    kept = {name: array for name, array in weights.items() if name in used}
    write_program(NpxProgram(inputs, outputs, steps, kept, lanes), Path(output))


Convert = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], tuple[list[str], dict[str, Any]]]


def _convert_plain(
    node: Any, values: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    return list(node.input), {}


def _make_converter(**defaults: Any) -> Convert:
    """Return a function that passes attributes on, with defaults."""

    def convert(node: Any, values: Mapping[str, Any], weights: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        _refuse_others(node, values, defaults)
        return list(node.input), {name: values.get(name, default) for name, default in defaults.items()}

    return convert


def _convert_window(
    node: Any, values: Mapping[str, Any], weights: Mapping[str, Any], *, allowed: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Convert a convolution or a pool with a 2-D kernel."""
    _refuse_others(node, values, {"kernel_shape": None, **allowed})
    attributes = {name: values.get(name, default) for name, default in allowed.items()}
    if node.op_type != "Conv":
        attributes["kernel"] = values["kernel_shape"]
    if len(attributes["strides"]) != 2:
        raise CompileFailed(f"npx does not support the kernel of the node {node.name or node.op_type}: it is not 2-D")
    return list(node.input), attributes


def _convert_reshape(
    node: Any, values: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    shape = weights[node.input[1]].tolist() if node.input[1] in weights else [0]
    if 0 in shape:
        raise CompileFailed(f"npx does not support the node {node.name or node.op_type}: its shape is not constant")
    return list(node.input[:1]), {"shape": shape}


def _refuse_others(node: Any, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise CompileFailed for attributes that the chip does not support."""
    for name, value in values.items():
        if name not in known and not (name == "auto_pad" and value == b"NOTSET") and value not in (0, [], b""):
            raise CompileFailed(f"npx does not support the attribute {name} of the node {node.name or node.op_type}")


_PADS = {"pads": (0, 0, 0, 0), "strides": (1, 1)}
SUPPORTED: dict[str, Convert] = {
    **dict.fromkeys("Add Div Identity MatMul Mul Neg Not Relu Sigmoid Sub Tanh".split(), _convert_plain),
    "AveragePool": functools.partial(_convert_window, allowed={"strides": (1, 1)}),
    "Concat": _make_converter(axis=0),
    "Conv": functools.partial(_convert_window, allowed={**_PADS, "dilations": (1, 1), "group": 1}),
    "Flatten": _make_converter(axis=1),
    "Gemm": _make_converter(alpha=1.0, beta=1.0, transA=0, transB=0),
    "MaxPool": functools.partial(_convert_window, allowed=_PADS),
    "Reshape": _convert_reshape,
    "Softmax": _make_converter(axis=-1),
    "Transpose": _make_converter(perm=None),
}
