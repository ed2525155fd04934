"""A decoder with integer weights, as a step program and as an ONNX model. All its results are exact in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.stepped_program import SteppedProgram
from hil.core.steps import INPUTS, StepRule, StepsPlan
from hil.core.tensors import Array, TensorSpec

VOCABULARY = 7
_WIDTH = 4
_TABLE = np.random.default_rng(3).integers(-3, 4, (VOCABULARY, _WIDTH)).astype(np.float32)
_HEAD = np.random.default_rng(4).integers(-3, 4, (_WIDTH, VOCABULARY)).astype(np.float32)
_TURN = np.float32([1, 2, -1, 3])


def logits_of(tokens: Sequence[int]) -> Array:
    """Return the logits of all positions: the sum of the entries up to the position, times the head."""
    return np.asarray(np.cumsum(_entries(np.array(tokens), np.arange(len(tokens))), 0) @ _HEAD)


def _entries(tokens: Array, positions: Array) -> Array:
    return np.asarray(_TABLE[tokens] + (positions[:, None] % 5).astype(np.float32) * _TURN)


class SummingProgram:
    """Decoder that adds up the entries of its cache.

    Inputs: ids int64 [1, sequence], positions int64 [1, sequence], cache float32 [1, past, 4], and for a static cache
    mask bool [1, 1, sequence, slots].

    Args:
        slots: size of a static cache; 0 is a growing cache.
        last: return only the last row of logits.
    """

    function = "main"

    def __init__(self, slots: int = 0, *, last: bool = False, tokens: int | None = None) -> None:
        ids = (1, tokens)
        self.slots, self.last = slots, last
        self.inputs: tuple[TensorSpec, ...] = (
            TensorSpec("ids", "int64", ids),
            TensorSpec("positions", "int64", ids),
            TensorSpec("cache", "float32", (1, slots or "past", _WIDTH)),
        )
        if slots:
            self.inputs += (TensorSpec("mask", "bool", (1, 1, tokens, slots)),)
        self.outputs = (
            TensorSpec("logits", "float32", (1, tokens, VOCABULARY)),
            TensorSpec("new_cache", "float32", (1, slots or "total", _WIDTH)),
        )
        self.renewed = 0
        self.fed: list[list[Array]] = []

    def renew(self) -> None:
        self.renewed += 1

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        for spec, value in zip(self.inputs, inputs, strict=True):
            assert spec.accepts(value.dtype.name, value.shape), (spec, value.shape)
        self.fed.append([np.array(value) for value in inputs])
        ids, positions, cache, *mask = inputs
        entries = _entries(ids[0], positions[0])
        if self.slots:
            kept = cache.copy()
            kept[0, positions[0]] = entries
            seen = mask[0][0, 0]
        else:
            kept = np.concatenate([cache, entries[None]], 1)
            seen = np.arange(kept.shape[1]) <= positions[0][:, None]
        rows = seen.astype(np.float32) @ kept[0] @ _HEAD
        return [rows[None, -1:] if self.last else rows[None], kept]

    def to_array(self, place: int, value: Any) -> Array:
        return np.asarray(value)


def plan_of(program: SummingProgram, steps: int, **more: Any) -> StepsPlan:
    """Return a plan for the program."""
    rules = [(0, StepRule.TOKENS), (1, StepRule.POSITIONS), (3, StepRule.MASK)][: len(program.inputs) - 1]
    shapes = ((1, program.slots, _WIDTH),)
    return StepsPlan(tuple(rules), ((2, 1),), 0, steps, bound=program.slots, shapes=shapes, **more)


def run_summing(plan: StepsPlan, inputs: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of a generation with the decoder: logits, positions, tokens, cache."""
    stepped = SteppedProgram(SummingProgram(), plan)
    stepped.bind([inputs[name] for name in INPUTS])
    stepped.run()
    return stepped.fetch()


def save_summing_model(path: Path) -> Path:
    """Write the decoder with a growing cache as an ONNX model."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, dtype: int, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    constants = {"table": _TABLE, "head": _HEAD, "turn": _TURN, "five": np.int64(5), "axes": np.array([2], np.int64)}
    nodes = [
        ("Gather", ["table", "input_ids"], "rows", {}),
        ("Mod", ["position_ids", "five"], "phase", {}),
        ("Cast", ["phase"], "turns", {"to": TensorProto.FLOAT}),
        ("Unsqueeze", ["turns", "axes"], "column", {}),
        ("Mul", ["column", "turn"], "shift", {}),
        ("Add", ["rows", "shift"], "entries", {}),
        ("Concat", ["past.0.key", "entries"], "present.0.key", {"axis": 1}),
        ("Shape", ["present.0.key"], "total", {"start": 1, "end": 2}),
        ("Squeeze", ["total"], "count", {}),
        ("Range", ["zero", "count", "one"], "slots", {}),
        ("Unsqueeze", ["position_ids", "axes"], "own", {}),
        ("LessOrEqual", ["slots", "own"], "visible", {}),
        ("Cast", ["visible"], "seen", {"to": TensorProto.FLOAT}),
        ("MatMul", ["seen", "present.0.key"], "sums", {}),
        ("MatMul", ["sums", "head"], "logits", {}),
    ]
    constants |= {"zero": np.int64(0), "one": np.int64(1)}
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **more) for kind, inputs, output, more in nodes],
        "summing",
        [
            value("input_ids", TensorProto.INT64, [1, "sequence"]),
            value("position_ids", TensorProto.INT64, [1, "sequence"]),
            value("past.0.key", TensorProto.FLOAT, [1, "past", _WIDTH]),
        ],
        [
            value("logits", TensorProto.FLOAT, [1, "sequence", VOCABULARY]),
            value("present.0.key", TensorProto.FLOAT, [1, "total", _WIDTH]),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def step_function() -> str:
    """Return a function of MLIR: the decoder with a static cache of 8 slots, one token per call."""
    table, head, turn = (_dense(array) for array in (_TABLE, _HEAD, _TURN[None]))
    return f"""
func.func @step(%input_ids: tensor<1x1xi64>, %position_ids: tensor<1x1xi64>, %past: tensor<1x8x4xf32>)
    -> (tensor<1x1x{VOCABULARY}xf32>, tensor<1x8x4xf32>) {{
  %table = stablehlo.constant dense<{table}> : tensor<{VOCABULARY}x4xf32>
  %head = stablehlo.constant dense<{head}> : tensor<4x{VOCABULARY}xf32>
  %turn = stablehlo.constant dense<{turn}> : tensor<1x4xf32>
  %zero = stablehlo.constant dense<0> : tensor<i64>
  %none = stablehlo.constant dense<0.0> : tensor<f32>
  %five = stablehlo.constant dense<5> : tensor<1x1xi64>
  %id = stablehlo.reshape %input_ids : (tensor<1x1xi64>) -> tensor<i64>
  %at = stablehlo.reshape %position_ids : (tensor<1x1xi64>) -> tensor<i64>
  %row = stablehlo.dynamic_slice %table, %id, %zero, sizes = [1, 4]
    : (tensor<{VOCABULARY}x4xf32>, tensor<i64>, tensor<i64>) -> tensor<1x4xf32>
  %rest = stablehlo.remainder %position_ids, %five : tensor<1x1xi64>
  %phase = stablehlo.convert %rest : (tensor<1x1xi64>) -> tensor<1x1xf32>
  %phases = stablehlo.broadcast_in_dim %phase, dims = [0, 1] : (tensor<1x1xf32>) -> tensor<1x4xf32>
  %shift = stablehlo.multiply %phases, %turn : tensor<1x4xf32>
  %entry = stablehlo.add %row, %shift : tensor<1x4xf32>
  %new = stablehlo.reshape %entry : (tensor<1x4xf32>) -> tensor<1x1x4xf32>
  %present = stablehlo.dynamic_update_slice %past, %new, %zero, %at, %zero
    : (tensor<1x8x4xf32>, tensor<1x1x4xf32>, tensor<i64>, tensor<i64>, tensor<i64>) -> tensor<1x8x4xf32>
  %sum = stablehlo.reduce(%present init: %none) applies stablehlo.add across dimensions = [1]
    : (tensor<1x8x4xf32>, tensor<f32>) -> tensor<1x4xf32>
  %product = stablehlo.dot %sum, %head : (tensor<1x4xf32>, tensor<4x{VOCABULARY}xf32>) -> tensor<1x{VOCABULARY}xf32>
  %logits = stablehlo.reshape %product : (tensor<1x{VOCABULARY}xf32>) -> tensor<1x1x{VOCABULARY}xf32>
  return %logits, %present : tensor<1x1x{VOCABULARY}xf32>, tensor<1x8x4xf32>
}}
"""


def stale_function() -> str:
    """Return :func:`step_function` with the sum of the entries in a global variable, which no call clears."""
    kept = "util.global private mutable @kept = dense<0.0> : tensor<1x4xf32>\n"
    right = step_function()
    start, end = right.index("  %sum ="), right.index("  %product =")
    wrong = """  %old = util.global.load @kept : tensor<1x4xf32>
  %sum = stablehlo.add %old, %entry : tensor<1x4xf32>
  util.global.store %sum, @kept : tensor<1x4xf32>
"""
    return f"{kept}{right[:start]}{wrong}{right[end:]}"


def prompt_function() -> str:
    """Return a function of MLIR: the decoder of :func:`step_function` for two tokens of a prompt, without logits."""
    table, turn = _dense(_TABLE), _dense(_TURN[None])
    rows, types = [], "tensor<1x1xi64>"
    for place in range(2):
        at = f"[0:1, {place}:{place + 1}] : (tensor<1x2xi64>) -> {types}"
        rows.append(f"""
  %id{place} = stablehlo.slice %input_ids {at}
  %id{place}s = stablehlo.reshape %id{place} : ({types}) -> tensor<i64>
  %row{place} = stablehlo.dynamic_slice %table, %id{place}s, %zero, sizes = [1, 4]
    : (tensor<{VOCABULARY}x4xf32>, tensor<i64>, tensor<i64>) -> tensor<1x4xf32>""")
    return f"""
func.func @prefill(%position_ids: tensor<1x2xi64>, %input_ids: tensor<1x2xi64>, %past: tensor<1x8x4xf32>)
    -> tensor<1x8x4xf32> {{
  %table = stablehlo.constant dense<{table}> : tensor<{VOCABULARY}x4xf32>
  %turn = stablehlo.constant dense<{turn}> : tensor<1x4xf32>
  %zero = stablehlo.constant dense<0> : tensor<i64>
  %five = stablehlo.constant dense<5> : tensor<1x2xi64>{"".join(rows)}
  %rows = stablehlo.concatenate %row0, %row1, dim = 0 : (tensor<1x4xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
  %first = stablehlo.slice %position_ids [0:1, 0:1] : (tensor<1x2xi64>) -> {types}
  %at = stablehlo.reshape %first : ({types}) -> tensor<i64>
  %rest = stablehlo.remainder %position_ids, %five : tensor<1x2xi64>
  %phase = stablehlo.convert %rest : (tensor<1x2xi64>) -> tensor<1x2xf32>
  %column = stablehlo.reshape %phase : (tensor<1x2xf32>) -> tensor<2x1xf32>
  %shift = stablehlo.dot %column, %turn : (tensor<2x1xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
  %entries = stablehlo.add %rows, %shift : tensor<2x4xf32>
  %new = stablehlo.reshape %entries : (tensor<2x4xf32>) -> tensor<1x2x4xf32>
  %present = stablehlo.dynamic_update_slice %past, %new, %zero, %at, %zero
    : (tensor<1x8x4xf32>, tensor<1x2x4xf32>, tensor<i64>, tensor<i64>, tensor<i64>) -> tensor<1x8x4xf32>
  return %present : tensor<1x8x4xf32>
}}
"""


def _dense(array: Array) -> str:
    return str(array.astype(float).tolist())
