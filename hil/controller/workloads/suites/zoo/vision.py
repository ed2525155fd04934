"""Convolutional networks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hil.controller.workloads.suites.zoo.graph import Graph


def _conv(g: Graph, x: str, ins: int, outs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
    """A convolution that keeps the size (divided by its stride), with bias."""
    return g.op(
        "Conv",
        x,
        g.weight(outs, ins // groups, kernel, kernel),
        g.weight(outs, scale=0.1),
        pads=[kernel // 2] * 4,
        strides=[stride, stride],
        group=groups,
    )


def _norm(g: Graph, x: str, channels: int) -> str:
    """Batch normalisation as it is at inference."""
    scale = g.const(np.linspace(0.8, 1.2, channels, dtype=np.float32))
    variance = g.const(np.linspace(0.5, 1.5, channels, dtype=np.float32))
    bias, mean = g.weight(channels, scale=0.1), g.weight(channels, scale=0.1)
    return g.op("BatchNormalization", x, scale, bias, mean, variance)


def _classify(g: Graph, x: str, channels: int, classes: int) -> None:
    """Global average pooling and a dense layer: logits."""
    flat = g.op("Flatten", g.op("GlobalAveragePool", x))
    g.op("Gemm", flat, g.weight(classes, channels), g.weight(classes, scale=0.1), transB=1, out="logits")
    g.output("logits", 1, classes)


def resnet() -> Any:
    """Three residual blocks, one of them with a projection."""
    g = Graph("resnet")
    x = g.op("Relu", _norm(g, _conv(g, g.input("image", 1, 3, 16, 16), 3, 8), 8))
    for ins, outs, stride in ((8, 8, 1), (8, 16, 2), (16, 16, 1)):
        y = g.op("Relu", _norm(g, _conv(g, x, ins, outs, stride=stride), outs))
        y = _norm(g, _conv(g, y, outs, outs), outs)
        if ins != outs:
            x = _norm(g, _conv(g, x, ins, outs, kernel=1, stride=stride), outs)
        x = g.op("Relu", g.op("Add", y, x))
    _classify(g, x, 16, 10)
    return g.model()


def mobilenet() -> Any:
    """Inverted residuals: expand, convolve each channel by itself, project; clipped at 6."""
    g = Graph("mobilenet")

    def relu6(x: str) -> str:
        return g.op("Clip", x, g.const(0.0), g.const(6.0))

    x = relu6(_conv(g, g.input("image", 1, 3, 16, 16), 3, 8, stride=2))
    for ins, outs, stride in ((8, 12, 2), (12, 12, 1)):
        wide = ins * 3
        y = relu6(_conv(g, x, ins, wide, kernel=1))
        y = relu6(_conv(g, y, wide, wide, stride=stride, groups=wide))
        y = _conv(g, y, wide, outs, kernel=1)
        x = g.op("Add", x, y) if ins == outs else y
    _classify(g, x, 12, 10)
    return g.model()


def squeeze_excite() -> Any:
    """Channels weighed by what all of the image says of them; hard swish, as in MobileNetV3."""
    g = Graph("squeeze_excite")
    x = g.op("HardSwish", _conv(g, g.input("image", 1, 3, 12, 12), 3, 16))
    for _ in range(2):
        y = g.op("HardSwish", _conv(g, x, 16, 16, kernel=5, groups=16))
        gate = g.op("Relu", _conv(g, g.op("GlobalAveragePool", y), 16, 4, kernel=1))
        gate = g.op("HardSigmoid", _conv(g, gate, 4, 16, kernel=1), alpha=1 / 6, beta=0.5)
        x = g.op("Add", x, _conv(g, g.op("Mul", y, gate), 16, 16, kernel=1))
    _classify(g, x, 16, 5)
    return g.model()


def unet() -> Any:
    """Down twice and up twice, once by a transposed convolution and once by resizing, with the skips joined."""
    g = Graph("unet")
    top = g.op("Relu", _conv(g, g.input("image", 1, 1, 16, 16), 1, 4))
    middle = g.op("Relu", _conv(g, g.op("MaxPool", top, kernel_shape=[2, 2], strides=[2, 2]), 4, 8))
    x = g.op("Relu", _conv(g, g.op("MaxPool", middle, kernel_shape=[2, 2], strides=[2, 2]), 8, 16))
    x = g.op("ConvTranspose", x, g.weight(16, 8, 2, 2), g.weight(8, scale=0.1), strides=[2, 2])
    x = g.op("Relu", _conv(g, g.op("Concat", x, middle, axis=1), 16, 8))
    scales = g.const(np.array([1, 1, 2, 2], np.float32))
    x = g.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    x = g.op("Relu", _conv(g, g.op("Concat", x, top, axis=1), 12, 4))
    g.op("Sigmoid", _conv(g, x, 4, 1, kernel=1), out="mask")
    g.output("mask", 1, 1, 16, 16)
    return g.model()


def pooling_mix() -> Any:
    """Grouped convolutions, batch normalisation, and every common sort of pooling and padding."""
    g = Graph("pooling_mix")
    x = g.op("LeakyRelu", _norm(g, _conv(g, g.input("image", 2, 4, 15, 15), 4, 8, groups=4), 8), alpha=0.1)
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = g.op("PRelu", _norm(g, _conv(g, x, 8, 8, groups=2), 8), g.const(np.full((8, 1, 1), 0.2, np.float32)))
    x = g.op("AveragePool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=0)
    pads = g.const(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    x = g.op("Elu", _conv(g, g.op("Pad", x, pads, g.const(0.5)), 8, 8, stride=2))
    most, mean = g.op("GlobalMaxPool", x), g.op("GlobalAveragePool", x)
    g.op("Flatten", g.op("Concat", most, mean, axis=1), out="features")
    g.output("features", 2, 16)
    return g.model()


def siamese() -> Any:
    """Two images through the same weights: two inputs, three outputs."""
    g = Graph("siamese")
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
    g.op("ReduceL2", g.op("Sub", *ends), axes=[1], keepdims=0, out="distance")
    g.output("distance", 1)
    return g.model()


def quantised_cnn() -> Any:
    """A quantised network as exporters write it: int8 weights per channel, QuantizeLinear and DequantizeLinear."""
    g = Graph("quantised_cnn")
    rng = np.random.RandomState(7)

    def quantised(x: str, scale: float, zero: int) -> str:
        ends = (g.const(np.float32(scale), "scale"), g.const(np.uint8(zero), "zero"))
        return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *ends), *ends)

    def weights(*shape: int) -> tuple[str, str]:
        """Weights, and a bias in the scale of weights and inputs."""
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
    g.op("DequantizeLinear", g.op("QuantizeLinear", x, *ends), *ends, out="logits")
    g.output("logits", 1, 10)
    return g.model()
