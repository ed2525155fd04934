"""Options and functions that export node values for Model Explorer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.options import combine_options
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.analysis.graphs.model_graph import ModelGraph
    from hil.controller.analysis.graphs.values import NodeValue
    from hil.controller.analysis.layers import Layer
    from hil.controller.storage.isolation.isolated import Isolated
    from hil.core.results import Model

_METRICS = {
    "max_abs": "max-abs",
    "tolerance_ratio": "tolerance",
    "sqnr_db": "sqnr",
    "outcome": "outcome",
    "time_ns": "time",
    "placement": "placement",
}
_SUITE, _BISECT = "suite.json", "bisect.json"


def make_node_data_options(usual: str, *, required: bool = False) -> Callable[[Any], Any]:
    """Return the options ``--node-data`` and ``--by`` with this default."""
    file = click.option(
        "--node-data",
        required=required,
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Export values of the model's nodes for Model Explorer (node data, JSON).",
    )
    by = click.option(
        "--by",
        type=click.Choice(["time"] if usual == "time_ns" else list(_METRICS.values())),
        default=_METRICS[usual],
        show_default=True,
        help="Value that --node-data exports per node.",
    )
    return combine_options(file, by)


def export_values(values: Mapping[str, NodeValue], file: Path, by: str, model: Path | None) -> int:
    """Write node values. Return the number of nodes with a value. Raises UsageError if the number is 0."""
    from hil.controller.storage.run_context import open_context

    if model is None:
        return _write(values, file, by, None)
    with open_context(1) as tools, make_temporary_folder("hil-export-") as scratch:
        graph = _read_graph(model, {}, tools.isolated, Path(scratch) / "graph.log")
    return _write(values, file, by, graph)


def export_layers(
    model: Model, layers: Sequence[Layer], folder: Path, file: Path, by: str, how: Mapping[str, Any]
) -> list[str]:
    """Write values from a stored bisection or suite for a model's layers. Return lines for the user."""
    from hil.controller.analysis.graphs.values import map_layers

    found, missing = _read_stored(folder, model.name, {layer.name: layer.nodes for layer in layers})
    graph = None
    if model.format == "onnx":
        graph = _read_graph(model.path, dict(model.dims), how["isolated"], how["log"])
    count = _write(map_layers(found), file, by, graph)
    note = [f"note: {len(missing)} layers are not in {model.name}, such as {missing[0]}"] if missing else []
    return [f"written: {file}, {count} nodes", *note]


def _read_stored(folder: Path, model: str, nodes: Mapping[str, Sequence[str]]) -> tuple[list[Any], list[str]]:
    from hil.controller.analysis.graphs.values import bisect_layers, read_suite_layers
    from hil.controller.records.base import read_record
    from hil.controller.records.decisions.bisect import BisectRecord
    from hil.controller.workloads.suites.store import SuiteRun

    if (folder / _SUITE).is_file():
        records = [one.to_json() for one in SuiteRun.open(folder).read_records()]
        names = {record["model"] for record in records}
        # In a suite with one model, the model's name may differ from the file's name.
        return read_suite_layers([one for one in records if one["model"] == model or len(names) == 1], nodes)
    if not (folder / _BISECT).is_file():
        raise UsageError(f"no bisection or suite run in {folder}", hint="create a bisection with hil bisect --out DIR")
    record = read_record(folder / _BISECT, BisectRecord)
    way = "isolated" if any(layer.isolated for layer in record.layers) else "cumulative"
    return bisect_layers(record.to_json(), way), []


def _read_graph(model: Path, dims: Mapping[str, int], isolated: Isolated, log: Path) -> ModelGraph:
    from hil.controller.analysis.graphs.model_graph import ModelGraph
    from hil.controller.analysis.graphs.onnx_graph import read_onnx
    from hil.controller.storage.isolation.isolated import convert_errors
    from hil.errors import ImportFailed

    with convert_errors("import", f"reading {model.name}", ImportFailed, f"cannot read {model.name}"):
        arguments = {"path": str(model.absolute()), "dims": dict(dims)}
        return ModelGraph.from_json(isolated.call(read_onnx, arguments, timeout=60.0, log=log))


def _write(values: Mapping[str, NodeValue], file: Path, by: str, graph: ModelGraph | None) -> int:
    from hil.controller.analysis.graphs.node_data import make_node_data
    from hil.core.files import write_atomic

    metric = next(key for key, name in _METRICS.items() if name == by)
    found = make_node_data(values, metric, graph)
    count = sum(value.get_metric(metric) is not None for value in values.values())
    if not count:
        raise UsageError(f"no node has a value for {by}")
    try:
        write_atomic(file, json.dumps(found, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return count
