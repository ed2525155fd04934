"""The models of the tester, where torchvision is installed: small ones end to end."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("executorch")
pytest.importorskip("torchvision")


@pytest.mark.slow
def test_models_of_random_weights_are_judged_by_the_size_of_their_outputs(hil, tmp_path):
    out = tmp_path / "out"
    names = ("mobilenet_v2-static_shapes-float32", "squeezenet1_1-static_shapes-float32")
    ended = hil("suite", "run", "@models", "--flow", "xnnpack", *(f"--filter=={name}" for name in names), "--out", out)
    records = {one["id"]: one for one in map(json.loads, (out / "results.jsonl").read_text().splitlines())}
    assert {name: record["ended"] for name, record in records.items()} == dict.fromkeys(names, "PASS"), ended.out
    (output,) = records[names[0]]["outputs"]
    # Its outputs are of about 1e-9: what is right for numbers near 1 could not fail.
    assert output["tolerance"]["atol"] < 1e-10
