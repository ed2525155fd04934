"""What a test that failed says."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hil.controller.compare import compare
from hil.controller.pipeline import Case, Options
from hil.controller.suite.record import CaseRecord
from hil.results import Outcome, RunResult
from hil.testing.pytest_plugin.telling import failure


def test_a_quantised_model_that_leaves_the_float_one_shows_both_comparisons():
    ours = RunResult("sim", {"y": np.ones(4, np.float32)})
    case = Case("m", Path("m.onnx"), Options(), Path(), outcome=Outcome.FAIL)
    case.verdicts = [compare(ours, RunResult("quantised reference", dict(ours.outputs)))]
    case.plain_verdict = compare(ours, RunResult("float reference", {"y": np.zeros(4, np.float32)}))
    text = failure(case, CaseRecord("m", "m", "s", "f", "iree", "FAIL", "FAIL", message="too far"))
    assert text.startswith("too far") and "quantised reference" in text and "float reference" in text
