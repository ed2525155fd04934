"""Run a decoder step by step on the host: in float64 as the reference, or in the hardware's arithmetic as the control.

The reference is ONNX's evaluator, which runs the model with all floats widened to float64. Weights with 4 or 8 bits
keep their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.backends.references.runners.node_evaluator import NodeEvaluator
from hil.controller.backends.references.runners.onnx import (
    format_evaluator_error,
    format_ort_error,
    make_evaluator,
    open_exact_session,
)
from hil.controller.backends.references.value_rounding import Names, Rounding
from hil.controller.models.importers.onnx import make_value_spec
from hil.controller.models.importers.onnx_nodes import iter_nodes, list_graphs
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.arithmetic import FLOAT32
from hil.core.stepped_program import SteppedProgram
from hil.core.steps import INPUTS, StepsPlan
from hil.core.tensors import Array, parse_dtype
from hil.errors import ReferenceFailed
from hil.formats.onnx_functions import inline_functions
from hil.formats.ort_values import to_ort

FLOAT64 = "float64"


def run_decoder(model: str, inputs: str, plan: str, arithmetic: str, output: str) -> None:
    """Generate tokens and write the outputs as tensors. Runs in an isolated process.

    Args:
        model: path of an ONNX model.
        inputs: directory with the inputs of the stepped program.
        plan: JSON of a :class:`StepsPlan`.
        arithmetic: ``float64``, or the arithmetic of the control.
        output: directory to write.

    Raises:
        ReferenceFailed: the model cannot be evaluated in this arithmetic.
    """
    from hil.controller.models.importers.onnx_data import load_with_data

    loaded = load_with_data(Path(model))
    if loaded.functions:
        loaded = inline_functions(loaded)
    program = SteppedProgram(_make_program(loaded, arithmetic), StepsPlan.from_json(json.loads(plan)))
    given = load_tensors(Path(inputs))
    # the reference's inputs are float64
    constant = [given[spec.name].astype(parse_dtype(spec.dtype), copy=False) for spec in program.inputs[len(INPUTS) :]]
    program.bind([*(given[name] for name in INPUTS), *constant])
    with np.errstate(all="ignore"):
        program.run()
        arrays = program.fetch()
    save_tensors(Path(output), dict(zip((spec.name for spec in program.outputs), arrays, strict=True)))


class _Steps:
    """Program for :class:`SteppedProgram` that calls a Python function with input name -> array."""

    def __init__(self, model: Any, run: Callable[[dict[str, Array]], Mapping[str, Any]]) -> None:
        weights = {one.name for one in model.graph.initializer}
        self.inputs = tuple(make_value_spec(one) for one in model.graph.input if one.name not in weights)
        self.outputs = tuple(make_value_spec(one) for one in model.graph.output)
        self.function = ""
        self._run = run

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Evaluate the model once."""
        made = self._run(dict(zip((spec.name for spec in self.inputs), inputs, strict=True)))
        return [made[spec.name] for spec in self.outputs]

    def to_array(self, place: int, value: Any) -> Array:
        """Return the value as an array."""
        return np.asarray(value)


def _make_program(model: Any, arithmetic: str) -> _Steps:
    if arithmetic == FLOAT64:
        with convert_foreign_errors(
            ReferenceFailed, "onnx's evaluator cannot load the model", error_text=format_evaluator_error
        ):
            widen_floats(model)
            evaluator = make_evaluator(model)

        def evaluate(given: dict[str, Array]) -> Mapping[str, Any]:
            with convert_foreign_errors(ReferenceFailed, "onnx's evaluator failed", error_text=format_evaluator_error):
                return dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))

        return _Steps(model, evaluate)
    if arithmetic == FLOAT32:
        with convert_foreign_errors(ReferenceFailed, "ONNX Runtime cannot load the model", error_text=format_ort_error):
            session = open_exact_session(Path(), model)
        names = [one.name for one in session.get_outputs()]

        def compute(given: dict[str, Array]) -> Mapping[str, Any]:
            with convert_foreign_errors(
                ReferenceFailed, "ONNX Runtime failed to run the model", error_text=format_ort_error
            ):
                values = session.run_with_ort_values(names, {name: to_ort(one) for name, one in given.items()})
                return dict(zip(names, (value.numpy() for value in values), strict=True))

        return _Steps(model, compute)
    rounding, nodes = Rounding(arithmetic, Names.from_model(model)), NodeEvaluator(model)
    return _Steps(model, lambda given: nodes.run(given, rounding))


def widen_floats(model: Any) -> None:
    """Change all float16, bfloat16 and float32 tensors and types of a ModelProto to float64, in place."""
    from onnx import TensorProto, numpy_helper

    narrow = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}

    def widen(tensor: Any) -> None:
        if tensor.data_type in narrow:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))

    for graph in list_graphs(model.graph):
        for tensor in graph.initializer:
            widen(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in narrow:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in iter_nodes(model.graph.node):
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in narrow:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t"):
                widen(attribute.t)
        if node.op_type == "Constant":
            _widen_constant(node)


def _widen_constant(node: Any) -> None:
    """Replace the float attributes of a Constant node by a float64 tensor."""
    from onnx import helper, numpy_helper

    for attribute in list(node.attribute):
        if attribute.name in ("value_float", "value_floats"):
            values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            tensor = numpy_helper.from_array(np.asarray(values, np.float64))
            node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute("value", tensor))
