"""Count the operations and bytes of a model from its shapes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.analysis.profile.compilation.estimate import Estimates, Node, estimate
from hil.controller.analysis.roofline.tflite_shapes import read_tflite
from hil.controller.models.compiling import CachedCall, call_isolated
from hil.controller.records.measurements.roofline import ModelWork, OperatorWork
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.core.files import read_file
from hil.core.installed import get_version
from hil.core.results import Model
from hil.errors import ImportFailed, UsageError
from hil.formats.litert import PACKAGE

if TYPE_CHECKING:
    from typing_extensions import Unpack

COUNTED_FORMATS = ("onnx", "tflite")
_FILE = "operators.json"
# Increase this when `read_tflite` returns a different result for the same model.
_VERSION = 1


def count_model(model: Model, **how: Unpack[CachedCall]) -> ModelWork:
    """Count the work of an ONNX or TFLite model.

    Raises:
        UsageError: the model has another format.
        ImportFailed: the operators cannot be read.
    """
    if model.format == "onnx":
        estimates = estimate(model, **how)
        return sum_estimates(model, estimates, {name: node.op_type for name, node in estimates.nodes.items()})
    if model.format == "tflite":
        return sum_estimates(model, *_estimate_tflite(model, how))
    raise UsageError(
        f"cannot count the operations of {model.path.name}: the format is {model.format}",
        hint=f"counted: {', '.join(COUNTED_FORMATS)}; hil run MODEL --profile DIR counts the dispatches of IREE",
    )


def sum_estimates(model: Model, estimates: Estimates, op_types: dict[str, str]) -> ModelWork:
    """Return the work of a model's operators.

    Args:
        op_types: name of a node -> operator in the model's format.
    """
    operators = []
    for name, op_type in op_types.items():
        if op_type == "Constant":
            continue
        found = estimates.estimate([name])
        operators.append(
            OperatorWork(name=name, op_type=op_type, flops=found.flops, bytes=found.bytes, shapes=found.shapes)
        )
    missing = Counter(one.op_type for one in operators if one.flops is None or one.bytes is None)
    counted = [one for one in operators if one.flops is not None and one.bytes is not None]
    return ModelWork(
        model=model.name,
        function=model.function,
        flops=sum(one.flops or 0 for one in counted),
        bytes=sum(one.bytes or 0 for one in counted),
        model_bytes=estimates.estimate(estimates.nodes).bytes,
        operators=operators,
        not_counted=dict(missing),
    )


def _estimate_tflite(model: Model, how: CachedCall) -> tuple[Estimates, dict[str, str]]:
    """Return the estimates of a TFLite model, and the operators by name. Nodes have ONNX operators if these exist."""

    def make(folder: Path) -> None:
        arguments = {"model": str(model.path.absolute()), "function": model.function}
        with convert_errors("", "reading the model's operators", ImportFailed, "the operators cannot be read"):
            found = call_isolated(read_tflite, arguments, how)
        (folder / _FILE).write_text(json.dumps(found))

    parts = {"model": model.digest, "function": model.function, "litert": get_version(PACKAGE), "version": _VERSION}
    entry, _ = how["cache"].get_or_make(Cache.key("operators", **parts), {"model": model.name, "what": "shapes"}, make)
    document = json.loads(read_file(entry / _FILE))
    nodes = {
        name: Node(name, like or op_type, ins, outs, flops)
        for name, op_type, ins, outs, flops, like in document["nodes"]
    }
    op_types = {node[0]: node[1] for node in document["nodes"]}
    values = {name: (text, size) for name, (text, size) in document["values"].items()}
    return Estimates(nodes, values, frozenset(document["results"])), op_types
