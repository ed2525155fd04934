"""Write the decoder as ONNX: `python examples/decoder/make.py OUT.onnx`.

The graph has the names and the cache layout of an export with Hugging Face Optimum. Needs numpy and onnx.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = Path(__file__).parent / "weights.npz"

HEAD_SIZE = 16
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6
SLOTS = 128  # of the static cache
BLOCK = 32  # int4 weights that share a scale

OPSET, IR_VERSION = 18, 8
INT4_OPSET, INT4_IR_VERSION = 21, 10  # the first with int4 tensors

# Each fault and its effect. A position is a value of position_ids.
FAULTS = {
    "slot": "from position 40, decode steps write the cache entry one slot too early",
    "swap": "from position 40, decode steps write the cache entry before the previous entry",
    "mask_next": "each token attends to the next token of its chunk",
    "mask_newest": "no token except the first attends to itself",
    "rope": "from position 48, the rotation uses the previous position",
    "overflow": "from position 56, the FFN of layer 2 overflows float16",
    "layer": "from position 50, decode steps negate channel 5 of the output of layer 2",
    "column": "the logits of 'e' and 'f' are swapped",
}
DTYPES = ("fp32", "fp16", "int8", "int4")


class Quantized(NamedTuple):
    """Integer weights [in, out] and scales: [out], or [blocks, out] for int4."""

    values: np.ndarray
    scales: np.ndarray


def load_weights() -> dict[str, np.ndarray]:
    """Return the trained weights, float32. A matrix is [in, out]."""
    with np.load(WEIGHTS) as file:
        return {name: file[name].astype(np.float32) for name in file.files}


def quantize_int8(weight: np.ndarray) -> Quantized:
    """Quantize a matrix symmetrically, with a scale per output channel."""
    scales = np.abs(weight).max(0) / np.float32(127)
    return Quantized(np.rint(weight / scales).astype(np.int8), scales)


def quantize_int4(weight: np.ndarray) -> Quantized:
    """Quantize a matrix symmetrically, with a scale per block of 32 inputs of an output channel. Values are -7 to 7."""
    starts = np.arange(0, len(weight), BLOCK)
    scales = np.maximum.reduceat(np.abs(weight), starts) / np.float32(7)
    return Quantized(np.rint(weight / scales.repeat(BLOCK, 0)[: len(weight)]).astype(np.int8), scales)


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Pack pairs of 4-bit values of the last axis into bytes. The low nibble is first."""
    nibbles = values.astype(np.uint8) & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


class Graph:
    """ONNX nodes and constants under construction. An output has the name of its node."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def add(self, op: str, inputs: list[str], name: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output. Return the output's name."""
        self.nodes.append(helper.make_node(op, inputs, [name], name, domain=domain, **attributes))
        return name

    def constant(self, name: str, value: np.ndarray | onnx.TensorProto) -> str:
        """Add a constant. Return the name."""
        tensor = numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
        self.constants[name] = tensor
        return name

    def integers(self, *values: int) -> str:
        """Return the name of an int64 vector."""
        return self.constant(f"int64[{','.join(map(str, values))}]", np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """Return the name of an int64 scalar."""
        return self.constant(f"int64 {value}", np.array(value, np.int64))


class Decoder:
    """Build the decoder's graph from weights."""

    def __init__(
        self,
        weights: dict[str, np.ndarray],
        dtype: str = "fp32",
        is_static: bool = False,
        fault: str | None = None,
        is_qdq: bool = False,
    ) -> None:
        self.weights, self.dtype, self.is_static, self.fault = dict(weights), dtype, is_static, fault
        self.is_int4_qdq = dtype == "int4" and is_qdq
        self.float_type = TensorProto.FLOAT16 if dtype == "fp16" else TensorProto.FLOAT
        self.float = helper.tensor_dtype_to_np_dtype(self.float_type)
        self.vocabulary, self.hidden = weights["embedding"].shape
        self.heads = weights["layers.0.query"].shape[1] // HEAD_SIZE
        self.kv_heads = weights["layers.0.key"].shape[1] // HEAD_SIZE
        self.layers = sum(name.endswith(".query") for name in weights)
        self.graph = Graph()
        self.add, self.constant = self.graph.add, self.graph.constant
        self.integer, self.integers = self.graph.integer, self.graph.integers

    def build(self) -> onnx.ModelProto:
        """Return the model. Raises onnx.checker.ValidationError if it is invalid."""
        if self.fault == "column":
            order = np.arange(self.vocabulary)
            order[[ord("e"), ord("f")]] = order[[ord("f"), ord("e")]]
            self.weights["head"] = self.weights["head"][:, order]
        self.allowed = "attention_mask" if self.is_static else self.add_mask()
        self.cos, self.sin = self.add_rotation()
        self.move_entries = self.add_cache_fault()
        x = self.add("Gather", [self.weight("embedding"), "input_ids"], "embed")
        for n in range(self.layers):
            x = self.add_layer(n, x)
        self.linear(self.norm(x, "norm"), "head", "logits")
        opset, ir_version = (INT4_OPSET, INT4_IR_VERSION) if self.is_int4_qdq else (OPSET, IR_VERSION)
        opsets = [helper.make_opsetid("", opset)]
        if self.dtype == "int4" and not self.is_int4_qdq:
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        graph = helper.make_graph(
            self.graph.nodes, "decoder", self.inputs(), self.outputs(), list(self.graph.constants.values())
        )
        model = helper.make_model(
            graph, producer_name="hil examples/decoder", opset_imports=opsets, ir_version=ir_version
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def inputs(self) -> list[onnx.ValueInfoProto]:
        mask = (TensorProto.BOOL, [1, 1, "sequence", SLOTS]) if self.is_static else (TensorProto.INT64, [1, "total"])
        return [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "sequence"]),
            helper.make_tensor_value_info("attention_mask", *mask),
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, [1, "sequence"]),
            *self.cache("past_key_values", "past"),
        ]

    def outputs(self) -> list[onnx.ValueInfoProto]:
        shape = [1, "sequence", self.vocabulary]
        logits = helper.make_tensor_value_info("logits", self.float_type, shape)
        return [logits, *self.cache("present", "total")]

    def cache(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        shape = [1, self.kv_heads, SLOTS if self.is_static else length, HEAD_SIZE]
        names = [f"{prefix}.{n}.{part}" for n in range(self.layers) for part in ("key", "value")]
        return [helper.make_tensor_value_info(name, self.float_type, shape) for name in names]

    def add_mask(self) -> str:
        """Return the name of a mask: True where a token of the chunk may attend to an entry, [sequence, total]."""
        for name, source in (("sequence", "input_ids"), ("total", "attention_mask")):
            self.add("Gather", [self.add("Shape", [source], f"{name}.shape"), self.integer(1)], name)
        self.add("Range", [self.integer(0), "total", self.integer(1)], "columns")
        first = self.add("Sub", ["total", "sequence"], "mask.first")
        rows = self.add("Range", [first, "total", self.integer(1)], "mask.rows")
        if self.fault == "mask_next":
            rows = self.add("Add", [rows, self.integer(1)], "mask.rows.next")
        elif self.fault == "mask_newest":
            previous = self.add("Sub", [rows, self.integer(1)], "mask.rows.previous")
            rows = self.add("Max", [previous, self.integer(0)], "mask.rows.bounded")
        rows = self.add("Unsqueeze", [rows, self.integers(1)], "mask.rows.column")
        causal = self.add("LessOrEqual", ["columns", rows], "mask.causal")
        present = self.add("Cast", ["attention_mask"], "mask.present", to=TensorProto.BOOL)
        return self.add("And", [causal, present], "allowed")

    def add_rotation(self) -> tuple[str, str]:
        """Return the names of cosine and sine for RoPE (Su et al. 2021), [1, 1, sequence, half a head]."""
        positions = "position_ids"
        if self.fault == "rope":
            previous = self.add("Sub", [positions, self.integer(1)], "rope.previous")
            positions = self.add("Where", [self.from_position(48), previous, positions], "rope.positions")
        positions = self.add("Cast", [positions], "rope.cast", to=TensorProto.FLOAT)
        positions = self.add("Unsqueeze", [positions, self.integers(1, 3)], "rope.column")
        half = HEAD_SIZE // 2
        frequencies = self.constant("rope.frequencies", (ROPE_THETA ** (-np.arange(half) / half)).astype(np.float32))
        angles = self.add("Mul", [positions, frequencies], "rope.angles")
        cos, sin = self.add("Cos", [angles], "rope.cos"), self.add("Sin", [angles], "rope.sin")
        return self.to_float(cos), self.to_float(sin)

    def add_cache_fault(self) -> Callable[[str, str], str] | None:
        """Return a function that adds the moved entries of a key or value: of an input, to an output."""
        if self.fault not in ("slot", "swap"):
            return None
        is_active = self.from_position(40, decode_only=True)
        last = self.add("Sub", ["total", self.integer(1)], "slot.last")
        previous = self.add("Sub", ["total", self.integer(2)], "slot.previous")
        is_last = self.add("And", [self.add("Equal", ["columns", last], "slot.is_last"), is_active], "slot.moves_last")
        is_previous = self.add("Equal", ["columns", previous], "slot.is_previous")
        is_previous = self.add("And", [is_previous, is_active], "slot.moves_previous")
        order = self.add("Where", [is_previous, last, "columns"], "slot.order")
        if self.fault == "swap":
            order = self.add("Where", [is_last, previous, order], "slot.swapped")
            return lambda entries, output: self.add("Gather", [entries, order], output, axis=2)
        is_lost = self.add("Unsqueeze", [is_last, self.integers(1)], "slot.lost")

        def move(entries: str, output: str) -> str:
            moved = self.add("Gather", [entries, order], f"{entries}.moved", axis=2)
            return self.add("Where", [is_lost, self.number(0.0), moved], output)

        return move

    def add_layer(self, n: int, x: str) -> str:
        """Add a layer. Return the output's name."""
        name = f"layers.{n}"
        h = self.norm(x, f"{name}.attention_norm")
        query = self.rotate(self.split_heads(self.linear(h, f"{name}.query"), self.heads))
        key = self.rotate(self.split_heads(self.linear(h, f"{name}.key"), self.kv_heads))
        value = self.split_heads(self.linear(h, f"{name}.value"), self.kv_heads)
        entries = []
        for part, new in (("key", key), ("value", value)):
            present = self.extend_cache(n, part, new)
            owners = self.integers(*np.arange(self.kv_heads).repeat(self.heads // self.kv_heads).tolist())
            entries.append(self.add("Gather", [present, owners], f"{name}.{part}.heads", axis=1))
        mixed = self.attend(name, query, *entries)
        x = self.add("Add", [x, self.linear(mixed, f"{name}.output")], f"{name}.attention")
        h = self.norm(x, f"{name}.ffn_norm")
        gate, up = self.linear(h, f"{name}.gate"), self.linear(h, f"{name}.up")
        silu = self.add("Mul", [gate, self.add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
        product = self.add("Mul", [silu, up], f"{name}.product")
        if self.fault == "overflow" and n == 2:
            product = self.overflow(product)
        x = self.add("Add", [x, self.linear(product, f"{name}.down")], f"{name}.ffn")
        if self.fault == "layer" and n == 2:
            signs = np.ones(self.hidden, self.float)
            kept = self.constant("fault.kept", signs.copy())
            signs[5] = -1
            negated = self.constant("fault.negated", signs)
            factor = self.add("Where", [self.from_position(50, decode_only=True), negated, kept], "fault.factor")
            x = self.add("Mul", [x, factor], f"{name}.fault")
        return x

    def extend_cache(self, n: int, part: str, new: str) -> str:
        """Add the chunk's entries to the cache. Return the name of the result."""
        past, present, name = f"past_key_values.{n}.{part}", f"present.{n}.{part}", f"layers.{n}.{part}.cache"
        if self.is_static:
            slots = self.add("Unsqueeze", ["position_ids", self.integers(1, 3)], f"{name}.slots")
            slots = self.add("Expand", [slots, self.add("Shape", [new], f"{name}.shape")], f"{name}.indices")
            return self.add("ScatterElements", [past, slots, new], present, axis=2)
        if self.move_entries is None:
            return self.add("Concat", [past, new], present, axis=2)
        return self.move_entries(self.add("Concat", [past, new], name, axis=2), present)

    def attend(self, name: str, query: str, key: str, value: str) -> str:
        """Add the attention of all heads. Return the name of the result, [1, sequence, hidden]."""
        key = self.add("Transpose", [key], f"{name}.key.transposed", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [query, key], f"{name}.scores")
        scores = self.add("Mul", [scores, self.number(HEAD_SIZE**-0.5)], f"{name}.scaled")
        lowest = self.number(float(np.finfo(self.float).min))
        scores = self.add("Where", [self.allowed, scores, lowest], f"{name}.masked")
        shares = self.add("Softmax", [scores], f"{name}.softmax", axis=-1)
        mixed = self.add("MatMul", [shares, value], f"{name}.mixed")
        mixed = self.add("Transpose", [mixed], f"{name}.mixed.transposed", perm=[0, 2, 1, 3])
        return self.add("Reshape", [mixed, self.integers(1, -1, self.heads * HEAD_SIZE)], f"{name}.joined")

    def overflow(self, x: str) -> str:
        """Add a detour through float16 in which values above 1/16 become infinite."""
        large = self.constant("fault.large", np.array(2.0**20, np.float32))
        scaled = self.add("Mul", [self.add("Cast", [x], "fault.cast", to=TensorProto.FLOAT), large], "fault.scaled")
        half = self.add("Cast", [scaled], "fault.half", to=TensorProto.FLOAT16)
        single = self.add("Cast", [half], "fault.single", to=TensorProto.FLOAT)
        broken = self.to_float(self.add("Div", [single, large], "fault.unscaled"))
        is_active = self.add("Unsqueeze", [self.from_position(56), self.integers(2)], "fault.is_active")
        return self.add("Where", [is_active, broken, x], "fault.product")

    def from_position(self, first: int, decode_only: bool = False) -> str:
        """Return a condition on the position: bool [1, sequence], or [1] for decode steps only."""
        name = f"from_{first}"
        if not decode_only:
            return self.add("GreaterOrEqual", ["position_ids", self.integer(first)], name)
        positions = self.add("Gather", ["position_ids", self.integers(0)], f"{name}.first", axis=1)
        position = self.add("Reshape", [positions, self.integers(1)], f"{name}.scalar")
        is_late = self.add("GreaterOrEqual", [position, self.integer(first)], f"{name}.is_late")
        is_decode = self.add("Equal", ["sequence", self.integer(1)], f"{name}.is_decode")
        return self.add("And", [is_late, is_decode], name)

    def rotate(self, x: str) -> str:
        """Add RoPE to heads [1, heads, sequence, head size]. Pairs are half a head apart, as in Llama."""
        half = HEAD_SIZE // 2
        low = self.add("Slice", [x, *map(self.integers, (0, half, 3))], f"{x}.low")
        high = self.add("Slice", [x, *map(self.integers, (half, HEAD_SIZE, 3))], f"{x}.high")
        products = {
            f"{part}.{turn}": self.add("Mul", [value, factor], f"{x}.{part}.{turn}")
            for part, value in (("low", low), ("high", high))
            for turn, factor in (("cos", self.cos), ("sin", self.sin))
        }
        first = self.add("Sub", [products["low.cos"], products["high.sin"]], f"{x}.first")
        second = self.add("Add", [products["high.cos"], products["low.sin"]], f"{x}.second")
        return self.add("Concat", [first, second], f"{x}.rotated", axis=3)

    def split_heads(self, x: str, heads: int) -> str:
        """Reshape [1, sequence, heads * head size] to [1, heads, sequence, head size]."""
        x = self.add("Reshape", [x, self.integers(1, -1, heads, HEAD_SIZE)], f"{x}.split")
        return self.add("Transpose", [x], f"{x}.heads", perm=[0, 2, 1, 3])

    def norm(self, x: str, name: str) -> str:
        """Add RMSNorm (Zhang and Sennrich 2019), in float32."""
        if self.float_type != TensorProto.FLOAT:
            x = self.add("Cast", [x], f"{name}.cast", to=TensorProto.FLOAT)
        square = self.add("Mul", [x, x], f"{name}.square")
        mean = self.add("ReduceMean", [square, self.integers(-1)], f"{name}.mean", keepdims=1)
        epsilon = self.constant("epsilon", np.array(NORM_EPSILON, np.float32))
        root = self.add("Sqrt", [self.add("Add", [mean, epsilon], f"{name}.shifted")], f"{name}.root")
        x = self.to_float(self.add("Div", [x, root], f"{name}.normalized"))
        return self.add("Mul", [x, self.weight(name)], f"{name}.out")

    def linear(self, x: str, name: str, output: str = "") -> str:
        """Add the product with a matrix, in the model's dtype."""
        output, weight = output or f"{name}.out", self.weights[name]
        if self.dtype == "int4" and not self.is_int4_qdq:
            packed, scales = self.pack_int4(quantize_int4(weight), name)
            rows, columns = weight.shape
            sizes = {"K": rows, "N": columns, "bits": 4, "block_size": BLOCK, "accuracy_level": 0}
            return self.add("MatMulNBits", [x, packed, scales], output, "com.microsoft", **sizes)
        return self.add("MatMul", [x, self.matrix(name)], output)

    def matrix(self, name: str) -> str:
        """Add a matrix. Return the name of its float values."""
        weight = self.weights[name]
        if self.dtype == "int8":
            values, scales = quantize_int8(weight)
            zeros = self.constant(f"{name}.zeros", np.zeros(len(scales), np.int8))
            inputs = [self.constant(f"{name}.int8", values), self.constant(f"{name}.scales", scales), zeros]
            return self.add("DequantizeLinear", inputs, name, axis=1)
        if self.dtype == "int4":
            values, scales = quantize_int4(weight)
            raw = pack_nibbles(values).tobytes()
            tensor = helper.make_tensor(f"{name}.int4", TensorProto.INT4, weight.shape, raw, raw=True)
            inputs = [self.constant(tensor.name, tensor), self.constant(f"{name}.scales", scales)]
            return self.add("DequantizeLinear", inputs, name, axis=0, block_size=BLOCK)
        return self.weight(name)

    def pack_int4(self, weight: Quantized, name: str) -> tuple[str, str]:
        """Add the packed values [out, blocks, 16] and scales [out, blocks] of MatMulNBits. Return their names."""
        rows, columns = weight.values.shape
        blocks = len(weight.scales)
        values = np.zeros((columns, blocks * BLOCK), np.int8)
        values[:, :rows] = weight.values.T
        packed = pack_nibbles(values + 8).reshape(columns, blocks, BLOCK // 2)
        scales = np.ascontiguousarray(weight.scales.T)
        return self.constant(f"{name}.int4", packed), self.constant(f"{name}.scales", scales)

    def weight(self, name: str) -> str:
        """Add a weight in the dtype of activations. Return the name."""
        return self.constant(name, self.weights[name].astype(self.float))

    def number(self, value: float) -> str:
        """Add a scalar in the dtype of activations. Return the name."""
        return self.constant(f"float {value}", np.array(value, self.float))

    def to_float(self, x: str) -> str:
        """Cast float32 to the dtype of activations, if it differs."""
        if self.float_type == TensorProto.FLOAT:
            return x
        return self.add("Cast", [x], f"{x}.half", to=self.float_type)


def parse_arguments() -> argparse.Namespace:
    faults = "\n".join(f"  {name:<12}{text}" for name, text in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"faults:\n{faults}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.onnx")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="int8 and int4: weights only")
    parser.add_argument("--qdq", action="store_true", help="int4 as DequantizeLinear, not MatMulNBits")
    parser.add_argument("--static", action="store_true", help=f"a cache of {SLOTS} slots")
    parser.add_argument("--fault", choices=FAULTS, metavar="NAME", help="plant a fault")
    arguments = parser.parse_args()
    if arguments.qdq and arguments.dtype != "int4":
        parser.error("--qdq needs --dtype int4")
    if arguments.static and arguments.fault:
        parser.error("--fault and --static exclude each other")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    decoder = Decoder(load_weights(), arguments.dtype, arguments.static, arguments.fault, arguments.qdq)
    onnx.save(decoder.build(), arguments.out)


if __name__ == "__main__":
    main()
