"""The text of a failed test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hil.compare.verdict import compare
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.suite import CaseRecord
from hil.core.results import Outcome, RunResult
from hil.errors import BoardLost
from hil.testing.pytest_plugin.failure_text import describe_failure, format_commands

NAMES = {"id": "m", "model": "m", "suite": "s", "flow": "f", "runtime": "iree"}


def test_failure_text_shows_quantized_and_float_comparison():
    ours = RunResult("sim", {"y": np.ones(4, np.float32)})
    verdicts = (compare(ours, RunResult("quantised reference", dict(ours.outputs))),)
    plain = compare(ours, RunResult("float reference", {"y": np.zeros(4, np.float32)}))
    case = Case("m", Path("m.onnx"), Options(), Path(), outcome=Outcome.FAIL, verdicts=verdicts, plain_verdict=plain)
    text = describe_failure(case, CaseRecord(**NAMES, outcome="FAIL", ended="FAIL", message="too far"))
    assert text.startswith("too far") and "quantised reference" in text and "float reference" in text


def test_failure_text_of_repeated_error_has_single_line():
    case = Case("m", Path("m.onnx"), Options(), Path(), outcome=Outcome.BOARD_LOST, error=BoardLost("gone", board="b"))
    record = CaseRecord(**NAMES, outcome="BOARD_LOST", ended="BOARD_LOST", message="gone", hint="look", stage="run")
    assert describe_failure(case, record).splitlines() == [
        "BOARD_LOST: gone",
        "  stage: run",
        "  board: b",
        "  hint: look",
    ]
    assert describe_failure(case, record, again=True) == "BOARD_LOST: gone"


def test_failure_commands_quote_path_with_space(tmp_path: Path):
    record = CaseRecord(**NAMES, outcome="FAIL", ended="FAIL", folder=str(tmp_path / "my out"), repeat="pytest")
    (tmp_path / "my out").mkdir()
    assert format_commands(record, tmp_path).splitlines()[-1] == "stored in:     'my out'"


def test_failure_commands_show_path_of_compiler_ir(tmp_path: Path):
    record = CaseRecord(**NAMES, outcome="FAIL", ended="FAIL", repeat="pytest", directories={"ir": "../../ir/m"})
    assert format_commands(record, tmp_path, tmp_path / "out/sim").splitlines()[-1] == "ir:            ir/m"
