"""Recurrent networks, sound, and control flow."""

from __future__ import annotations

from typing import Any

import numpy as np

from hil.controller.workloads.suites.zoo.graph import Graph


def _recurrent(
    g: Graph, kind: str, x: str, ins: int, hidden: int, gates: int, out: tuple[str, ...], **more: Any
) -> str:
    """A recurrent operator over [time, batch, ins]; its first output is [time, directions, batch, hidden]."""
    ways = 2 if more.get("direction") == "bidirectional" else 1
    weight, again = g.weight(ways, gates * hidden, ins, scale=0.4), g.weight(ways, gates * hidden, hidden, scale=0.4)
    bias = g.weight(ways, 2 * gates * hidden, scale=0.2)
    return g.ops(kind, x, weight, again, bias, out=out, hidden_size=hidden, **more)[0]


def lstm() -> Any:
    """An LSTM over a sequence, of which the last state is classified."""
    g = Graph("lstm")
    _recurrent(g, "LSTM", g.input("sequence", 10, 1, 8), 8, 16, 4, ("states", "last", "cell"))
    x = g.op("Squeeze", "last", g.const([0]))
    g.op("Gemm", x, g.weight(6, 16), g.weight(6, scale=0.1), transB=1, out="logits")
    g.output("logits", 1, 6)
    g.output("cell", 1, 1, 16)
    return g.model()


def gru() -> Any:
    """Two GRUs, one on top of the other; batch 2."""
    g = Graph("gru")
    x = _recurrent(g, "GRU", g.input("sequence", 8, 2, 6), 6, 12, 3, ("", ""), linear_before_reset=1)
    x = _recurrent(g, "GRU", g.op("Squeeze", x, g.const([1])), 12, 12, 3, ("", "last"), linear_before_reset=1)
    g.op("Squeeze", x, g.const([1]), out="states")
    g.output("states", 8, 2, 12)
    g.output("last", 1, 2, 12)
    return g.model()


def bidirectional_lstm() -> Any:
    """A tagger: an LSTM both ways, and a label for each step."""
    g = Graph("bidirectional_lstm")
    embedded = g.op("Gather", g.weight(30, 8, scale=0.5), g.input("tokens", 9, 1, dtype="int64"))
    x = _recurrent(g, "LSTM", embedded, 8, 8, 4, ("", "", ""), direction="bidirectional")
    x = g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3]), g.const([9, 16]))
    x = g.op("Gemm", x, g.weight(16, 5, scale=0.4), g.weight(5, scale=0.1))
    g.op("LogSoftmax", x, axis=1, out="labels")
    g.output("labels", 9, 5)
    return g.model()


def wavenet() -> Any:
    """Dilated 1-D convolutions over sound, gated, with residuals and skips."""
    g = Graph("wavenet")
    x = g.op("Conv", g.input("sound", 1, 1, 64), g.weight(8, 1, 1), g.weight(8, scale=0.1))
    skips = []
    for dilation in (1, 2, 4):
        pads = [2 * dilation, 0]  # nothing of what is to come
        ends = [
            g.op("Conv", x, g.weight(8, 8, 3), g.weight(8, scale=0.1), dilations=[dilation], pads=pads)
            for _ in range(2)
        ]
        y = g.op("Mul", g.op("Tanh", ends[0]), g.op("Sigmoid", ends[1]))
        skips.append(g.op("Conv", y, g.weight(8, 8, 1), g.weight(8, scale=0.1)))
        x = g.op("Add", x, g.op("Conv", y, g.weight(8, 8, 1), g.weight(8, scale=0.1)))
    x = g.op("Relu", g.op("Sum", *skips))
    g.op("Conv", x, g.weight(4, 8, 1), g.weight(4, scale=0.1), out="next")
    g.output("next", 1, 4, 64)
    return g.model()


def branches() -> Any:
    """An If whose branches differ in depth; which one runs depends on the input's mean."""
    g = Graph("branches")
    x = g.input("features", 2, 8)
    w1, w2, w3 = g.weight(8, 8), g.weight(8, 4), g.weight(8, 4)
    deep = g.body("deep")
    deep.op("MatMul", deep.op("Tanh", deep.op("MatMul", x, w1)), w2, out="deep_out")
    deep.output("deep_out", 2, 4)
    flat = g.body("flat")
    flat.op("MatMul", x, w3, out="flat_out")
    flat.output("flat_out", 2, 4)
    high = g.op("Greater", g.op("ReduceMean", x, keepdims=0), g.const(0.0))
    chosen = g.op("If", high, then_branch=deep.proto(), else_branch=flat.proto())
    g.op("Softplus", chosen, out="answer")
    g.output("answer", 2, 4)
    return g.model()


def loop() -> Any:
    """Newton's method for a square root in a Loop: it counts, and ends early when it is near enough."""
    g = Graph("loop")
    x = g.op("Add", g.op("Abs", g.input("numbers", 6)), g.const(0.5))
    body = g.body("step")
    body.input("round", dtype="int64")
    body.input("go_on", dtype="bool")
    guess = body.input("guess", 6)
    body.op("Mul", body.op("Add", guess, body.op("Div", x, guess)), body.const(0.5), out="better")
    change = body.op("ReduceMax", body.op("Abs", body.op("Sub", "better", guess)), keepdims=0)
    body.op("Greater", change, body.const(1e-3), out="still")
    body.output("still", dtype="bool")
    body.output("better", 6)
    g.ops("Loop", g.const(8), g.const(np.bool_(True)), x, out=("root",), body=body.proto())
    g.output("root", 6)
    return g.model()


def scan() -> Any:
    """A recurrent cell written as a Scan over time, with the mean of all before as its state."""
    g = Graph("scan")
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
    return g.model()
