"""Small models of the tester end to end, if torchvision is installed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("executorch")
pytest.importorskip("torchvision")


@pytest.mark.slow
def test_tolerance_scales_with_small_model_outputs(hil, tmp_path):
    out = tmp_path / "out"
    names = ("mobilenet_v2-static_shapes-float32", "squeezenet1_1-static_shapes-float32")
    ended = hil("suite", "run", "@models", "--flow", "xnnpack", *(f"--filter=={name}" for name in names), "--out", out)
    records = {one["id"]: one for one in map(json.loads, (out / "results.jsonl").read_text().splitlines())}
    assert {name: record["ended"] for name, record in records.items()} == dict.fromkeys(names, "PASS"), ended.out
    (output,) = records[names[0]]["outputs"]
    # Outputs are about 1e-9; a tolerance for values near 1 could not fail.
    assert output["tolerance"]["atol"] < 1e-10
