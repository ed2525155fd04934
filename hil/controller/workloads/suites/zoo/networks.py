"""Networks of the suite ``models``, and the builder of their graphs."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import dtype_name, dtype_of
from hil.formats.ort_values import ONNX_TYPES

# Use RandomState, whose numbers are the same in all numpy releases. The numbers of default_rng may change.
_Random = np.random.RandomState


class GraphBuilder:
    """Graph under construction. Strings name tensors. Random weights depend only on the model's name.

    Args:
        outer: the enclosing graph, if this is a body. A body may use tensors of the enclosing graph, and names are
            unique across both graphs.
    """

    def __init__(self, name: str, outer: GraphBuilder | None = None) -> None:
        self.name = name
        self.opset = 17
        self.dtype: str = outer.dtype if outer else "float32"  # default for weights and inputs
        self._random: np.random.RandomState = outer._random if outer else _Random(zlib.crc32(name.encode()))
        self._count: Counter[str] = outer._count if outer else Counter()
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, *shape: int | str, dtype: str = "") -> str:
        """Declare an input. A string is a symbolic dimension."""
        self._inputs.append(self._make_value_info(name, dtype, shape))
        return name

    def output(self, name: str, *shape: int | str, dtype: str = "") -> None:
        """Declare a tensor as an output."""
        self._outputs.append(self._make_value_info(name, dtype, shape))

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Add uniform random weights. The default scale preserves the variance of the layer's input."""
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
        limit = (3.0 / max(fan_in, 1)) ** 0.5 if scale is None else scale
        return self.const(self._random.uniform(-limit, limit, shape).astype(dtype_of(self.dtype)), "w")

    def const(self, value: Any, name: str = "c") -> str:
        """Add a constant: an array, or a number or list, which gets the graph's dtype (int64 for ints)."""
        from onnx import helper

        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else dtype_of(self.dtype))
        name = self._make_name(name)
        raw = np.ascontiguousarray(array).tobytes()
        self._weights.append(helper.make_tensor(name, ONNX_TYPES[dtype_name(array.dtype)], array.shape, raw, raw=True))
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node with an output and return the name: ``out``, or a generated name."""
        return self.ops(kind, *inputs, out=(out,), **attributes)[0]

    def ops(self, kind: str, *inputs: str, out: Sequence[str], **attributes: Any) -> tuple[str, ...]:
        """Add a node with multiple outputs and return their names. "" gets a generated name."""
        from onnx import helper

        node = self._make_name(kind)
        outputs = tuple(name or f"{node}:{number}" for number, name in enumerate(out))
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=node, **attributes))
        return outputs

    def body(self, name: str) -> GraphBuilder:
        """Create a graph for an attribute of a control-flow node. :meth:`proto` returns the attribute's value."""
        return GraphBuilder(name, outer=self)

    def proto(self) -> Any:
        """Return the GraphProto."""
        from onnx import helper

        return helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)

    def model(self) -> Any:
        """Return the ModelProto, checked, with shapes inferred."""
        import onnx
        from onnx import helper

        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(self.proto(), opset_imports=opsets, ir_version=10, producer_name="hil")
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _make_name(self, base: str) -> str:
        self._count[base] += 1
        return f"{base}_{self._count[base]}"

    def _make_value_info(self, name: str, dtype: str, shape: Sequence[int | str]) -> Any:
        from onnx import helper

        return helper.make_tensor_value_info(name, ONNX_TYPES[dtype or self.dtype], list(shape))


def _add_conv(
    g: GraphBuilder, x: str, ins: int, outs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> str:
    """Return a convolution with bias that preserves the size (divided by the stride)."""
    return g.op(
        "Conv",
        x,
        g.weight(outs, ins // groups, kernel, kernel),
        g.weight(outs, scale=0.1),
        pads=[kernel // 2] * 4,
        strides=[stride, stride],
        group=groups,
    )


def _add_norm(g: GraphBuilder, x: str, channels: int) -> str:
    """Return batch normalization in inference mode."""
    scale = g.const(np.linspace(0.8, 1.2, channels, dtype=np.float32))
    variance = g.const(np.linspace(0.5, 1.5, channels, dtype=np.float32))
    bias, mean = g.weight(channels, scale=0.1), g.weight(channels, scale=0.1)
    return g.op("BatchNormalization", x, scale, bias, mean, variance)


def _add_classifier(g: GraphBuilder, x: str, channels: int, classes: int) -> None:
    """Add global average pooling and a dense layer that returns logits."""
    flat = g.op("Flatten", g.op("GlobalAveragePool", x))
    g.op("Gemm", flat, g.weight(classes, channels), g.weight(classes, scale=0.1), transB=1, out="logits")
    g.output("logits", 1, classes)


def resnet(g: GraphBuilder) -> None:
    """Build three residual blocks, including one with a projection."""
    x = g.op("Relu", _add_norm(g, _add_conv(g, g.input("image", 1, 3, 16, 16), 3, 8), 8))
    for ins, outs, stride in ((8, 8, 1), (8, 16, 2), (16, 16, 1)):
        y = g.op("Relu", _add_norm(g, _add_conv(g, x, ins, outs, stride=stride), outs))
        y = _add_norm(g, _add_conv(g, y, outs, outs), outs)
        if ins != outs:
            x = _add_norm(g, _add_conv(g, x, ins, outs, kernel=1, stride=stride), outs)
        x = g.op("Relu", g.op("Add", y, x))
    _add_classifier(g, x, 16, 10)


def mobilenet(g: GraphBuilder) -> None:
    """Build inverted residuals: expansion, depthwise convolution, projection, with ReLU6."""

    def relu6(x: str) -> str:
        return g.op("Clip", x, g.const(0.0), g.const(6.0))

    x = relu6(_add_conv(g, g.input("image", 1, 3, 16, 16), 3, 8, stride=2))
    for ins, outs, stride in ((8, 12, 2), (12, 12, 1)):
        wide = ins * 3
        y = relu6(_add_conv(g, x, ins, wide, kernel=1))
        y = relu6(_add_conv(g, y, wide, wide, stride=stride, groups=wide))
        y = _add_conv(g, y, wide, outs, kernel=1)
        x = g.op("Add", x, y) if ins == outs else y
    _add_classifier(g, x, 12, 10)


def squeeze_excite(g: GraphBuilder) -> None:
    """Build squeeze-and-excite blocks with hard swish, as in MobileNetV3."""
    x = g.op("HardSwish", _add_conv(g, g.input("image", 1, 3, 12, 12), 3, 16))
    for _ in range(2):
        y = g.op("HardSwish", _add_conv(g, x, 16, 16, kernel=5, groups=16))
        gate = g.op("Relu", _add_conv(g, g.op("GlobalAveragePool", y), 16, 4, kernel=1))
        gate = g.op("HardSigmoid", _add_conv(g, gate, 4, 16, kernel=1), alpha=1 / 6, beta=0.5)
        x = g.op("Add", x, _add_conv(g, g.op("Mul", y, gate), 16, 16, kernel=1))
    _add_classifier(g, x, 16, 5)


def unet(g: GraphBuilder) -> None:
    """Build a U-Net with two levels.

    It upsamples by a transposed convolution and by resizing, with skip connections.
    """
    top = g.op("Relu", _add_conv(g, g.input("image", 1, 1, 16, 16), 1, 4))
    middle = g.op("Relu", _add_conv(g, g.op("MaxPool", top, kernel_shape=[2, 2], strides=[2, 2]), 4, 8))
    x = g.op("Relu", _add_conv(g, g.op("MaxPool", middle, kernel_shape=[2, 2], strides=[2, 2]), 8, 16))
    x = g.op("ConvTranspose", x, g.weight(16, 8, 2, 2), g.weight(8, scale=0.1), strides=[2, 2])
    x = g.op("Relu", _add_conv(g, g.op("Concat", x, middle, axis=1), 16, 8))
    scales = g.const(np.array([1, 1, 2, 2], np.float32))
    x = g.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    x = g.op("Relu", _add_conv(g, g.op("Concat", x, top, axis=1), 12, 4))
    g.output(g.op("Sigmoid", _add_conv(g, x, 4, 1, kernel=1), out="mask"), 1, 1, 16, 16)


def pooling_mix(g: GraphBuilder) -> None:
    """Build grouped convolutions with batch normalization and the common kinds of pooling and padding."""
    x = g.op("LeakyRelu", _add_norm(g, _add_conv(g, g.input("image", 2, 4, 15, 15), 4, 8, groups=4), 8), alpha=0.1)
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = g.op("PRelu", _add_norm(g, _add_conv(g, x, 8, 8, groups=2), 8), g.const(np.full((8, 1, 1), 0.2, np.float32)))
    x = g.op("AveragePool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=0)
    pads = g.const(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    x = g.op("Elu", _add_conv(g, g.op("Pad", x, pads, g.const(0.5)), 8, 8, stride=2))
    most, mean = g.op("GlobalMaxPool", x), g.op("GlobalAveragePool", x)
    g.output(g.op("Flatten", g.op("Concat", most, mean, axis=1), out="features"), 2, 16)


def siamese(g: GraphBuilder) -> None:
    """Build a siamese network with two inputs and three outputs. Two images use the same weights."""
    weights = [(g.weight(8, 1, 3, 3), g.weight(8, scale=0.1)), (g.weight(8, 8, 3, 3), g.weight(8, scale=0.1))]
    dense, bias = g.weight(128, 16), g.weight(16, scale=0.1)
    ends = []
    for side in ("left", "right"):
        x = g.input(side, 1, 1, 16, 16)
        for weight, offset in weights:
            x = g.op("Relu", g.op("Conv", x, weight, offset, pads=[1, 1, 1, 1], strides=[2, 2]))
        x = g.op("Gemm", g.op("Flatten", x), dense, bias)
        x = g.op("LpNormalization", x, axis=1, p=2, out=f"{side}_embedding")
        g.output(x, 1, 16)
        ends.append(x)
    g.output(g.op("ReduceL2", g.op("Sub", *ends), axes=[1], keepdims=0, out="distance"), 1)


def quantised_cnn(g: GraphBuilder) -> None:
    """Build a quantized network in the form of exporters.

    The network has int8 weights per channel, QuantizeLinear and DequantizeLinear.
    """
    rng = np.random.RandomState(7)

    def quantised(x: str, scale: float, zero: int) -> str:
        ends = (g.const(np.float32(scale), "scale"), g.const(np.uint8(zero), "zero"))
        return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *ends), *ends)

    def weights(*shape: int) -> tuple[str, str]:
        """Return weights, and a bias with the scale of weights times inputs."""
        scale = rng.uniform(0.002, 0.006, shape[0]).astype(np.float32)
        values = rng.randint(-127, 128, shape).astype(np.int8)
        named = g.const(scale, "scale")
        weight = g.op("DequantizeLinear", g.const(values, "w"), named, g.const(np.zeros(shape[0], np.int8)), axis=0)
        offset = rng.randint(-200, 200, shape[0]).astype(np.int32)
        bias_scale = g.const(scale * np.float32(1 / 32), "scale")
        bias = g.op("DequantizeLinear", g.const(offset, "b"), bias_scale, g.const(np.zeros(shape[0], np.int32)), axis=0)
        return weight, bias

    x = quantised(g.input("image", 1, 1, 12, 12), 1 / 32, 128)
    for ins, outs in ((1, 8), (8, 16)):
        x = g.op("Relu", g.op("Conv", x, *weights(outs, ins, 3, 3), pads=[1, 1, 1, 1]))
        x = g.op("MaxPool", quantised(x, 1 / 32, 0), kernel_shape=[2, 2], strides=[2, 2])
        x = quantised(x, 1 / 32, 0)
    x = g.op("Gemm", g.op("Flatten", x), *weights(10, 144), transB=1)
    ends = (g.const(np.float32(0.25), "scale"), g.const(np.uint8(128), "zero"))
    g.output(g.op("DequantizeLinear", g.op("QuantizeLinear", x, *ends), *ends, out="logits"), 1, 10)


def _add_dense(g: GraphBuilder, x: str, ins: int, outs: int, out: str = "") -> str:
    return g.op(
        "Add", g.op("MatMul", x, g.weight(ins, outs, scale=(3 / ins) ** 0.5)), g.weight(outs, scale=0.1), out=out
    )


def _add_layer_norm(g: GraphBuilder, x: str, width: int, out: str = "") -> str:
    ones = g.const(np.linspace(0.9, 1.1, width, dtype=np.float32))
    return g.op("LayerNormalization", x, ones, g.weight(width, scale=0.1), axis=-1, epsilon=1e-5, out=out)


def _split_heads(g: GraphBuilder, x: str, heads: int, size: int, perm: list[int]) -> str:
    """Reshape [batch, time, heads * size] to [batch, heads, ...], for any batch and time."""
    return g.op("Transpose", g.op("Reshape", x, g.const([0, 0, heads, size])), perm=perm)


def _add_attention(g: GraphBuilder, x: str, width: int, heads: int, mask: str = "") -> str:
    size = width // heads
    query = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    key = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 3, 1])
    value = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    scores = g.op("Div", g.op("MatMul", query, key), g.const(math.sqrt(size)))
    if mask:
        scores = g.op("Where", mask, scores, g.const(-1e9))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    joined = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([0, 0, width]))
    return _add_dense(g, joined, width, width)


def _add_gelu(g: GraphBuilder, x: str) -> str:
    """Return GELU as separate operators, as exporters for older opsets write it."""
    error = g.op("Erf", g.op("Div", x, g.const(math.sqrt(2))))
    return g.op("Mul", g.op("Mul", x, g.op("Add", error, g.const(1.0))), g.const(0.5))


def _add_block(g: GraphBuilder, x: str, width: int, heads: int, mask: str = "") -> str:
    """Return a transformer block with layer normalization before both halves."""
    x = g.op("Add", x, _add_attention(g, _add_layer_norm(g, x, width), width, heads, mask))
    wide = _add_gelu(g, _add_dense(g, _add_layer_norm(g, x, width), width, width * 4))
    return g.op("Add", x, _add_dense(g, wide, width * 4, width))


def transformer(g: GraphBuilder) -> None:
    """Build two encoder blocks over image patches, as in a vision transformer."""
    patches = g.op(
        "Conv", g.input("image", 1, 3, 16, 16), g.weight(32, 3, 4, 4), g.weight(32, scale=0.1), strides=[4, 4]
    )
    tokens = g.op("Transpose", g.op("Reshape", patches, g.const([1, 32, 16])), perm=[0, 2, 1])
    x = g.op("Add", tokens, g.weight(1, 16, 32, scale=0.5))
    for _ in range(2):
        x = _add_block(g, x, 32, 4)
    x = g.op("ReduceMean", _add_layer_norm(g, x, 32), axes=[1], keepdims=0)
    _add_dense(g, x, 32, 10, out="logits")
    g.output("logits", 1, 10)


def decoder(g: GraphBuilder) -> None:
    """Build a language model: embedded tokens and positions, a causal mask, logits from the embedding weights."""
    table = g.weight(50, 24, scale=0.5)
    x = g.op("Add", g.op("Gather", table, g.input("tokens", 1, 12, dtype="int64")), g.weight(1, 12, 24, scale=0.5))
    ones = g.const(np.ones((12, 12), np.int64))
    mask = g.op("Cast", g.op("Trilu", ones, upper=0), to=9)
    x = _add_block(g, x, 24, 3, mask)
    x = _add_layer_norm(g, x, 24)
    g.output(g.op("MatMul", x, g.op("Transpose", table, perm=[1, 0]), out="logits"), 1, 12, 50)


def dynamic_attention(g: GraphBuilder) -> None:
    """Build a block for any batch and length. Shapes are computed at run time."""
    x = g.input("features", "batch", "time", 16)
    x = _add_block(g, x, 16, 2)
    time = g.op("Gather", g.op("Shape", x), g.const(1))
    steps = g.op("Cast", g.op("Range", g.const(0), time, g.const(1)), to=1)
    weights = g.op("Reshape", g.op("Exp", g.op("Neg", steps)), g.const([1, -1, 1]))
    g.output(g.op("ReduceSum", g.op("Mul", x, weights), g.const([1]), keepdims=0, out="summary"), "batch", 16)


def mlp(g: GraphBuilder) -> None:
    """Build dense layers with ReLU and a softmax."""
    x = g.input("features", 4, 20)
    for ins, outs in ((20, 32), (32, 32)):
        x = g.op("Relu", g.op("Gemm", x, g.weight(outs, ins), g.weight(outs, scale=0.1), transB=1))
    x = g.op("Gemm", x, g.weight(5, 32), g.weight(5, scale=0.1), transB=1)
    g.output(g.op("Softmax", x, axis=1, out="probabilities"), 4, 5)


def mixer(g: GraphBuilder) -> None:
    """Build an MLP mixer with LayerNormalization and Gelu operators, alternating between tokens and channels."""
    g.opset = 20
    x = g.input("tokens", 1, 8, 16)
    for _ in range(2):
        y = g.op("Transpose", _add_layer_norm(g, x, 16), perm=[0, 2, 1])
        y = _add_dense(g, g.op("Gelu", _add_dense(g, y, 8, 16)), 16, 8)
        x = g.op("Add", x, g.op("Transpose", y, perm=[0, 2, 1]))
        y = _add_dense(g, g.op("Gelu", _add_dense(g, _add_layer_norm(g, x, 16), 16, 32), approximate="tanh"), 32, 16)
        x = g.op("Add", x, y)
    _add_layer_norm(g, x, 16, out="mixed")
    g.output("mixed", 1, 8, 16)


def recommender(g: GraphBuilder) -> None:
    """Build a recommender: embeddings, their products, and dense features; three inputs, two outputs."""
    user = g.op("Gather", g.weight(40, 8, scale=0.5), g.input("user", 4, dtype="int64"))
    seen = g.op("Gather", g.weight(60, 8, scale=0.5), g.input("items", 4, 6, dtype="int64"))
    bag = g.op("ReduceMean", seen, axes=[1], keepdims=0, out="bag")
    product = g.op("ReduceSum", g.op("Mul", user, bag), g.const([1]), keepdims=1)
    x = g.op("Concat", user, bag, product, g.input("features", 4, 5), axis=1)
    x = g.op("Relu", g.op("Gemm", x, g.weight(22, 16), g.weight(16, scale=0.1)))
    g.output(g.op("Sigmoid", g.op("Gemm", x, g.weight(16, 1), g.weight(1, scale=0.1)), out="score"), 4, 1)
    g.output(bag, 4, 8)


def _add_recurrent(
    g: GraphBuilder, kind: str, x: str, ins: int, hidden: int, gates: int, out: tuple[str, ...], **more: Any
) -> str:
    """Return a recurrent operator over [time, batch, ins]. The first output is [time, directions, batch, hidden]."""
    ways = 2 if more.get("direction") == "bidirectional" else 1
    weight, again = g.weight(ways, gates * hidden, ins, scale=0.4), g.weight(ways, gates * hidden, hidden, scale=0.4)
    bias = g.weight(ways, 2 * gates * hidden, scale=0.2)
    return g.ops(kind, x, weight, again, bias, out=out, hidden_size=hidden, **more)[0]


def lstm(g: GraphBuilder) -> None:
    """Build an LSTM over a sequence with a classifier of the last state."""
    _add_recurrent(g, "LSTM", g.input("sequence", 10, 1, 8), 8, 16, 4, ("states", "last", "cell"))
    x = g.op("Squeeze", "last", g.const([0]))
    g.output(g.op("Gemm", x, g.weight(6, 16), g.weight(6, scale=0.1), transB=1, out="logits"), 1, 6)
    g.output("cell", 1, 1, 16)


def gru(g: GraphBuilder) -> None:
    """Build two stacked GRUs with batch 2."""
    x = _add_recurrent(g, "GRU", g.input("sequence", 8, 2, 6), 6, 12, 3, ("", ""), linear_before_reset=1)
    x = _add_recurrent(g, "GRU", g.op("Squeeze", x, g.const([1])), 12, 12, 3, ("", "last"), linear_before_reset=1)
    g.output(g.op("Squeeze", x, g.const([1]), out="states"), 8, 2, 12)
    g.output("last", 1, 2, 12)


def bidirectional_lstm(g: GraphBuilder) -> None:
    """Build a tagger: a bidirectional LSTM with a label per step."""
    embedded = g.op("Gather", g.weight(30, 8, scale=0.5), g.input("tokens", 9, 1, dtype="int64"))
    x = _add_recurrent(g, "LSTM", embedded, 8, 8, 4, ("", "", ""), direction="bidirectional")
    x = g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3]), g.const([9, 16]))
    x = g.op("Gemm", x, g.weight(16, 5, scale=0.4), g.weight(5, scale=0.1))
    g.output(g.op("LogSoftmax", x, axis=1, out="labels"), 9, 5)


def wavenet(g: GraphBuilder) -> None:
    """Build gated dilated 1-D convolutions over sound, with residuals and skips."""
    x = g.op("Conv", g.input("sound", 1, 1, 64), g.weight(8, 1, 1), g.weight(8, scale=0.1))
    skips = []
    for dilation in (1, 2, 4):
        pads = [2 * dilation, 0]  # causal: no future samples
        ends = [
            g.op("Conv", x, g.weight(8, 8, 3), g.weight(8, scale=0.1), dilations=[dilation], pads=pads)
            for _ in range(2)
        ]
        y = g.op("Mul", g.op("Tanh", ends[0]), g.op("Sigmoid", ends[1]))
        skips.append(g.op("Conv", y, g.weight(8, 8, 1), g.weight(8, scale=0.1)))
        x = g.op("Add", x, g.op("Conv", y, g.weight(8, 8, 1), g.weight(8, scale=0.1)))
    x = g.op("Relu", g.op("Sum", *skips))
    g.output(g.op("Conv", x, g.weight(4, 8, 1), g.weight(4, scale=0.1), out="next"), 1, 4, 64)


def branches(g: GraphBuilder) -> None:
    """Build an If with branches of different depth. The input's mean selects the branch."""
    x = g.input("features", 2, 8)
    w1, w2, w3 = g.weight(8, 8), g.weight(8, 4), g.weight(8, 4)
    deep = g.body("deep")
    deep.output(deep.op("MatMul", deep.op("Tanh", deep.op("MatMul", x, w1)), w2, out="deep_out"), 2, 4)
    flat = g.body("flat")
    flat.output(flat.op("MatMul", x, w3, out="flat_out"), 2, 4)
    high = g.op("Greater", g.op("ReduceMean", x, keepdims=0), g.const(0.0))
    chosen = g.op("If", high, then_branch=deep.proto(), else_branch=flat.proto())
    g.output(g.op("Softplus", chosen, out="answer"), 2, 4)


def loop(g: GraphBuilder) -> None:
    """Build Newton's method for a square root as a Loop with an iteration limit and early exit."""
    x = g.op("Add", g.op("Abs", g.input("numbers", 6)), g.const(0.5))
    body = g.body("step")
    body.input("round", dtype="int64")
    body.input("go_on", dtype="bool")
    guess = body.input("guess", 6)
    body.op("Mul", body.op("Add", guess, body.op("Div", x, guess)), body.const(0.5), out="better")
    change = body.op("ReduceMax", body.op("Abs", body.op("Sub", "better", guess)), keepdims=0)
    body.output(body.op("Greater", change, body.const(1e-3), out="still"), dtype="bool")
    body.output("better", 6)
    g.ops("Loop", g.const(8), g.const(np.bool_(True)), x, out=("root",), body=body.proto())
    g.output("root", 6)


def scan(g: GraphBuilder) -> None:
    """Build a tanh recurrent cell as a Scan over time."""
    w, u = g.weight(5, 7), g.weight(7, 7)
    body = g.body("cell")
    state = body.input("state", 2, 7)
    x = body.input("x", 2, 5)
    body.op("Tanh", body.op("Add", body.op("MatMul", x, w), body.op("MatMul", state, u)), out="after")
    body.op("Identity", "after", out="seen")
    body.output("after", 2, 7)
    body.output("seen", 2, 7)
    start = g.const(np.zeros((2, 7), np.float32))
    g.ops("Scan", start, g.input("sequence", 6, 2, 5), out=("last", "all"), body=body.proto(), num_scan_inputs=1)
    g.output("last", 2, 7)
    g.output("all", 6, 2, 7)


def _build_small_net(g: GraphBuilder, dtype: str) -> None:
    """Build dense layers with a residual in a different dtype. Inputs and outputs have that dtype too."""
    g.dtype = dtype
    x = g.input("features", 4, 16)
    y = g.op("Relu", g.op("Add", g.op("MatMul", x, g.weight(16, 16)), g.weight(16, scale=0.1)))
    x = g.op("Add", x, y)
    g.output(g.op("MatMul", g.op("Tanh", x), g.weight(16, 8), out="answer"), 4, 8)


def half(g: GraphBuilder) -> None:
    """Build a float16 network."""
    _build_small_net(g, "float16")


def bfloat16(g: GraphBuilder) -> None:
    """Build a bfloat16 network. ONNX Runtime's CPU provider lacks bfloat16 MatMul, so other references are needed."""
    _build_small_net(g, "bfloat16")


def double(g: GraphBuilder) -> None:
    """Build a float64 network."""
    _build_small_net(g, "float64")


def integers(g: GraphBuilder) -> None:
    """Build int64 arithmetic: token hashes, remainders, divisions, comparisons, and counts."""
    x = g.input("tokens", 3, 8, dtype="int64")
    mixed = g.op("Add", g.op("Mul", x, g.const(np.int64(6364136223846793))), g.const(np.int64(1442695040888963)))
    bucket = g.op("Mod", mixed, g.const(np.int64(97)))
    g.op("Sub", g.op("Div", bucket, g.const(np.int64(5))), g.op("Abs", x), out="buckets")
    same = g.op("Cast", g.op("Equal", g.op("Mod", bucket, g.const(np.int64(3))), g.const(np.int64(0))), to=7)
    g.op("ReduceSum", same, g.const([1]), keepdims=0, out="counts")
    g.op("CumSum", bucket, g.const(1), out="running")
    g.output("buckets", 3, 8, dtype="int64")
    g.output("counts", 3, dtype="int64")
    g.output("running", 3, 8, dtype="int64")


def beam_step(g: GraphBuilder) -> None:
    """Build a beam search step: add scores to the totals, select the best, and return their beams and tokens."""
    so_far = g.op("Unsqueeze", g.input("so_far", 4), g.const([1]))
    total = g.op("Add", g.op("LogSoftmax", g.input("scores", 4, 20), axis=1), so_far)
    flat = g.op("Reshape", total, g.const([-1]))
    g.ops("TopK", flat, g.const([4]), out=("best", "index"), axis=0, largest=1, sorted=1)
    g.op("Div", "index", g.const(np.int64(20)), out="beam")
    g.op("Mod", "index", g.const(np.int64(20)), out="token")
    g.op("ArgMax", total, axis=1, keepdims=0, out="greedy")
    g.output("best", 4)
    for name in ("beam", "token", "greedy"):
        g.output(name, 4, dtype="int64")
