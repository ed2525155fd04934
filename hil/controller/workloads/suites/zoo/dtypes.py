"""Arithmetic that is not float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from hil.controller.workloads.suites.zoo.graph import Graph


def _small_net(name: str, dtype: str) -> Any:
    """Dense layers around a residual in another dtype, in and out of it."""
    g = Graph(name, dtype=dtype)
    x = g.input("features", 4, 16)
    y = g.op("Relu", g.op("Add", g.op("MatMul", x, g.weight(16, 16)), g.weight(16, scale=0.1)))
    x = g.op("Add", x, y)
    g.op("MatMul", g.op("Tanh", x), g.weight(16, 8), out="answer")
    g.output("answer", 4, 8)
    return g.model()


def half() -> Any:
    """float16 throughout."""
    return _small_net("half", "float16")


def bfloat16() -> Any:
    """bfloat16 throughout, which ONNX Runtime's CPU provider does not multiply: other references answer."""
    return _small_net("bfloat16", "bfloat16")


def double() -> Any:
    """float64 throughout."""
    return _small_net("double", "float64")


def integers() -> Any:
    """int64 arithmetic: hashes of tokens, remainders, shifts of sign, comparisons, and the counts of what is found."""
    g = Graph("integers")
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
    return g.model()


def beam_step() -> Any:
    """A step of beam search: scores joined with those so far, the best chosen, and where each came from."""
    g = Graph("beam_step")
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
    return g.model()
