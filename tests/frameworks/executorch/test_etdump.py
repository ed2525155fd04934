"""ExecuTorch profiles: traces of runs on a board, and ETDumps from ExecuTorch's tools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from click.testing import CliRunner
from support.executorch_programs import NETS, export, save_pt2

from hil.controller.analysis.profile.store import read_profile
from hil.controller.cli.main import cli
from hil.formats.etdump import read_etdump

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings


def test_profile_lists_operators_per_iteration(tmp_path: Path):
    module, shape = NETS["mlp"]
    path = save_pt2(tmp_path / "mlp.pt2", export(module(), [torch.zeros(shape)]))
    out = tmp_path / "profile"
    run = ["run", str(path), "--runtime", "executorch", "--compile-flag=--backend=portable", "--iterations", "3"]
    result = CliRunner().invoke(cli, [*run, "--profile", str(out), "--out", str(tmp_path / "runs")])
    assert "PASS" in result.output, result.output
    profile = read_profile(out)
    per_run = Counter((row.iteration, row.op) for row in profile.rows if row.kind == "compute")
    assert {iteration for iteration, _ in per_run} == {0, 1, 2}
    assert per_run[0, "addmm.out"] == 4
    assert not profile.notes


def test_etdump_reader_accepts_stock_serializer_output():
    from executorch.devtools.etdump import schema_flatcc as schema
    from executorch.devtools.etdump.serialize import serialize_to_etdump_flatcc

    def event(name: str | None, place: tuple[int, int], start: int, end: int, delegate: str | None = None):
        timed = schema.ProfileEvent(name, *place, -1, delegate, None, start, end)
        return schema.Event(timed, None, None)

    events = [
        event("Method::execute", (-1, -1), 0, 100),
        event("OPERATOR_CALL", (0, 0), 10, 30),
        event("native_call_add.out", (0, 0), 11, 29),
        event("DELEGATE_CALL", (0, 1), 40, 90),
        event(None, (0, 1), 45, 60, "conv_1"),
        event("OPERATOR_CALL", (0, 2), 91, 95),
        schema.Event(None, schema.AllocationEvent(0, 64), None),
    ]
    dump = schema.ETDumpFlatCC(0, [schema.RunData("Execute", -1, [schema.Allocator("planned")], events)])
    found = read_etdump(memoryview(serialize_to_etdump_flatcc(dump)))
    assert [(one.name, one.start, one.end) for one in found if one.is_operation] == [
        ("add.out", 11, 29),
        ("conv_1", 45, 60),
        ("OPERATOR_CALL 2", 91, 95),
    ]
    assert {one.run for one in found} == {0}
