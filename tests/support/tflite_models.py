"""TFLite models that are written without a converter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save_dynamic_update(path: Path, shape: Sequence[int], part: Sequence[int]) -> Path:
    """Save a model that writes its second input to its first input, at the position in its third input."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def tensor(name: str, dims: Sequence[int], kind: int) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.type, made.buffer = name.encode(), list(dims), kind, 0
        return made

    graph, model, code, operator = schema.SubGraphT(), schema.ModelT(), schema.OperatorCodeT(), schema.OperatorT()
    real, whole = schema.TensorType.FLOAT32, schema.TensorType.INT32
    graph.tensors = [
        tensor("cache", shape, real),
        tensor("x", part, real),
        tensor("at", [len(shape)], whole),
        tensor("y", shape, real),
    ]
    graph.inputs, graph.outputs = [0, 1, 2], [3]
    code.builtinCode = schema.BuiltinOperator.DYNAMIC_UPDATE_SLICE
    code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
    operator.opcodeIndex, operator.inputs, operator.outputs = 0, [0, 1, 2], [3]
    graph.operators = [operator]
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())
    return path


def save_layers(path: Path) -> Path:
    """Save a float32 model with a convolution, a depthwise convolution, a reshape and a dense layer.

    The image has 8 x 8 pixels and 3 channels, the model returns 10 values. The weights are 0.
    """
    import flatbuffers
    import numpy as np
    from ai_edge_litert import schema_py_generated as schema

    graph, model = schema.SubGraphT(), schema.ModelT()
    model.buffers, model.operatorCodes = [schema.BufferT()], []
    graph.tensors, graph.operators = [], []

    def tensor(name: str, dims: Sequence[int], values: Any = None) -> int:
        made = schema.TensorT()
        made.name, made.shape, made.buffer = name.encode(), list(dims), 0
        made.type = schema.TensorType.FLOAT32
        if values is not None:
            made.type = schema.TensorType.INT32 if values.dtype == np.int32 else schema.TensorType.FLOAT32
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(values.tobytes(), np.uint8)
            model.buffers.append(buffer)
            made.buffer = len(model.buffers) - 1
        graph.tensors.append(made)
        return len(graph.tensors) - 1

    def weights(name: str, *dims: int) -> int:
        return tensor(name, dims, np.zeros(dims, np.float32))

    def operator(kind: str, kind_of_options: str, options: Any, inputs: Sequence[int], output: int) -> None:
        code, made = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = getattr(schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode, code.version = code.builtinCode, 1
        model.operatorCodes.append(code)
        made.opcodeIndex, made.inputs, made.outputs = len(model.operatorCodes) - 1, list(inputs), [output]
        made.builtinOptionsType = getattr(schema.BuiltinOptions, kind_of_options)
        made.builtinOptions = options
        graph.operators.append(made)

    convolution, depthwise = schema.Conv2DOptionsT(), schema.DepthwiseConv2DOptionsT()
    for options in (convolution, depthwise):
        options.strideH = options.strideW = 1
        options.dilationHFactor = options.dilationWFactor = 1
    depthwise.depthMultiplier = 1
    x, a, b = tensor("x", (1, 8, 8, 3)), tensor("a", (1, 8, 8, 8)), tensor("b", (1, 8, 8, 8))
    flat, y = tensor("flat", (1, 512)), tensor("y", (1, 10))
    operator("CONV_2D", "Conv2DOptions", convolution, [x, weights("w0", 8, 3, 3, 3), weights("c0", 8)], a)
    operator(
        "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", depthwise, [a, weights("w1", 1, 3, 3, 8), weights("c1", 8)], b
    )
    shape = tensor("shape", (2,), np.array([1, 512], np.int32))
    operator("RESHAPE", "ReshapeOptions", schema.ReshapeOptionsT(), [b, shape], flat)
    dense = schema.FullyConnectedOptionsT()
    operator("FULLY_CONNECTED", "FullyConnectedOptions", dense, [flat, weights("w2", 10, 512), weights("c2", 10)], y)
    graph.inputs, graph.outputs = [x], [y]
    model.version, model.subgraphs = 3, [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())
    return path
