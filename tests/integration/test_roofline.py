"""Peaks of simulated boards, and rooflines of real profiles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.models import DIGITS
from support.tflite_models import save_layers
from support.vulkan import needs_vulkan

pytestmark = pytest.mark.slow  # the guide covers IREE

DIGITS_MODEL = DIGITS / "digits_cnn.onnx"
SHORT = ("--dtype", "f32", "--min-time", "0.1", "--memory", "8")


@pytest.fixture(autouse=True)
def _own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def read_json(ended: Any) -> dict[str, Any]:
    assert ended.code == 0, ended.out
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_peaks_of_onnxruntime_judge_its_profile(hil):
    (peaks,) = read_json(hil("board", "peak", "sim", "--runtime", "onnxruntime", *SHORT, "--json"))["peaks"]
    assert (peaks["source"], peaks["clock"], peaks["runtime"]) == ("measured", "board", "onnxruntime")
    assert peaks["compute"]["f32"]["rate"] > 1e8
    assert peaks["memory"]["rate"] > 1e8
    assert all(point["p10"] <= point["p50"] <= point["p90"] and point["grade"] for point in peaks["points"])
    assert hil("run", DIGITS_MODEL, "--runtime", "onnxruntime", "--iterations", 30, "--profile", "p").code == 0
    report = read_json(hil("profile", "roofline", "p", "--json"))
    assert report["peaks"]["id"] == peaks["id"]
    convolution = next(row for row in report["rows"] if "conv2" in row["onnx_nodes"])
    assert convolution["flops"] >= 2 * 32 * 16 * 16 * 9
    assert convolution["attained"] == pytest.approx(convolution["shortest_ns"] / convolution["time_ns"])
    assert 0 < report["whole"]["attained"] < 1


def test_tflite_profile_has_the_roofline_of_the_whole_model(hil, tmp_path):
    pytest.importorskip("ai_edge_litert")
    save_layers(tmp_path / "net.tflite")
    assert hil("run", "net.tflite", "--iterations", 30, "--profile", "p", "--allow-blind", "*").code in (0, 1)
    (tmp_path / "kit.toml").write_text("[peak]\nf32_gflops = 1000\nmemory_gb_s = 1000\n")
    report = read_json(hil("profile", "roofline", "p", "--peaks", "kit.toml", "--json"))
    assert report["rows"] == []
    assert report["whole"]["flops"] == 2 * 8 * 64 * 27 + 2 * 8 * 64 * 9 + 10 * 1025
    assert 0 < report["whole"]["attained"] < 1
    assert report["uncounted"]["operators"] == 0


@needs_vulkan
@pytest.mark.timeout(600)
def test_peaks_of_a_gpu_are_device_times(hil):
    (peaks,) = read_json(hil("board", "peak", "sim", "--device", "vulkan", *SHORT, "--json"))["peaks"]
    assert (peaks["clock"], peaks["device"]) == ("device", "vulkan")
    assert "llvmpipe" in peaks["software"] or not peaks["software"]
    assert peaks["compute"]["f32"]["rate"] > 1e7
