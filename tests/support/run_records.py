"""Records of runs as `hil run` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hil.controller.records.run import RunCase, RunRecord, make_run, make_run_case

_RUN = json.loads((Path(__file__).parent / "web_records.json").read_text())["run"]


def run_case(**values: Any) -> RunCase:
    """Return the record of a passing case with changed fields, given as JSON values or records."""
    plain = {name: value.to_json() if hasattr(value, "to_json") else value for name, value in values.items()}
    return make_run_case({**_RUN["cases"][0], **plain})


def run_record(*cases: RunCase, **values: Any) -> RunRecord:
    """Return the record of a run with these cases."""
    return make_run({**_RUN, "cases": [case.to_json() for case in cases], **values})
