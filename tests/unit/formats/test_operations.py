"""The profile of a package's runtime: written on the board, read on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil.controller.analysis.profile.compilation.estimate import Estimates, Node
from hil.controller.analysis.profile.runtimes.operations_profile import iter_operation_rows
from hil.errors import ImportFailed
from hil.formats.operations import Operation, read_operations, write_operations

CONV = Operation("Conv", 1, 100, 140, ("conv1",))
COPY = Operation("copy", 0, 10, 20, is_overhead=True)


def test_operations_are_read_in_order_of_start(tmp_path: Path):
    assert read_operations(write_operations([CONV, COPY], tmp_path)) == [COPY, CONV]


@pytest.mark.parametrize(
    "change",
    [{"start_ns": 200}, {"end_ns": 1 << 63}, {"run": -1}, {"name": 3}, {"nodes": "conv1"}, {"other": 1}],
)
def test_damaged_operations_are_refused(tmp_path: Path, change: dict[str, object]):
    path = write_operations([CONV], tmp_path)
    document = json.loads(path.read_text())
    document["operations"][0].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(ImportFailed, match=r"operations\.json cannot be read"):
        read_operations(path)


@pytest.mark.parametrize("text", ["", "[]", '{"operations": 3}', '{"operations": [1]}'])
def test_other_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "operations.json").write_text(text)
    with pytest.raises(ImportFailed):
        read_operations(tmp_path / "operations.json")


def test_rows_skip_warmup_and_take_operators_from_model():
    estimates = Estimates({"conv1": Node("conv1", "Conv", (), (), 8)})
    rows = list(iter_operation_rows([COPY, CONV], estimates, runtime="npx", run="r", board="b", warmup=1))
    (row,) = rows
    assert (row.op, row.iteration, row.kind, row.duration_ns) == ("Conv", 0, "compute", 40)
    assert (row.onnx_nodes, row.op_types, row.flops, row.runtime) == (("conv1",), ("Conv",), 8, "npx")
