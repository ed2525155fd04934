"""Resuming a reduction, without a board."""

from __future__ import annotations

from typing import Any

from hil.controller.records.decisions.reduce import ReduceRecord, ReduceTrial
from hil.controller.storage.runs import seal, write_json
from hil.controller.workloads.reduce.reducing import reduce_model
from hil.controller.workloads.reduce.trials import RECORD
from hil.core.results import Outcome


def test_finished_reduction_returns_stored_result(tmp_path):
    result = ReduceTrial(key="result", text="", nodes=1, outcome=Outcome.RUN_CRASH, reason="", same=True, seconds=1.0)
    record = ReduceRecord(
        schema=1,
        id="r",
        created=0.0,
        request={},
        model="m.onnx",
        max_runs=3,
        trials=[result],
        notes=["stopped after 3 runs"],
        finished=True,
        exit_code=3,
    )
    seal(tmp_path, record.request)
    write_json(tmp_path / RECORD, record.to_json())
    unused: Any = None
    assert reduce_model(unused, context=unused, screen=unused, resume=tmp_path) == record
