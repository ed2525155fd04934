"""Records as `hil bisect` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.analysis.bisect.result import describe_verdict, find_exit_code
from hil.controller.records.decisions.bisect import BisectFinding, BisectFindings, BisectRecord, LayerFinding


def layer_finding(
    name: str,
    op: str,
    nodes: Sequence[str],
    depth: int,
    tensors: Sequence[str],
    isolated: BisectFinding | None = None,
    cumulative: BisectFinding | None = None,
) -> LayerFinding:
    """Return the findings of a layer."""
    return LayerFinding(
        name=name,
        op=op,
        nodes=list(nodes),
        depth=depth,
        tensors=list(tensors),
        isolated=isolated,
        cumulative=cumulative,
    )


def bisect_record(layers: Sequence[LayerFinding], whole: BisectFinding | None = None, **more: Any) -> BisectRecord:
    """Return the record of a bisection with these findings, and with changed fields."""
    found = BisectFindings(layers=list(layers), whole=whole, exposed=None)
    values = {
        "schema": 1,
        "model": "net.onnx",
        "artifact_model": "net.onnx",
        "board": "sim",
        "hw_type": "sim",
        "runtime": "iree",
        "flow": "",
        "against": "onnxruntime",
        "notes": [],
        "folder": "",
        "first_isolated": None,
        "first_cumulative": None,
        "verdict": describe_verdict(found),
        "exit_code": find_exit_code(found),
    }
    return BisectRecord(layers=found.layers, whole=whole, exposed=None, **{**values, **more})
