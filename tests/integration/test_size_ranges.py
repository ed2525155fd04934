"""Size ranges of open dimensions on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

pytestmark = pytest.mark.ci


@pytest.fixture
def from_ten(tmp_path: Path) -> Path:
    """A model that returns its input up to 9 elements, and random numbers above."""
    nodes = [
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Less", ["size", "ten"], ["is_small"]),
        helper.make_node("RandomNormalLike", ["x"], ["r"]),
        helper.make_node("Where", ["is_small", "x", "r"], ["y"]),
    ]
    sides = [[(name, TensorProto.FLOAT, ["S"])] for name in "xy"]
    return save_model(tmp_path / "net.onnx", nodes, *sides, [numpy_helper.from_array(np.array([10]), "ten")])


def test_run_finds_smallest_failing_size(hil, simulator, from_ten, tmp_path):
    ended = hil("run", from_ten, "--runtime", "onnxruntime", "--board", simulator, "--dim", "S=1..64", "--json")
    document = json.loads(ended.out)
    assert ended.code == 1
    assert document["smallest_failing"] == [{"model": "net", "dims": {"S": 10}, "case": "net_S-10", "outcome": "BLIND"}]
    outcomes = {case["name"]: case["outcome"] for case in document["cases"]}
    assert (outcomes["net_S-9"], outcomes["net_S-10"], outcomes["net_S-64"]) == ("PASS", "BLIND", "BLIND")
    assert len(outcomes) <= 12 + 6
    stored = json.loads((tmp_path / document["folder"] / "run.json").read_text())
    assert stored["smallest_failing"] == document["smallest_failing"]
    resumed = json.loads(hil("run", "--resume", document["id"], "--json").out)
    assert resumed["cases"] == document["cases"] and resumed["smallest_failing"] == document["smallest_failing"]


@pytest.mark.parametrize("verb", ["bench", "bisect", "compile"])
def test_commands_without_ranges_reject_dim_range(hil, from_ten, verb):
    ended = hil(verb, from_ten, "--dim", "S=1..64", "--json")
    assert ended.code == 2 and "--dim S=1..64 is a range, expected a single size" in ended.out
