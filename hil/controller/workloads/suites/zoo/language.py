"""Attention, embeddings, and networks of dense layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hil.controller.workloads.suites.zoo.graph import Graph


def _dense(g: Graph, x: str, ins: int, outs: int, out: str = "") -> str:
    return g.op(
        "Add", g.op("MatMul", x, g.weight(ins, outs, scale=(3 / ins) ** 0.5)), g.weight(outs, scale=0.1), out=out
    )


def _layer_norm(g: Graph, x: str, width: int, out: str = "") -> str:
    ones = g.const(np.linspace(0.9, 1.1, width, dtype=np.float32))
    return g.op("LayerNormalization", x, ones, g.weight(width, scale=0.1), axis=-1, epsilon=1e-5, out=out)


def _heads(g: Graph, x: str, heads: int, size: int, perm: list[int]) -> str:
    """[batch, time, heads * size] as [batch, heads, ...]; the sizes of batch and time are kept, whatever they are."""
    return g.op("Transpose", g.op("Reshape", x, g.const([0, 0, heads, size])), perm=perm)


def _attention(g: Graph, x: str, width: int, heads: int, mask: str = "") -> str:
    size = width // heads
    query = _heads(g, _dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    key = _heads(g, _dense(g, x, width, width), heads, size, [0, 2, 3, 1])
    value = _heads(g, _dense(g, x, width, width), heads, size, [0, 2, 1, 3])
    scores = g.op("Div", g.op("MatMul", query, key), g.const(math.sqrt(size)))
    if mask:
        scores = g.op("Where", mask, scores, g.const(-1e9))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    joined = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([0, 0, width]))
    return _dense(g, joined, width, width)


def _gelu(g: Graph, x: str) -> str:
    """GELU in its parts, as exporters of older opsets write it."""
    error = g.op("Erf", g.op("Div", x, g.const(math.sqrt(2))))
    return g.op("Mul", g.op("Mul", x, g.op("Add", error, g.const(1.0))), g.const(0.5))


def _block(g: Graph, x: str, width: int, heads: int, mask: str = "") -> str:
    """A transformer block, normalised before each half."""
    x = g.op("Add", x, _attention(g, _layer_norm(g, x, width), width, heads, mask))
    wide = _gelu(g, _dense(g, _layer_norm(g, x, width), width, width * 4))
    return g.op("Add", x, _dense(g, wide, width * 4, width))


def transformer() -> Any:
    """Two blocks of an encoder over patches of an image, as in a vision transformer."""
    g = Graph("transformer")
    patches = g.op(
        "Conv", g.input("image", 1, 3, 16, 16), g.weight(32, 3, 4, 4), g.weight(32, scale=0.1), strides=[4, 4]
    )
    tokens = g.op("Transpose", g.op("Reshape", patches, g.const([1, 32, 16])), perm=[0, 2, 1])
    x = g.op("Add", tokens, g.weight(1, 16, 32, scale=0.5))
    for _ in range(2):
        x = _block(g, x, 32, 4)
    x = g.op("ReduceMean", _layer_norm(g, x, 32), axes=[1], keepdims=0)
    _dense(g, x, 32, 10, out="logits")
    g.output("logits", 1, 10)
    return g.model()


def decoder() -> Any:
    """A language model: embedded tokens and positions, a causal mask, logits by the embedding's own weights."""
    g = Graph("decoder")
    table = g.weight(50, 24, scale=0.5)
    x = g.op("Add", g.op("Gather", table, g.input("tokens", 1, 12, dtype="int64")), g.weight(1, 12, 24, scale=0.5))
    ones = g.const(np.ones((12, 12), np.int64))
    mask = g.op("Cast", g.op("Trilu", ones, upper=0), to=9)
    x = _block(g, x, 24, 3, mask)
    x = _layer_norm(g, x, 24)
    g.op("MatMul", x, g.op("Transpose", table, perm=[1, 0]), out="logits")
    g.output("logits", 1, 12, 50)
    return g.model()


def dynamic_attention() -> Any:
    """A block for any batch and any length: shapes are computed as the model runs."""
    g = Graph("dynamic_attention")
    x = g.input("features", "batch", "time", 16)
    x = _block(g, x, 16, 2)
    time = g.op("Gather", g.op("Shape", x), g.const(1))
    steps = g.op("Cast", g.op("Range", g.const(0), time, g.const(1)), to=1)
    weights = g.op("Reshape", g.op("Exp", g.op("Neg", steps)), g.const([1, -1, 1]))
    g.op("ReduceSum", g.op("Mul", x, weights), g.const([1]), keepdims=0, out="summary")
    g.output("summary", "batch", 16)
    return g.model()


def mlp() -> Any:
    """Dense layers with ReLU, and probabilities."""
    g = Graph("mlp")
    x = g.input("features", 4, 20)
    for ins, outs in ((20, 32), (32, 32)):
        x = g.op("Relu", g.op("Gemm", x, g.weight(outs, ins), g.weight(outs, scale=0.1), transB=1))
    x = g.op("Gemm", x, g.weight(5, 32), g.weight(5, scale=0.1), transB=1)
    g.op("Softmax", x, axis=1, out="probabilities")
    g.output("probabilities", 4, 5)
    return g.model()


def mixer() -> Any:
    """An MLP mixer: layer norm and GELU as operators of their own, across tokens and across channels in turn."""
    g = Graph("mixer", opset=20)
    x = g.input("tokens", 1, 8, 16)
    for _ in range(2):
        y = g.op("Transpose", _layer_norm(g, x, 16), perm=[0, 2, 1])
        y = _dense(g, g.op("Gelu", _dense(g, y, 8, 16)), 16, 8)
        x = g.op("Add", x, g.op("Transpose", y, perm=[0, 2, 1]))
        y = _dense(g, g.op("Gelu", _dense(g, _layer_norm(g, x, 16), 16, 32), approximate="tanh"), 32, 16)
        x = g.op("Add", x, y)
    _layer_norm(g, x, 16, out="mixed")
    g.output("mixed", 1, 8, 16)
    return g.model()


def recommender() -> Any:
    """Embeddings of several things, their products with each other, and dense features: three inputs, two outputs."""
    g = Graph("recommender")
    user = g.op("Gather", g.weight(40, 8, scale=0.5), g.input("user", 4, dtype="int64"))
    seen = g.op("Gather", g.weight(60, 8, scale=0.5), g.input("items", 4, 6, dtype="int64"))
    bag = g.op("ReduceMean", seen, axes=[1], keepdims=0, out="bag")
    product = g.op("ReduceSum", g.op("Mul", user, bag), g.const([1]), keepdims=1)
    x = g.op("Concat", user, bag, product, g.input("features", 4, 5), axis=1)
    x = g.op("Relu", g.op("Gemm", x, g.weight(22, 16), g.weight(16, scale=0.1)))
    g.op("Sigmoid", g.op("Gemm", x, g.weight(16, 1), g.weight(1, scale=0.1)), out="score")
    g.output("score", 4, 1)
    g.output(bag, 4, 8)
    return g.model()
