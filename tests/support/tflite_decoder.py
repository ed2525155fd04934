"""A decoder of two layers, as a TFLite model with functions for prompts and as an ONNX model. All results are exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.tensors import Array

VOCABULARY, SLOTS, LAYERS = 7, 24, 2
_WIDTH = 4
_DRAWN = np.random.default_rng(3)
# Multiples of powers of two, so that float32 sums are exact.
_TABLE, _HEAD, _MIX = (
    _DRAWN.integers(-3, 4, shape).astype(np.float32) / 8
    for shape in ((VOCABULARY, _WIDTH), (_WIDTH, VOCABULARY), (_WIDTH, _WIDTH))
)
_MIX /= 8
_TURN, _VALUE = np.float32([1, 2, -1, 3]) / 8, np.float32([2, 1, -1, 1])


def save_tflite_decoder(path: Path, prefills: Sequence[int] = (4, 2), *, has_logits: bool = False) -> Path:
    """Write the decoder with functions ``decode`` and ``prefill_N``, in the form of litert-torch.

    Args:
        prefills: numbers of tokens of the functions for prompts.
        has_logits: whether functions for prompts return logits.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    file = schema.ModelT()
    file.version, file.buffers, file.operatorCodes = 3, [schema.BufferT()], []
    functions = [*((f"prefill_{count}", count) for count in prefills), ("decode", 1)]
    made = [_Graph(schema, file).add_decoder(name, count, has_logits or name == "decode") for name, count in functions]
    file.subgraphs, file.signatureDefs = [graph for graph, _ in made], [signature for _, signature in made]
    for number, signature in enumerate(file.signatureDefs):
        signature.subgraphIndex = number
    builder = flatbuffers.Builder(1024)
    builder.Finish(file.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())
    return path


class _Graph:
    """Graph of a TFLite file. Tensors are numbers."""

    def __init__(self, schema: Any, file: Any) -> None:
        self._schema, self._file = schema, file
        self._graph = schema.SubGraphT()
        self._graph.tensors, self._graph.operators = [], []

    def tensor(self, name: str, shape: Sequence[int], dtype: str = "float32", data: bytes | None = None) -> int:
        tensor = self._schema.TensorT()
        kind = {"float32": "FLOAT32", "int32": "INT32", "bool": "BOOL"}[dtype]
        tensor.name, tensor.shape, tensor.type = name.encode(), list(shape), getattr(self._schema.TensorType, kind)
        tensor.buffer = 0
        if data is not None:
            buffer = self._schema.BufferT()
            buffer.data = np.frombuffer(data, np.uint8)
            tensor.buffer = len(self._file.buffers)
            self._file.buffers.append(buffer)
        self._graph.tensors.append(tensor)
        return len(self._graph.tensors) - 1

    def constant(self, array: Array) -> int:
        return self.tensor("constant", array.shape, array.dtype.name, array.tobytes())

    def add(
        self, kind: str, inputs: Sequence[int], shape: Sequence[int], dtype: str = "float32", **options: Any
    ) -> int:
        """Append an operator with one output. Return the output."""
        builtin = getattr(self._schema.BuiltinOperator, kind)
        codes = self._file.operatorCodes
        if builtin not in [code.builtinCode for code in codes]:
            code = self._schema.OperatorCodeT()
            code.builtinCode, code.deprecatedBuiltinCode, code.version = builtin, min(builtin, 127), 1
            codes.append(code)
        operator = self._schema.OperatorT()
        operator.opcodeIndex = [code.builtinCode for code in codes].index(builtin)
        output = self.tensor(kind.lower(), shape, dtype)
        operator.inputs, operator.outputs = list(inputs), [output]
        if name := {"BATCH_MATMUL": "BatchMatMulOptions", "CONCATENATION": "ConcatenationOptions"}.get(kind):
            operator.builtinOptionsType = getattr(self._schema.BuiltinOptions, name)
            operator.builtinOptions = getattr(self._schema, f"{name}T")()
            for option, value in options.items():
                setattr(operator.builtinOptions, option, value)
        self._graph.operators.append(operator)
        return output

    def add_decoder(self, name: str, count: int, has_logits: bool) -> tuple[Any, Any]:
        """Add the decoder for ``count`` tokens. Return the graph and its signature."""
        rows = (1, count, _WIDTH)
        caches = [(f"kv_cache_{part}_{layer}", part) for layer in range(LAYERS) for part in "kv"]
        inputs = {
            "tokens": self.tensor("tokens", (1, count), "int32"),
            "input_pos": self.tensor("input_pos", (count,), "int32"),
            "mask": self.tensor("mask", (1, 1, count, SLOTS), "bool"),
        }
        shapes = {"k": (1, SLOTS, _WIDTH), "v": (1, _WIDTH, SLOTS)}
        inputs |= {own: self.tensor(own, shapes[part]) for own, part in caches}
        outputs: dict[str, int] = {}
        whole, none = (self.constant(np.array(one, np.int32)) for one in ([1, count, 1], [0]))
        turns = self.add("CAST", [inputs["input_pos"]], (count,))
        column = self.add("RESHAPE", [turns, whole], (1, count, 1))
        shift = self.add("MUL", [column, self.constant(_TURN)], rows)
        x = self.add("GATHER", [self.constant(_TABLE), inputs["tokens"]], rows)
        one = self.constant(np.array([1], np.int32))
        first = self.add("SLICE", [inputs["input_pos"], none, one], (1,), "int32")
        numbers = self.add("CAST", [inputs["mask"]], (1, 1, count, SLOTS))
        flat = self.constant(np.array([1, count, SLOTS], np.int32))
        seen = self.add("RESHAPE", [numbers, flat], (1, count, SLOTS))
        for layer in range(LAYERS):
            sums = []
            for part, order in (("k", [none, first, none]), ("v", [none, none, first])):
                own = f"kv_cache_{part}_{layer}"
                place = self.add("CONCATENATION", order, (3,), "int32", axis=0)
                if part == "k":
                    entry = self.add("ADD", [x, shift], rows)
                else:
                    entry = self.add("MUL", [x, self.constant(_VALUE)], rows)
                    turned = self.constant(np.array([0, 2, 1], np.int32))
                    entry = self.add("TRANSPOSE", [entry, turned], (1, _WIDTH, count))
                outputs[own] = self.add("DYNAMIC_UPDATE_SLICE", [inputs[own], entry, place], shapes[part])
                sums.append(self.add("BATCH_MATMUL", [seen, outputs[own]], rows, adjY=part == "v"))
            x = self.add("BATCH_MATMUL", [self.add("ADD", sums, rows), self.constant(_MIX[None])], rows)
        if has_logits:
            shape = (1, count, VOCABULARY)
            outputs["logits"] = self.add("BATCH_MATMUL", [x, self.constant(_HEAD[None])], shape)
        self._graph.inputs, self._graph.outputs = list(inputs.values()), list(outputs.values())
        signature = self._schema.SignatureDefT()
        signature.signatureKey = name.encode()
        signature.inputs, signature.outputs = (
            [self._named(key, place) for key, place in side.items()] for side in (inputs, outputs)
        )
        return self._graph, signature

    def _named(self, name: str, place: int) -> Any:
        entry = self._schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), place
        return entry


def save_onnx_decoder(path: Path) -> Path:
    """Write the decoder with a growing cache as an ONNX model."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, dtype: int, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    caches = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    constants = {"table": _TABLE, "head": _HEAD, "mix": _MIX, "turn": _TURN, "scale": _VALUE}
    constants |= {"axes": np.array([2], np.int64), "zero": np.int64(0), "one": np.int64(1)}
    nodes: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Gather", ["table", "input_ids"], "x0", {}),
        ("Unsqueeze", ["position_ids", "axes"], "own", {}),
        ("Cast", ["own"], "column", {"to": TensorProto.FLOAT}),
        ("Mul", ["column", "turn"], "shift", {}),
        ("Shape", ["past.0.key"], "past", {"start": 1, "end": 2}),
        ("Shape", ["input_ids"], "new", {"start": 1, "end": 2}),
        ("Add", ["past", "new"], "total", {}),
        ("Squeeze", ["total"], "count", {}),
        ("Range", ["zero", "count", "one"], "slots", {}),
        ("LessOrEqual", ["slots", "own"], "visible", {}),
        ("Cast", ["visible"], "seen", {"to": TensorProto.FLOAT}),
    ]
    for n in range(LAYERS):
        nodes += [
            ("Add", [f"x{n}", "shift"], f"key{n}", {}),
            ("Concat", [f"past.{n}.key", f"key{n}"], f"present.{n}.key", {"axis": 1}),
            ("Mul", [f"x{n}", "scale"], f"value{n}", {}),
            ("Concat", [f"past.{n}.value", f"value{n}"], f"present.{n}.value", {"axis": 1}),
            ("Add", [f"present.{n}.key", f"present.{n}.value"], f"both{n}", {}),
            ("MatMul", ["seen", f"both{n}"], f"sums{n}", {}),
            ("MatMul", [f"sums{n}", "mix"], f"x{n + 1}", {}),
        ]
    nodes.append(("MatMul", [f"x{LAYERS}", "head"], "logits", {}))
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **more) for kind, inputs, output, more in nodes],
        "decoder",
        [
            value("input_ids", TensorProto.INT64, [1, "sequence"]),
            value("position_ids", TensorProto.INT64, [1, "sequence"]),
            *(value(f"past.{name}", TensorProto.FLOAT, [1, "past", _WIDTH]) for name in caches),
        ],
        [
            value("logits", TensorProto.FLOAT, [1, "sequence", VOCABULARY]),
            *(value(f"present.{name}", TensorProto.FLOAT, [1, "total", _WIDTH]) for name in caches),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path
