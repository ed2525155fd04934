"""Records as `hil run` and `hil bench` write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from hil.controller.records.base import make_record
from hil.controller.records.measurements.bench import BenchRecord
from hil.controller.records.run import RunCase, RunRecord, make_run, make_run_case
from hil.core.text import convert_to_json

_RECORDS = json.loads((Path(__file__).parent / "web_records.json").read_text())
_RUN = _RECORDS["run"]


def run_case(**values: Any) -> RunCase:
    """Return the record of a passing case with changed fields, given as JSON values or records."""
    return make_run_case({**_RUN["cases"][0], **msgspec.to_builtins(values, enc_hook=convert_to_json)})


def run_record(*cases: RunCase, **values: Any) -> RunRecord:
    """Return the record of a run with these cases."""
    return make_run({**_RUN, "cases": [case.to_json() for case in cases], **values})


def bench_record() -> BenchRecord:
    """Return the record of a bench of one program."""
    return make_record(_RECORDS["bench"], BenchRecord)
