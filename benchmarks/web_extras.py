"""Write two sessions for the benchmark of `hil web`: a case with large tensors, and a bisection of a large model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from hil.controller.records.suite import make_case_record
from hil.controller.workloads.suites.store import HEAD, LINES

TENSOR, GRAPH = "large-tensor", "large-graph"
CASE = "upsampling_full_model"
_SIDE = 500
# Number of different elements. Larger tensors repeat them.
_BLOCK = 25_000_000


def make_extras(root: Path, elements: int, nodes: int) -> None:
    """Write missing sessions below ``extra/``: an output with ``elements`` elements, a graph with ``nodes`` nodes."""
    for name, write in ((TENSOR, _write_tensor), (GRAPH, write_graph)):
        folder, part = root / "extra" / name, root / "extra" / f".{name}"
        if not folder.exists():
            part.mkdir(parents=True, exist_ok=True)
            write(part, elements if name == TENSOR else nodes)
            part.rename(folder)


def _write_tensor(folder: Path, elements: int) -> None:
    """Write float32 outputs and references that differ by noise, and by more in one element."""
    shape = (1, max(1, elements // _SIDE**2), _SIDE, min(_SIDE, elements))
    size = math.prod(shape)
    rng = np.random.default_rng(0)
    block = rng.standard_normal(min(size, _BLOCK), np.float32)
    noise = np.float32(1e-6) * rng.standard_normal(block.size, np.float32)
    for kind, values in (("outputs", block + noise), ("references", block)):
        (folder / "cases" / CASE / kind).mkdir(parents=True, exist_ok=True)
        path = folder / "cases" / CASE / kind / "0-image.npy"
        whole = np.lib.format.open_memmap(path, "w+", np.float32, shape).reshape(-1)
        for start in range(0, size, values.size):
            part = whole[start : start + values.size]
            part[:] = values[: part.size]
        if kind == "outputs":
            whole[size // 3] += 1
    compared = {"name": "image", "passed": False, "dtype": "float32", "shape": list(shape), "elements": size}
    values = {
        **{"id": CASE, "model": "upsampling", "suite": "models", "flow": "iree", "runtime": "iree"},
        **{"outcome": "FAIL", "ended": "FAIL", "folder": f"cases/{CASE}"},
        "outputs": [{**compared, "mismatches": 1, "max_abs": 1.0, "reason": "1 element differs"}],
    }
    (folder / LINES).write_text(json.dumps(make_case_record(values).to_json()) + "\n")
    head = {"schema": 1, "id": TENSOR, "suite": "models", "flow": "iree", "runtime": "iree", "ids": [CASE]}
    (folder / HEAD).write_text(json.dumps({**head, "started": 1.7e9, "finished": 1.7e9, "exit_code": 1}))


def write_graph(folder: Path, nodes: int, name: str = "large") -> None:
    """Write a bisection with the error of each node of a model.

    The model is a chain in which every fifth node also adds the value from five nodes before.

    Args:
        name: name of the model's graph. A new name requires a new layout.
    """
    names = ["x", *(f"t{number}" for number in range(nodes))]
    made = [
        helper.make_node("Add", [names[at], names[at - 4]], [names[at + 1]], f"n{at}")
        if at % 5 == 4
        else helper.make_node("Relu", [names[at]], [names[at + 1]], f"n{at}")
        for at in range(nodes)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", names[-1])]
    graph = helper.make_graph(made, name, values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "large.onnx")
    layers = [_layer(number) for number in range(nodes)]
    record = {"schema": 1, "model": "large.onnx", "board": "rpi5-a", "layers": layers}
    (folder / "bisect.json").write_text(json.dumps(record))


def _layer(number: int) -> Mapping[str, Any]:
    output = {"name": f"t{number}", "passed": True, "max_abs": 1e-6 * number, "sqnr_db": 80.0, "reason": ""}
    alone = {"outcome": "PASS", "reason": "", "outputs": [output]}
    return {"name": f"L{number}", "op": "Relu", "nodes": [f"n{number}"], "depth": 0, "isolated": alone}
