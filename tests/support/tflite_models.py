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
