"""`hil run --generate` on LiteRT models with separate functions for prompts and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ended
from support.tflite_decoder import save_onnx_decoder, save_tflite_decoder

pytest.importorskip("ai_edge_litert")

SPEC = """
steps = 8
reference = "decoder.onnx"
[[prompt]]
tokens = [1, 4, 2, 6, 3, 0, 5, 2, 1, 1]
forced = [2, 3, 4, 5, 6, 1, 2, 3]
"""


@pytest.fixture
def generate(hil: Callable[..., Ended], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the decoder, and return the exit code and the case."""

    def call(*options: str, spec: str = SPEC, **model: Any) -> tuple[int, dict[str, Any]]:
        save_onnx_decoder(tmp_path / "decoder.onnx")
        (tmp_path / "spec.toml").write_text(spec)
        path = save_tflite_decoder(tmp_path / "decoder.tflite", **model)
        ended = hil("run", path, "--generate", tmp_path / "spec.toml", "--runtime-hw-type", "sim", *options, "--json")
        return ended.code, ended.case

    return call


@pytest.mark.parametrize(
    ("model", "positions"),
    [
        ({}, list(range(8, 18))),  # two calls for 4 tokens, and one for the rest
        pytest.param({"has_logits": True}, list(range(18)), marks=pytest.mark.slow),
        pytest.param({"prefills": []}, list(range(18)), marks=pytest.mark.slow),
        pytest.param({"prefills": [16]}, list(range(9, 18)), marks=pytest.mark.slow),
    ],
)
def test_generation_passes_on_litert(generate, model, positions):
    code, case = generate(**model)
    assert (code, case["outcome"]) == (0, "PASS"), case["reason"]
    assert [row["position"] for row in case["generation"]["positions"]] == positions


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong_layer:position=13,layer=0", "layer 0, step 4, position 13, kv_cache_v_1: at position 13 KL"),
        pytest.param(
            "kv_slot:position=14",
            "slot, step 5, position 14, kv_cache_v_0: at position 14 KL",
            marks=pytest.mark.slow,
        ),
        pytest.param("argmax:position=12", "sampler, step 3, position 12: token ", marks=pytest.mark.slow),
        pytest.param(
            "rope:position=2", "position, in the prompt, position 2, kv_cache_k_0: at", marks=pytest.mark.slow
        ),
        pytest.param("mask:how=show-next", "mask, in the prompt, position 0, kv_cache_v_1: at", marks=pytest.mark.slow),
        pytest.param(
            "overflow:position=2,layer=0", "overflow, layer 0, in the prompt, position 2, kv_c", marks=pytest.mark.slow
        ),
    ],
)
def test_generation_names_fault_on_litert(generate, fault, reason):
    code, case = generate("--fault", fault)
    assert (code, case["outcome"]) == (1, "FAIL")
    assert case["reason"].startswith(reason)


@pytest.mark.slow
def test_generation_names_stale_cache_on_litert(generate):
    code, case = generate("--fault", "stale_cache", spec=SPEC.replace("6, 3, 0, 5, 2, 1, 1]", "6]"))
    assert (code, case["outcome"]) == (1, "UNSTABLE")
    assert case["reason"].startswith("stale cache")
