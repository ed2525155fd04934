"""A bundle stores the control of its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from hil.bundles.manifest import controls_json, take_controls
from hil.compare.control import control_of
from hil.errors import UsageError

EXACT = np.arange(20, dtype=np.float32)
RUNS = [EXACT + np.float32(0.01 * number) for number in range(1, 5)]
CONTROL = {"y": control_of("float16", "test", EXACT, RUNS, RUNS)}


def test_controls_survive_manifest_round_trip():
    case = {"name": "x", **controls_json(CONTROL)}
    assert take_controls(case, "case") == ({"name": "x"}, CONTROL)
    assert take_controls({"name": "x", **controls_json({})}, "case") == ({"name": "x"}, {})


@pytest.mark.parametrize("damaged", [[], {"y": []}, {"y": {"arithmetic": "float16"}}, {"y": None}, "float16"])
def test_take_controls_rejects_damaged_control(damaged):
    with pytest.raises(UsageError, match="control"):
        take_controls({"control": damaged}, "case")
