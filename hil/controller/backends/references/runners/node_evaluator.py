"""Evaluate an ONNX model node by node, and round all operands and results to an arithmetic.

Each node is a separate ONNX Runtime session without optimization. The kernel computes in float32 on rounded operands,
and the results are rounded. Nodes with subgraphs are evaluated here, so that values inside are rounded too. This module
shares no code with :mod:`hil.formats.onnx_arithmetic`, which rounds for simulated boards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.backends.references.runners.onnx import open_exact_session
from hil.controller.backends.references.value_rounding import Exact
from hil.controller.models.importers.onnx_nodes import iter_nodes, list_graphs
from hil.controller.storage.screen.texts import get_first_line
from hil.core.tensors import Array, get_dtype_name
from hil.errors import ReferenceFailed, UsageError
from hil.formats.onnx_file import iter_subgraphs
from hil.formats.ort_values import ONNX_TYPES, copy_from_ort, parse_type, to_ort

Env = dict[str, Array]
_MAX_TRIPS = 10_000
# Operators with discontinuous float results. Non-float results of float operands (a mask, an index) are also
# discontinuous.
_JUMPING = frozenset({"Floor", "Ceil", "Round", "Sign", "Mod", "Hardmax", "Shrink", "ThresholdedRelu"})
# The model intends the steps of these operators. Different results count as rounding, not as a jump.
_QUANTIZING = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_OTHER_PATH = "rounding changes the operators that the model runs, or their shapes"
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class _Decision:
    """Result of a node in one run."""

    node: int  # id() of the node; the evaluator keeps the nodes alive
    operands: tuple[tuple[int, ...], ...]  # the operands' shapes
    result: Array


class Decisions:
    """Results of discontinuous operators in one run, in order.

    Other runs use these decisions in place of their own results.

    A decision applies only to the same node with operands of the same shapes. If they differ, the run takes another
    path through the model and cannot be compared with the first run.
    """

    def __init__(self) -> None:
        self._made: list[_Decision] = []
        self._next: int | None = None

    def __bool__(self) -> bool:
        return bool(self._made)

    def replay(self) -> Decisions:
        """Return a copy that replays the decisions from the start."""
        again = Decisions()
        again._made, again._next = self._made, 0
        return again

    def decide(self, node: Any, operands: Env, result: Array) -> Array:
        """Record a node's result and return it, or return the recorded result when replaying.

        Raises:
            ReferenceFailed: the run takes another path than the recorded run.
        """
        floats = any(get_dtype_name(one.dtype) in _FLOATS for one in operands.values())
        is_float = get_dtype_name(result.dtype) in _FLOATS
        if not floats or node.op_type in _QUANTIZING or (is_float and node.op_type not in _JUMPING):
            return result
        made = _Decision(id(node), tuple(one.shape for one in operands.values()), result)
        if self._next is None:
            self._made.append(made)
            return result
        held = self._made[self._next] if self._next < len(self._made) else None
        if held is None or (held.node, held.operands) != (made.node, made.operands):
            raise ReferenceFailed(f"{_OTHER_PATH} at {node.op_type} {node.name!r}")
        self._next += 1
        return held.result

    def check_all_taken(self) -> None:
        """Raise ReferenceFailed if a run used fewer decisions than were recorded."""
        if self._next is not None and self._next < len(self._made):
            raise ReferenceFailed(_OTHER_PATH)


class NodeEvaluator:
    """Evaluator of an ONNX model with different roundings. The sessions of nodes are cached."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Keep references to the protobuf objects, so that the results of id() stay unique.
        self._kept = [*iter_nodes(model.graph.node), *list_graphs(model.graph)]
        self._sessions: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}
        self._constants: dict[int, Env] = {}

    def run(self, given: Mapping[str, Array], rounding: Exact, decisions: Decisions | None = None) -> Env:
        """Return the outputs by name. Raises ReferenceFailed if a node cannot be evaluated."""
        self._decisions = Decisions() if decisions is None else decisions
        graph = self._model.graph
        env = {name: rounding.value(array, name) for name, array in given.items()}
        outputs = self._run_graph(graph, env, rounding)
        self._decisions.check_all_taken()
        return dict(zip([value.name for value in graph.output], outputs, strict=True))

    def _run_graph(self, graph: Any, env: Env, rounding: Exact) -> list[Array]:
        env = {**self._read_initializers(graph), **env}
        last = _find_last_uses(graph)
        for number, node in enumerate(graph.node):
            results = self._run_node(node, env, rounding)
            for name, result in zip(node.output, results, strict=False):
                if name:
                    env[name] = rounding.value(result, name)
            for name in last.get(number, ()):
                env.pop(name, None)
        return [env[value.name] for value in graph.output]

    def _read_initializers(self, graph: Any) -> Env:
        from onnx import numpy_helper

        if id(graph) not in self._constants:
            self._constants[id(graph)] = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        return self._constants[id(graph)]

    def _run_node(self, node: Any, env: Env, rounding: Exact) -> Sequence[Array]:
        if node.op_type in ("If", "Loop", "Scan") and not node.domain:
            evaluate = {"If": self._run_if, "Loop": self._run_loop, "Scan": self._run_scan}[node.op_type]
            return evaluate(node, env, rounding)
        if any(iter_subgraphs(node)):
            raise ReferenceFailed(
                f"unsupported operator {node.op_type}: hil can round values only in the subgraphs of If, Loop and Scan"
            )
        names = [name for name in node.input if name]
        operands = {
            name: rounding.round_operand(env[name], node, place) for place, name in enumerate(node.input) if name
        }
        session, outputs = self._open_session(node, {name: operands[name] for name in names})
        try:
            values = session.run_with_ort_values(outputs, {name: to_ort(one) for name, one in operands.items()})
        except UsageError:
            raise
        except Exception as error:
            raise ReferenceFailed(f"cannot evaluate {node.op_type} {node.name!r}: {get_first_line(error)}") from error
        types = {one.name: one.type for one in session.get_outputs()}
        arrays = [self._check_array(value, types[name], node) for name, value in zip(outputs, values, strict=True)]
        made = iter([self._decisions.decide(node, operands, one) for one in arrays])
        return [next(made) if name else np.empty(0) for name in node.output]

    @staticmethod
    def _check_array(value: Any, kind: str, node: Any) -> Array:
        dtype = parse_type(kind)
        if dtype is None:
            raise ReferenceFailed(f"{node.op_type} {node.name!r} returns a {kind}, which hil cannot round")
        return copy_from_ort(value, dtype)

    def _open_session(self, node: Any, operands: Env) -> tuple[Any, list[str]]:
        """Return a session that runs a single node, and the output names."""
        import onnx
        from onnx import helper

        key = (id(node), *(get_dtype_name(one.dtype) for one in operands.values()))
        if key not in self._sessions:
            inputs = [
                helper.make_tensor_value_info(name, ONNX_TYPES[get_dtype_name(one.dtype)], None)
                for name, one in operands.items()
            ]
            outputs = [name for name in node.output if name]
            empty = [onnx.ValueInfoProto(name=name) for name in outputs]
            graph = helper.make_graph([node], "node", inputs, empty)
            version = min(self._model.ir_version, onnx.IR_VERSION)
            model = helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=version)
            try:
                # Use one thread, because idle threads in hundreds of sessions would occupy all cores.
                session = open_exact_session(Path(), model, threads=1)
            except Exception as error:
                text = f"cannot evaluate {node.op_type} {node.name!r}: {get_first_line(error)}"
                raise ReferenceFailed(text) from error
            self._sessions[key] = session, outputs
        return self._sessions[key]

    def _run_if(self, node: Any, env: Env, rounding: Exact) -> list[Array]:
        chosen = "then_branch" if bool(np.asarray(env[node.input[0]]).reshape(-1)[0]) else "else_branch"
        return self._run_graph(_get_attribute(node, chosen).g, dict(env), rounding)

    def _run_loop(self, node: Any, env: Env, rounding: Exact) -> list[Array]:
        body = _get_attribute(node, "body").g
        most = int(env[node.input[0]].reshape(-1)[0]) if node.input[0] else sys.maxsize
        going = bool(env[node.input[1]].reshape(-1)[0]) if len(node.input) > 1 and node.input[1] else True
        state = [rounding.round_operand(env[name], node, place) for place, name in enumerate(node.input) if place > 1]
        names = [value.name for value in body.input]
        scanned: list[list[Array]] = [[] for _ in range(len(body.output) - 1 - len(state))]
        trip = 0
        while going and trip < min(most, _MAX_TRIPS):
            given = dict(zip(names, [np.int64(trip).reshape(()), np.array(going), *state], strict=True))
            condition, *made = self._run_graph(body, {**env, **given}, rounding)
            state, going = made[: len(state)], bool(condition.reshape(-1)[0])
            for rows, row in zip(scanned, made[len(state) :], strict=True):
                rows.append(row)
            trip += 1
        if going and trip < most:
            raise ReferenceFailed(f"Loop {node.name!r} exceeds {_MAX_TRIPS} iterations")
        if not trip and scanned:
            raise ReferenceFailed(f"Loop {node.name!r} runs 0 iterations: the shapes of the scan outputs are unknown")
        return [*state, *(np.stack(rows) for rows in scanned)]

    def _run_scan(self, node: Any, env: Env, rounding: Exact) -> list[Array]:
        if any(attribute.name.endswith(("axes", "directions")) for attribute in node.attribute):
            raise ReferenceFailed(
                f"Scan {node.name!r} has axes or directions: hil's node evaluator does not support these attributes"
            )
        body, count = _get_attribute(node, "body").g, _get_attribute(node, "num_scan_inputs").i
        given = [rounding.round_operand(env[name], node, place) for place, name in enumerate(node.input)]
        state, sequences = given[: len(given) - count], given[len(given) - count :]
        names = [value.name for value in body.input]
        scanned: list[list[Array]] = [[] for _ in range(len(body.output) - len(state))]
        for rows in zip(*sequences, strict=True):
            inner = dict(zip(names, [*state, *map(np.asarray, rows)], strict=True))
            made = self._run_graph(body, {**env, **inner}, rounding)
            state = made[: len(state)]
            for kept, row in zip(scanned, made[len(state) :], strict=True):
                kept.append(row)
        return [*state, *(np.stack(rows) for rows in scanned)]


def _get_attribute(node: Any, name: str) -> Any:
    return next(one for one in node.attribute if one.name == name)


def _iter_used_names(node: Any) -> Iterator[str]:
    yield from node.input
    for graph in iter_subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from _iter_used_names(inner)


def _find_last_uses(graph: Any) -> dict[int, list[str]]:
    """Return node number -> values whose last use is this node."""
    kept = {value.name for value in graph.output}
    last = {name: number for number, node in enumerate(graph.node) for name in (*_iter_used_names(node), *node.output)}
    found: dict[int, list[str]] = {}
    for name, number in last.items():
        if name and name not in kept:
            found.setdefault(number, []).append(name)
    return found
