"""Networks of the suite ``models``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hil.controller.workloads.suites.zoo.graph_builder import GraphBuilder


def _add_conv(
    g: GraphBuilder, x: str, ins: int, outs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> str:
    """Return a convolution with bias that preserves the size (divided by the stride)."""
    return g.add_op(
        "Conv",
        x,
        g.add_weight(outs, ins // groups, kernel, kernel),
        g.add_weight(outs, scale=0.1),
        pads=[kernel // 2] * 4,
        strides=[stride, stride],
        group=groups,
    )


def _add_norm(g: GraphBuilder, x: str, channels: int) -> str:
    """Return batch normalization in inference mode."""
    scale = g.add_constant(np.linspace(0.8, 1.2, channels, dtype=np.float32))
    variance = g.add_constant(np.linspace(0.5, 1.5, channels, dtype=np.float32))
    bias, mean = g.add_weight(channels, scale=0.1), g.add_weight(channels, scale=0.1)
    return g.add_op("BatchNormalization", x, scale, bias, mean, variance)


def _add_classifier(g: GraphBuilder, x: str, channels: int, classes: int) -> None:
    """Add global average pooling and a dense layer that returns logits."""
    flat = g.add_op("Flatten", g.add_op("GlobalAveragePool", x))
    g.add_op("Gemm", flat, g.add_weight(classes, channels), g.add_weight(classes, scale=0.1), transB=1, out="logits")
    g.add_output("logits", 1, classes)


def resnet(g: GraphBuilder) -> None:
    """Build three residual blocks, including one with a projection."""
    x = g.add_op("Relu", _add_norm(g, _add_conv(g, g.add_input("image", 1, 3, 16, 16), 3, 8), 8))
    for ins, outs, stride in ((8, 8, 1), (8, 16, 2), (16, 16, 1)):
        y = g.add_op("Relu", _add_norm(g, _add_conv(g, x, ins, outs, stride=stride), outs))
        y = _add_norm(g, _add_conv(g, y, outs, outs), outs)
        if ins != outs:
            x = _add_norm(g, _add_conv(g, x, ins, outs, kernel=1, stride=stride), outs)
        x = g.add_op("Relu", g.add_op("Add", y, x))
    _add_classifier(g, x, 16, 10)


def mobilenet(g: GraphBuilder) -> None:
    """Build inverted residuals: expansion, depthwise convolution, projection, with ReLU6."""

    def add_relu6(x: str) -> str:
        return g.add_op("Clip", x, g.add_constant(0.0), g.add_constant(6.0))

    x = add_relu6(_add_conv(g, g.add_input("image", 1, 3, 16, 16), 3, 8, stride=2))
    for ins, outs, stride in ((8, 12, 2), (12, 12, 1)):
        wide = ins * 3
        y = add_relu6(_add_conv(g, x, ins, wide, kernel=1))
        y = add_relu6(_add_conv(g, y, wide, wide, stride=stride, groups=wide))
        y = _add_conv(g, y, wide, outs, kernel=1)
        x = g.add_op("Add", x, y) if ins == outs else y
    _add_classifier(g, x, 12, 10)


def squeeze_excite(g: GraphBuilder) -> None:
    """Build squeeze-and-excite blocks with hard swish, as in MobileNetV3."""
    x = g.add_op("HardSwish", _add_conv(g, g.add_input("image", 1, 3, 12, 12), 3, 16))
    for _ in range(2):
        y = g.add_op("HardSwish", _add_conv(g, x, 16, 16, kernel=5, groups=16))
        gate = g.add_op("Relu", _add_conv(g, g.add_op("GlobalAveragePool", y), 16, 4, kernel=1))
        gate = g.add_op("HardSigmoid", _add_conv(g, gate, 4, 16, kernel=1), alpha=1 / 6, beta=0.5)
        x = g.add_op("Add", x, _add_conv(g, g.add_op("Mul", y, gate), 16, 16, kernel=1))
    _add_classifier(g, x, 16, 5)


def unet(g: GraphBuilder) -> None:
    """Build a U-Net with two levels.

    It upsamples by a transposed convolution and by resizing, with skip connections.
    """
    top = g.add_op("Relu", _add_conv(g, g.add_input("image", 1, 1, 16, 16), 1, 4))
    middle = g.add_op("Relu", _add_conv(g, g.add_op("MaxPool", top, kernel_shape=[2, 2], strides=[2, 2]), 4, 8))
    x = g.add_op("Relu", _add_conv(g, g.add_op("MaxPool", middle, kernel_shape=[2, 2], strides=[2, 2]), 8, 16))
    x = g.add_op("ConvTranspose", x, g.add_weight(16, 8, 2, 2), g.add_weight(8, scale=0.1), strides=[2, 2])
    x = g.add_op("Relu", _add_conv(g, g.add_op("Concat", x, middle, axis=1), 16, 8))
    scales = g.add_constant(np.array([1, 1, 2, 2], np.float32))
    x = g.add_op(
        "Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    x = g.add_op("Relu", _add_conv(g, g.add_op("Concat", x, top, axis=1), 12, 4))
    g.add_output(g.add_op("Sigmoid", _add_conv(g, x, 4, 1, kernel=1), out="mask"), 1, 1, 16, 16)


def pooling_mix(g: GraphBuilder) -> None:
    """Build grouped convolutions with batch normalization and the common kinds of pooling and padding."""
    x = g.add_op(
        "LeakyRelu", _add_norm(g, _add_conv(g, g.add_input("image", 2, 4, 15, 15), 4, 8, groups=4), 8), alpha=0.1
    )
    x = g.add_op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = g.add_op(
        "PRelu", _add_norm(g, _add_conv(g, x, 8, 8, groups=2), 8), g.add_constant(np.full((8, 1, 1), 0.2, np.float32))
    )
    x = g.add_op("AveragePool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=0)
    pads = g.add_constant(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    x = g.add_op("Elu", _add_conv(g, g.add_op("Pad", x, pads, g.add_constant(0.5)), 8, 8, stride=2))
    most, mean = g.add_op("GlobalMaxPool", x), g.add_op("GlobalAveragePool", x)
    g.add_output(g.add_op("Flatten", g.add_op("Concat", most, mean, axis=1), out="features"), 2, 16)


def siamese(g: GraphBuilder) -> None:
    """Build a siamese network with two inputs and three outputs. Two images use the same weights."""
    weights = [
        (g.add_weight(8, 1, 3, 3), g.add_weight(8, scale=0.1)),
        (g.add_weight(8, 8, 3, 3), g.add_weight(8, scale=0.1)),
    ]
    dense, bias = g.add_weight(128, 16), g.add_weight(16, scale=0.1)
    ends = []
    for side in ("left", "right"):
        x = g.add_input(side, 1, 1, 16, 16)
        for weight, offset in weights:
            x = g.add_op("Relu", g.add_op("Conv", x, weight, offset, pads=[1, 1, 1, 1], strides=[2, 2]))
        x = g.add_op("Gemm", g.add_op("Flatten", x), dense, bias)
        x = g.add_op("LpNormalization", x, axis=1, p=2, out=f"{side}_embedding")
        g.add_output(x, 1, 16)
        ends.append(x)
    g.add_output(g.add_op("ReduceL2", g.add_op("Sub", *ends), axes=[1], keepdims=0, out="distance"), 1)


def quantised_cnn(g: GraphBuilder) -> None:
    """Build a quantized network in the form of exporters.

    The network has int8 weights per channel, QuantizeLinear and DequantizeLinear.
    """
    rng = np.random.RandomState(7)

    def quantise(x: str, scale: float, zero: int) -> str:
        ends = (g.add_constant(np.float32(scale), "scale"), g.add_constant(np.uint8(zero), "zero"))
        return g.add_op("DequantizeLinear", g.add_op("QuantizeLinear", x, *ends), *ends)

    def add_weights(*shape: int) -> tuple[str, str]:
        """Return weights, and a bias with the scale of weights times inputs."""
        scale = rng.uniform(0.002, 0.006, shape[0]).astype(np.float32)
        values = rng.randint(-127, 128, shape).astype(np.int8)
        named = g.add_constant(scale, "scale")
        weight = g.add_op(
            "DequantizeLinear", g.add_constant(values, "w"), named, g.add_constant(np.zeros(shape[0], np.int8)), axis=0
        )
        offset = rng.randint(-200, 200, shape[0]).astype(np.int32)
        bias_scale = g.add_constant(scale * np.float32(1 / 32), "scale")
        bias = g.add_op(
            "DequantizeLinear",
            g.add_constant(offset, "b"),
            bias_scale,
            g.add_constant(np.zeros(shape[0], np.int32)),
            axis=0,
        )
        return weight, bias

    x = quantise(g.add_input("image", 1, 1, 12, 12), 1 / 32, 128)
    for ins, outs in ((1, 8), (8, 16)):
        x = g.add_op("Relu", g.add_op("Conv", x, *add_weights(outs, ins, 3, 3), pads=[1, 1, 1, 1]))
        x = g.add_op("MaxPool", quantise(x, 1 / 32, 0), kernel_shape=[2, 2], strides=[2, 2])
        x = quantise(x, 1 / 32, 0)
    x = g.add_op("Gemm", g.add_op("Flatten", x), *add_weights(10, 144), transB=1)
    ends = (g.add_constant(np.float32(0.25), "scale"), g.add_constant(np.uint8(128), "zero"))
    g.add_output(g.add_op("DequantizeLinear", g.add_op("QuantizeLinear", x, *ends), *ends, out="logits"), 1, 10)


def _add_dense(g: GraphBuilder, x: str, ins: int, outs: int, out: str = "") -> str:
    return g.add_op(
        "Add",
        g.add_op("MatMul", x, g.add_weight(ins, outs, scale=(3 / ins) ** 0.5)),
        g.add_weight(outs, scale=0.1),
        out=out,
    )


def _add_layer_norm(g: GraphBuilder, x: str, width: int, out: str = "") -> str:
    ones = g.add_constant(np.linspace(0.9, 1.1, width, dtype=np.float32))
    return g.add_op("LayerNormalization", x, ones, g.add_weight(width, scale=0.1), axis=-1, epsilon=1e-5, out=out)


def _split_heads(g: GraphBuilder, x: str, heads: int, size: int, perm: list[int]) -> str:
    """Reshape [batch, time, heads * size] to [batch, heads, ...], for any batch and time."""
    return g.add_op("Transpose", g.add_op("Reshape", x, g.add_constant([0, 0, heads, size])), perm=perm)


def _add_attention(g: GraphBuilder, x: str, width: int, heads: int, mask: str = "") -> str:
    size = width // heads
    query = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    key = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 3, 1])
    value = _split_heads(g, _add_dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    scores = g.add_op("Div", g.add_op("MatMul", query, key), g.add_constant(math.sqrt(size)))
    if mask:
        scores = g.add_op("Where", mask, scores, g.add_constant(-1e9))
    mixed = g.add_op("MatMul", g.add_op("Softmax", scores, axis=-1), value)
    joined = g.add_op("Reshape", g.add_op("Transpose", mixed, perm=[0, 2, 1, 3]), g.add_constant([0, 0, width]))
    return _add_dense(g, joined, width, width)


def _add_gelu(g: GraphBuilder, x: str) -> str:
    """Return GELU as separate operators, as exporters for older opsets write it."""
    error = g.add_op("Erf", g.add_op("Div", x, g.add_constant(math.sqrt(2))))
    return g.add_op("Mul", g.add_op("Mul", x, g.add_op("Add", error, g.add_constant(1.0))), g.add_constant(0.5))


def _add_block(g: GraphBuilder, x: str, width: int, heads: int, mask: str = "") -> str:
    """Return a transformer block with layer normalization before both halves."""
    x = g.add_op("Add", x, _add_attention(g, _add_layer_norm(g, x, width), width, heads, mask))
    wide = _add_gelu(g, _add_dense(g, _add_layer_norm(g, x, width), width, width * 4))
    return g.add_op("Add", x, _add_dense(g, wide, width * 4, width))


def transformer(g: GraphBuilder) -> None:
    """Build two encoder blocks over image patches, as in a vision transformer."""
    patches = g.add_op(
        "Conv",
        g.add_input("image", 1, 3, 16, 16),
        g.add_weight(32, 3, 4, 4),
        g.add_weight(32, scale=0.1),
        strides=[4, 4],
    )
    tokens = g.add_op("Transpose", g.add_op("Reshape", patches, g.add_constant([1, 32, 16])), perm=[0, 2, 1])
    x = g.add_op("Add", tokens, g.add_weight(1, 16, 32, scale=0.5))
    for _ in range(2):
        x = _add_block(g, x, 32, 4)
    x = g.add_op("ReduceMean", _add_layer_norm(g, x, 32), axes=[1], keepdims=0)
    _add_dense(g, x, 32, 10, out="logits")
    g.add_output("logits", 1, 10)


def decoder(g: GraphBuilder) -> None:
    """Build a language model: embedded tokens and positions, a causal mask, logits from the embedding weights."""
    table = g.add_weight(50, 24, scale=0.5)
    x = g.add_op(
        "Add",
        g.add_op("Gather", table, g.add_input("tokens", 1, 12, dtype="int64")),
        g.add_weight(1, 12, 24, scale=0.5),
    )
    ones = g.add_constant(np.ones((12, 12), np.int64))
    mask = g.add_op("Cast", g.add_op("Trilu", ones, upper=0), to=9)
    x = _add_block(g, x, 24, 3, mask)
    x = _add_layer_norm(g, x, 24)
    g.add_output(g.add_op("MatMul", x, g.add_op("Transpose", table, perm=[1, 0]), out="logits"), 1, 12, 50)


def dynamic_attention(g: GraphBuilder) -> None:
    """Build a block for any batch and length. Shapes are computed at run time."""
    x = g.add_input("features", "batch", "time", 16)
    x = _add_block(g, x, 16, 2)
    time = g.add_op("Gather", g.add_op("Shape", x), g.add_constant(1))
    steps = g.add_op("Cast", g.add_op("Range", g.add_constant(0), time, g.add_constant(1)), to=1)
    weights = g.add_op("Reshape", g.add_op("Exp", g.add_op("Neg", steps)), g.add_constant([1, -1, 1]))
    g.add_output(
        g.add_op("ReduceSum", g.add_op("Mul", x, weights), g.add_constant([1]), keepdims=0, out="summary"), "batch", 16
    )


def mlp(g: GraphBuilder) -> None:
    """Build dense layers with ReLU and a softmax."""
    x = g.add_input("features", 4, 20)
    for ins, outs in ((20, 32), (32, 32)):
        x = g.add_op("Relu", g.add_op("Gemm", x, g.add_weight(outs, ins), g.add_weight(outs, scale=0.1), transB=1))
    x = g.add_op("Gemm", x, g.add_weight(5, 32), g.add_weight(5, scale=0.1), transB=1)
    g.add_output(g.add_op("Softmax", x, axis=1, out="probabilities"), 4, 5)


def mixer(g: GraphBuilder) -> None:
    """Build an MLP mixer with LayerNormalization and Gelu operators, alternating between tokens and channels."""
    g.opset = 20
    x = g.add_input("tokens", 1, 8, 16)
    for _ in range(2):
        y = g.add_op("Transpose", _add_layer_norm(g, x, 16), perm=[0, 2, 1])
        y = _add_dense(g, g.add_op("Gelu", _add_dense(g, y, 8, 16)), 16, 8)
        x = g.add_op("Add", x, g.add_op("Transpose", y, perm=[0, 2, 1]))
        y = _add_dense(
            g, g.add_op("Gelu", _add_dense(g, _add_layer_norm(g, x, 16), 16, 32), approximate="tanh"), 32, 16
        )
        x = g.add_op("Add", x, y)
    _add_layer_norm(g, x, 16, out="mixed")
    g.add_output("mixed", 1, 8, 16)


def recommender(g: GraphBuilder) -> None:
    """Build a recommender: embeddings, their products, and dense features; three inputs, two outputs."""
    user = g.add_op("Gather", g.add_weight(40, 8, scale=0.5), g.add_input("user", 4, dtype="int64"))
    seen = g.add_op("Gather", g.add_weight(60, 8, scale=0.5), g.add_input("items", 4, 6, dtype="int64"))
    bag = g.add_op("ReduceMean", seen, axes=[1], keepdims=0, out="bag")
    product = g.add_op("ReduceSum", g.add_op("Mul", user, bag), g.add_constant([1]), keepdims=1)
    x = g.add_op("Concat", user, bag, product, g.add_input("features", 4, 5), axis=1)
    x = g.add_op("Relu", g.add_op("Gemm", x, g.add_weight(22, 16), g.add_weight(16, scale=0.1)))
    g.add_output(
        g.add_op("Sigmoid", g.add_op("Gemm", x, g.add_weight(16, 1), g.add_weight(1, scale=0.1)), out="score"), 4, 1
    )
    g.add_output(bag, 4, 8)


def _add_recurrent(
    g: GraphBuilder, kind: str, x: str, ins: int, hidden: int, gates: int, out: tuple[str, ...], **more: Any
) -> str:
    """Return a recurrent operator over [time, batch, ins]. The first output is [time, directions, batch, hidden]."""
    ways = 2 if more.get("direction") == "bidirectional" else 1
    weight, again = (
        g.add_weight(ways, gates * hidden, ins, scale=0.4),
        g.add_weight(ways, gates * hidden, hidden, scale=0.4),
    )
    bias = g.add_weight(ways, 2 * gates * hidden, scale=0.2)
    return g.add_ops(kind, x, weight, again, bias, out=out, hidden_size=hidden, **more)[0]


def lstm(g: GraphBuilder) -> None:
    """Build an LSTM over a sequence with a classifier of the last state."""
    _add_recurrent(g, "LSTM", g.add_input("sequence", 10, 1, 8), 8, 16, 4, ("states", "last", "cell"))
    x = g.add_op("Squeeze", "last", g.add_constant([0]))
    g.add_output(g.add_op("Gemm", x, g.add_weight(6, 16), g.add_weight(6, scale=0.1), transB=1, out="logits"), 1, 6)
    g.add_output("cell", 1, 1, 16)


def gru(g: GraphBuilder) -> None:
    """Build two stacked GRUs with batch 2."""
    x = _add_recurrent(g, "GRU", g.add_input("sequence", 8, 2, 6), 6, 12, 3, ("", ""), linear_before_reset=1)
    x = _add_recurrent(
        g, "GRU", g.add_op("Squeeze", x, g.add_constant([1])), 12, 12, 3, ("", "last"), linear_before_reset=1
    )
    g.add_output(g.add_op("Squeeze", x, g.add_constant([1]), out="states"), 8, 2, 12)
    g.add_output("last", 1, 2, 12)


def bidirectional_lstm(g: GraphBuilder) -> None:
    """Build a tagger: a bidirectional LSTM with a label per step."""
    embedded = g.add_op("Gather", g.add_weight(30, 8, scale=0.5), g.add_input("tokens", 9, 1, dtype="int64"))
    x = _add_recurrent(g, "LSTM", embedded, 8, 8, 4, ("", "", ""), direction="bidirectional")
    x = g.add_op("Reshape", g.add_op("Transpose", x, perm=[0, 2, 1, 3]), g.add_constant([9, 16]))
    x = g.add_op("Gemm", x, g.add_weight(16, 5, scale=0.4), g.add_weight(5, scale=0.1))
    g.add_output(g.add_op("LogSoftmax", x, axis=1, out="labels"), 9, 5)


def wavenet(g: GraphBuilder) -> None:
    """Build gated dilated 1-D convolutions over sound, with residuals and skips."""
    x = g.add_op("Conv", g.add_input("sound", 1, 1, 64), g.add_weight(8, 1, 1), g.add_weight(8, scale=0.1))
    skips = []
    for dilation in (1, 2, 4):
        pads = [2 * dilation, 0]  # causal: no future samples
        ends = [
            g.add_op("Conv", x, g.add_weight(8, 8, 3), g.add_weight(8, scale=0.1), dilations=[dilation], pads=pads)
            for _ in range(2)
        ]
        y = g.add_op("Mul", g.add_op("Tanh", ends[0]), g.add_op("Sigmoid", ends[1]))
        skips.append(g.add_op("Conv", y, g.add_weight(8, 8, 1), g.add_weight(8, scale=0.1)))
        x = g.add_op("Add", x, g.add_op("Conv", y, g.add_weight(8, 8, 1), g.add_weight(8, scale=0.1)))
    x = g.add_op("Relu", g.add_op("Sum", *skips))
    g.add_output(g.add_op("Conv", x, g.add_weight(4, 8, 1), g.add_weight(4, scale=0.1), out="next"), 1, 4, 64)


def branches(g: GraphBuilder) -> None:
    """Build an If with branches of different depth. The input's mean selects the branch."""
    x = g.add_input("features", 2, 8)
    w1, w2, w3 = g.add_weight(8, 8), g.add_weight(8, 4), g.add_weight(8, 4)
    deep = g.make_body("deep")
    deep.add_output(deep.add_op("MatMul", deep.add_op("Tanh", deep.add_op("MatMul", x, w1)), w2, out="deep_out"), 2, 4)
    flat = g.make_body("flat")
    flat.add_output(flat.add_op("MatMul", x, w3, out="flat_out"), 2, 4)
    high = g.add_op("Greater", g.add_op("ReduceMean", x, keepdims=0), g.add_constant(0.0))
    chosen = g.add_op("If", high, then_branch=deep.build_proto(), else_branch=flat.build_proto())
    g.add_output(g.add_op("Softplus", chosen, out="answer"), 2, 4)


def loop(g: GraphBuilder) -> None:
    """Build Newton's method for a square root as a Loop with an iteration limit and early exit."""
    x = g.add_op("Add", g.add_op("Abs", g.add_input("numbers", 6)), g.add_constant(0.5))
    body = g.make_body("step")
    body.add_input("round", dtype="int64")
    body.add_input("go_on", dtype="bool")
    guess = body.add_input("guess", 6)
    body.add_op("Mul", body.add_op("Add", guess, body.add_op("Div", x, guess)), body.add_constant(0.5), out="better")
    change = body.add_op("ReduceMax", body.add_op("Abs", body.add_op("Sub", "better", guess)), keepdims=0)
    body.add_output(body.add_op("Greater", change, body.add_constant(1e-3), out="still"), dtype="bool")
    body.add_output("better", 6)
    g.add_ops("Loop", g.add_constant(8), g.add_constant(np.bool_(True)), x, out=("root",), body=body.build_proto())
    g.add_output("root", 6)


def scan(g: GraphBuilder) -> None:
    """Build a tanh recurrent cell as a Scan over time."""
    w, u = g.add_weight(5, 7), g.add_weight(7, 7)
    body = g.make_body("cell")
    state = body.add_input("state", 2, 7)
    x = body.add_input("x", 2, 5)
    body.add_op("Tanh", body.add_op("Add", body.add_op("MatMul", x, w), body.add_op("MatMul", state, u)), out="after")
    body.add_op("Identity", "after", out="seen")
    body.add_output("after", 2, 7)
    body.add_output("seen", 2, 7)
    start = g.add_constant(np.zeros((2, 7), np.float32))
    g.add_ops(
        "Scan", start, g.add_input("sequence", 6, 2, 5), out=("last", "all"), body=body.build_proto(), num_scan_inputs=1
    )
    g.add_output("last", 2, 7)
    g.add_output("all", 6, 2, 7)


def _build_small_net(g: GraphBuilder, dtype: str) -> None:
    """Build dense layers with a residual in a different dtype. Inputs and outputs have that dtype too."""
    g.dtype = dtype
    x = g.add_input("features", 4, 16)
    y = g.add_op("Relu", g.add_op("Add", g.add_op("MatMul", x, g.add_weight(16, 16)), g.add_weight(16, scale=0.1)))
    x = g.add_op("Add", x, y)
    g.add_output(g.add_op("MatMul", g.add_op("Tanh", x), g.add_weight(16, 8), out="answer"), 4, 8)


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
    x = g.add_input("tokens", 3, 8, dtype="int64")
    mixed = g.add_op(
        "Add",
        g.add_op("Mul", x, g.add_constant(np.int64(6364136223846793))),
        g.add_constant(np.int64(1442695040888963)),
    )
    bucket = g.add_op("Mod", mixed, g.add_constant(np.int64(97)))
    g.add_op("Sub", g.add_op("Div", bucket, g.add_constant(np.int64(5))), g.add_op("Abs", x), out="buckets")
    same = g.add_op(
        "Cast",
        g.add_op("Equal", g.add_op("Mod", bucket, g.add_constant(np.int64(3))), g.add_constant(np.int64(0))),
        to=7,
    )
    g.add_op("ReduceSum", same, g.add_constant([1]), keepdims=0, out="counts")
    g.add_op("CumSum", bucket, g.add_constant(1), out="running")
    g.add_output("buckets", 3, 8, dtype="int64")
    g.add_output("counts", 3, dtype="int64")
    g.add_output("running", 3, 8, dtype="int64")


def beam_step(g: GraphBuilder) -> None:
    """Build a beam search step: add scores to the totals, select the best, and return their beams and tokens."""
    so_far = g.add_op("Unsqueeze", g.add_input("so_far", 4), g.add_constant([1]))
    total = g.add_op("Add", g.add_op("LogSoftmax", g.add_input("scores", 4, 20), axis=1), so_far)
    flat = g.add_op("Reshape", total, g.add_constant([-1]))
    g.add_ops("TopK", flat, g.add_constant([4]), out=("best", "index"), axis=0, largest=1, sorted=1)
    g.add_op("Div", "index", g.add_constant(np.int64(20)), out="beam")
    g.add_op("Mod", "index", g.add_constant(np.int64(20)), out="token")
    g.add_op("ArgMax", total, axis=1, keepdims=0, out="greedy")
    g.add_output("best", 4)
    for name in ("beam", "token", "greedy"):
        g.add_output(name, 4, dtype="int64")
