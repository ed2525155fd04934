"""Stored bisection of a model whose nodes have name scopes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from support.web import write_record

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def list_names(blocks: int, layers: int) -> list[str]:
    """Return the nodes of a chain of blocks, each with layers of three nodes."""
    return [
        f"/net/block{block}/layer{layer}/{op}"
        for block in range(blocks)
        for layer in range(layers)
        for op in ("MatMul", "Add", "Relu")
    ]


def write_scoped_bisection(root: Path, wrong: dict[str, float], *, blocks: int = 10, layers: int = 8) -> list[str]:
    """Write a model and its bisection, named ``scoped``. Return the names of its nodes.

    Args:
        wrong: node -> error of its layer's output, whose reference is 1. Other nodes have the error 1e-7.
    """
    names = list_names(blocks, layers)
    tensors = ["x", *(f"t{place}" for place in range(len(names)))]
    nodes = [helper.make_node("Relu", [tensors[at]], [tensors[at + 1]], name) for at, name in enumerate(names)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in (tensors[0], tensors[-1])]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), root / "scoped.onnx"
    )
    found = [_make_layer(name, tensors[at + 1], wrong.get(name)) for at, name in enumerate(names)]
    write_record(
        root / "scoped" / "bisect.json", {"schema": 1, "model": "scoped.onnx", "board": "sim", "layers": found}
    )
    return names


def _make_layer(name: str, tensor: str, error: float | None) -> dict[str, Any]:
    output = {"name": tensor, "passed": error is None, "max_abs": error or 1e-7, "sqnr_db": 80.0, "elements": 4}
    output |= {"mismatches": int(error is not None), "tolerance": TOLERANCE, "reason": "off" if error else ""}
    if error is not None:
        output["worst_values"] = [1.0 + error, 1.0]
    finding = {"outcome": "PASS" if error is None else "FAIL", "reason": output["reason"], "outputs": [output]}
    return {"name": f"L{name}", "op": "Relu", "nodes": [name], "depth": 0, "isolated": finding, "cumulative": None}
