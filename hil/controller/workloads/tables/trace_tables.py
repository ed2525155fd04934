"""Tables of traces: a row per call, and a row per tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.records.base import parse_number
from hil.controller.records.outputs import StoredComparison
from hil.controller.records.trace import ComparedCall
from hil.controller.workloads.suites.reports.tables import ResultTable
from hil.controller.workloads.traces.stored import read_comparison
from hil.controller.workloads.traces.trace import ModuleCall, Trace, list_arrays
from hil.core.tensors import Array, get_dtype_name

_CALL = ("trace", "module", "backend", "name", "call", "method")
_CALLS = (*_CALL, "model", "function", "runtime", "rtol", "atol", "inputs", "outputs", "assigned", "outcome", "reason")
_COMPARED = ("passed", "mismatches", "max_abs", "max_rel", "cosine")
_TENSORS = (*_CALL, "kind", "tensor", "dtype", "shape", "elements", "min", "max", "mean", *_COMPARED)


def make_call_table(traces: Mapping[str, Path]) -> ResultTable:
    """Make a row per call. Outcomes are empty if no comparison of the trace is stored.

    Args:
        traces: name -> directory of the trace.
    """
    rows = []
    for head, call, compared in _iter_calls(traces):
        program = call.program
        rows.append(
            [
                *head,
                program and program.model.name,
                program and program.function,
                program and program.runtime,
                call.rtol,
                call.atol,
                len(list_arrays(call.inputs)),
                len(list_arrays(call.outputs)),
                len(call.assigned),
                compared and compared.outcome.value,
                compared and _find_reason(compared),
            ]
        )
    return ResultTable(_CALLS, rows)


def make_tensor_table(traces: Mapping[str, Path]) -> ResultTable:
    """Make a row per input, output and assigned variable of each call, with statistics of its values.

    ``min``, ``max`` and ``mean`` ignore NaN. They are empty for tensors without numbers. The columns from ``passed``
    compare an output with the reference's trace, and are empty if no comparison is stored.
    """
    rows = []
    for head, call, compared in _iter_calls(traces):
        verdict = compared.verdict if compared is not None else None
        outputs = {one.name: one for one in verdict.outputs} if verdict is not None else {}
        kinds = {
            "input": list_arrays(call.inputs),
            "output": list_arrays(call.outputs),
            "assigned": {name: call.state[name] for name in call.assigned},
        }
        for kind, arrays in kinds.items():
            for path, array in arrays.items():
                found = outputs.get(path) if kind != "input" else None
                rows.append([*head, kind, path, *_describe_array(array), *_describe_comparison(found)])
    return ResultTable(_TENSORS, rows)


def _iter_calls(traces: Mapping[str, Path]) -> Iterator[tuple[list[Any], ModuleCall, ComparedCall | None]]:
    for name, folder in traces.items():
        trace = Trace.load(folder)
        stored = read_comparison(folder)
        compared = {one.call: one for one in stored.calls} if stored is not None else {}
        for number, call in enumerate(trace.calls):
            head = [name, trace.module_name, trace.backend, trace.name, number, call.method]
            yield head, call, compared.get(number)


def _find_reason(compared: ComparedCall) -> str:
    return compared.reason or (compared.verdict.reason if compared.verdict is not None else "")


def _describe_array(array: Array) -> tuple[Any, ...]:
    plain = get_dtype_name(array.dtype), list(array.shape), int(array.size)
    if array.dtype == object or not array.size or np.iscomplexobj(array):
        return (*plain, None, None, None)
    values = array.astype(np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        return (*plain, math.nan, math.nan, math.nan)
    with np.errstate(all="ignore"):
        return (*plain, float(values.min()), float(values.max()), float(values.mean()))


def _describe_comparison(found: StoredComparison | None) -> tuple[Any, ...]:
    if found is None:
        return (None,) * len(_COMPARED)
    numbers = (parse_number(getattr(found, name)) for name in _COMPARED[2:])
    return (found.passed, found.mismatches, *numbers)
