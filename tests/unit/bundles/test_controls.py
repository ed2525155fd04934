"""A bundle stores the control of its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from hil.bundles.manifest import encode_controls, take_controls
from hil.compare.control import measure_control
from hil.errors import UsageError

EXACT = np.arange(20, dtype=np.float32)
RUNS = [EXACT + np.float32(0.01 * number) for number in range(1, 5)]
CONTROL = {"y": measure_control("float16", "test", EXACT, RUNS, RUNS)}


def test_controls_survive_manifest_round_trip():
    case = {"name": "x", **encode_controls(CONTROL)}
    assert take_controls(case, "case") == ({"name": "x"}, CONTROL)
    assert take_controls({"name": "x", **encode_controls({})}, "case") == ({"name": "x"}, {})


@pytest.mark.parametrize("damaged", [[], {"y": []}, {"y": {"arithmetic": "float16"}}, {"y": None}, "float16"])
def test_take_controls_rejects_damaged_control(damaged):
    with pytest.raises(UsageError, match="control"):
        take_controls({"control": damaged}, "case")
